"""Omniglot's small background sets as an open-set problem, with MNIST out of distribution; not in the paper.

Small enough for a CPU, and still many classes with few images each, none of which is seen in training.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.data.checks import fetch, require
from benchmarks.data.fashionmnist import mnist_images
from benchmarks.data.options import LoadOptions
from benchmarks.data.split import RetrievalData, TensorSplit
from contrastive_curvature.errors import InputError, expected

__all__ = ["load_omniglot"]

_SIDE = 105
_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
_ARCHIVES = {
    "images_background_small1.zip": "e704a628b5459e08445c13499850abc4",
    "images_background_small2.zip": "b75a71a51d3b13f821f212756fe481fd",
}
"""Name and MD5 of what is downloaded; a copy that is there is used as it is. The MD5 sums are those of the files of the
repository of Lake et al."""

Drawings = dict[tuple[str, str], list[bytes]]


def load_omniglot(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/omniglot/images_background_small{1,2}.zip`` (Lake et al. 2015) and MNIST's test images.

    Training on the five alphabets of the first archive, test on those of the second that are not in the first: Greek
    and Latin are in both. A class is a character. The 105x105 drawings are scaled down by area, with bright ink on
    black as in MNIST.

    Args:
        root: The data root.
        options: ``download`` and ``image_size`` (28, at most 105) count.

    Returns:
        2720 training and 2120 test images (1, 28, 28) of 136 and 106 classes.

    Raises:
        InputError: Files are missing or damaged, or the images would have to grow.
    """
    size = 28 if options.image_size is None else options.image_size
    if size > _SIDE:
        raise InputError(expected("image_size", f"at most {_SIDE}, the drawings' own", size))
    folder = root / "omniglot"
    first, second = (folder / name for name in _ARCHIVES)
    _ensure(folder, options.download)
    ood, digits = mnist_images(root, "test", options.download)
    train, other = _read(first), _read(second)
    seen = {alphabet for alphabet, _ in train}
    test = {key: drawings for key, drawings in other.items() if key[0] not in seen}
    if not test:
        raise InputError(expected(str(second), f"alphabets that are not in {first.name}", f"only {sorted(seen)}"))
    return RetrievalData(
        name="omniglot",
        title="Omniglot",
        ood_title="MNIST",
        train=_split(train, 0, size),
        # labels of their own, so that no training class can be taken for a test class
        test=_split(test, len(train), size),
        ood=TensorSplit(_scale(ood, size), digits),
        open_set=True,
    )


def _ensure(folder: Path, download: bool) -> None:
    call = f"load_data('omniglot', {str(folder.parent)!r}, download=True)"
    how = f'To fetch them, from {_URL}: python -c "from benchmarks.data import load_data; {call}"'
    if download:
        from torchvision.datasets.utils import download_url

        for name, md5 in _ARCHIVES.items():
            if not (folder / name).exists():
                fetch(partial(download_url, _URL + name, folder, name, md5), name, how)
    require(folder, list(_ARCHIVES), how)


def _read(path: Path) -> Drawings:
    """The PNG files of every character: FOLDER/ALPHABET/CHARACTER/*.png, in the order of their names."""
    found: Drawings = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                parts = PurePosixPath(name).parts
                if len(parts) == 4 and name.endswith(".png") and parts[0] == path.stem:
                    found.setdefault((parts[1], parts[2]), []).append(archive.read(name))
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise InputError(expected(str(path), "a zip archive", f"a damaged one ({error})", "Fetch it again.")) from None
    if not found:
        wanted = f"files {path.stem}/ALPHABET/CHARACTER/*.png"
        raise InputError(expected(str(path), wanted, "none", "Fetch it again."))
    return found


def _split(drawings: Drawings, first_label: int, size: int) -> TensorSplit:
    pixels = torch.cat([torch.stack([_ink(png, key) for png in pngs]) for key, pngs in drawings.items()])
    counts = torch.tensor([len(pngs) for pngs in drawings.values()])
    labels = torch.arange(first_label, first_label + len(drawings)).repeat_interleave(counts)
    return TensorSplit(_scale(pixels, size), labels)


def _ink(png: bytes, character: tuple[str, str]) -> Tensor:
    """Ink 255, paper 0, shape (1, 105, 105)."""
    try:
        with Image.open(io.BytesIO(png)) as image:
            drawing = torch.from_numpy(255 - np.asarray(image.convert("L"))).unsqueeze(0)
    except OSError as error:
        came = f"one that cannot be read ({error})"
        raise InputError(expected("/".join(character), "a PNG image", came, "Fetch the archive again.")) from None
    if drawing.shape != (1, _SIDE, _SIDE):
        wanted = f"drawings of {_SIDE}x{_SIDE} pixels"
        raise InputError(expected("/".join(character), wanted, tuple(drawing.shape[1:]), "Fetch the archive again."))
    return drawing


def _scale(pixels: Tensor, size: int) -> Tensor:
    if pixels.shape[-1] == size:
        return pixels
    # By area where it shrinks, so that thin strokes fade and do not break; MNIST may have to grow.
    mode = "area" if size < pixels.shape[-1] else "bilinear"
    return interpolate(pixels.float(), size=(size, size), mode=mode).round().to(torch.uint8)

"""Omniglot as an open-set problem (Lake et al. 2015), in small and as a whole; not in the paper.

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

from benchmarks.experiments.data.files import LoadOptions, fetch, require
from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from contrastive_curvature.errors import InputError

_SIDE = 105
_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
_SMALL = {
    "images_background_small1.zip": "e704a628b5459e08445c13499850abc4",
    "images_background_small2.zip": "b75a71a51d3b13f821f212756fe481fd",
}
_FULL = {
    "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
}
"""Name and MD5 of what is downloaded; a copy that is there is used as it is. The MD5 sums are those of the files of the
repository of Lake et al."""

Drawings = dict[tuple[str, str], list[bytes]]


def load_omniglot(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/omniglot/images_background_small{1,2}.zip``.

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
    return _load("omniglot", "Omniglot", _SMALL, root, options)


def load_omniglot_full(root: Path, options: LoadOptions) -> RetrievalData:
    """The same of ``ROOT/omniglot/images_background.zip`` and ``images_evaluation.zip``, the published split.

    Returns:
        19,280 training and 13,180 test images (1, 28, 28) of 964 and 659 classes.
    """
    return _load("omniglot_full", "Omniglot, full", _FULL, root, options)


def _load(name: str, title: str, archives: dict[str, str], root: Path, options: LoadOptions) -> RetrievalData:
    size = 28 if options.image_size is None else options.image_size
    if size > _SIDE:
        raise InputError("image_size", f"at most {_SIDE}, the drawings' own", size)
    folder = root / "omniglot"
    first, second = (folder / archive for archive in archives)
    _ensure(name, folder, archives, options.download)
    train, other = _read(first), _read(second)
    seen = {alphabet for alphabet, _ in train}
    test = {key: drawings for key, drawings in other.items() if key[0] not in seen}
    if not test:
        raise InputError(str(second), f"alphabets that are not in {first.name}", f"only {sorted(seen)}")
    # Labels of their own, so that no training class can be taken for a test class.
    parts = _split(train, 0, size), _split(test, len(train), size)
    return RetrievalData(name, title, "", *parts, open_set=True)


def _ensure(name: str, folder: Path, archives: dict[str, str], download: bool) -> None:
    call = f"load_data({name!r}, {str(folder.parent)!r}, download=True)"
    how = f'To fetch them, from {_URL}: python -c "from benchmarks.experiments.data import load_data; {call}"'
    if download:
        from torchvision.datasets.utils import download_url

        for file, md5 in archives.items():
            if not (folder / file).exists():
                fetch(partial(download_url, _URL + file, folder, file, md5), file, how)
    require(folder, list(archives), how)


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
        raise InputError(str(path), "a zip archive", f"a damaged one ({error})", "Fetch it again.") from None
    if not found:
        wanted = f"files {path.stem}/ALPHABET/CHARACTER/*.png"
        raise InputError(str(path), wanted, "none", "Fetch it again.")
    return found


def _split(drawings: Drawings, first_label: int, size: int) -> TensorSplit:
    # One class after the other: the whole set in full size would take a gigabyte.
    parts = [_shrink(torch.stack([_ink(png) for png in pngs]), size) for pngs in drawings.values()]
    counts = torch.tensor([len(pngs) for pngs in drawings.values()])
    labels = torch.arange(first_label, first_label + len(drawings)).repeat_interleave(counts)
    return TensorSplit(torch.cat(parts), labels)


def _ink(png: bytes) -> Tensor:
    """Ink 255, paper 0, shape (1, 105, 105)."""
    with Image.open(io.BytesIO(png)) as image:
        return torch.from_numpy(255 - np.asarray(image.convert("L"))).unsqueeze(0)


def _shrink(pixels: Tensor, size: int) -> Tensor:
    if size == _SIDE:
        return pixels
    # By area, so that thin strokes fade and do not break.
    return interpolate(pixels.float(), size=(size, size), mode="area").round().to(torch.uint8)

"""The data sets of the tables: images to train with, to retrieve, and out of distribution.

Of the data root: ``FashionMNIST/raw`` and ``MNIST/raw`` (IDX files, gzipped or not), and ``omniglot`` with the archives
of Lake et al. (2015). The digits come with scikit-learn.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, Sampler

from contrastive_curvature.errors import InputError

OMNIGLOT = {
    "omniglot": {
        "images_background_small1.zip": "e704a628b5459e08445c13499850abc4",
        "images_background_small2.zip": "b75a71a51d3b13f821f212756fe481fd",
    },
    "omniglot_full": {
        "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
        "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
    },
}
"""Training and test archive, with the MD5 of what is downloaded. The second is the published split."""
_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
_SIDE = 105
_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_IDX = {"fashionmnist": ("FashionMNIST", _CLOTHES), "mnist": ("MNIST", tuple("0123456789"))}
DATASETS = ("digits", *_IDX, *OMNIGLOT)
_ORDERS = [order for order in permutations(range(4)) if all(new % 2 != old % 2 for new, old in enumerate(order))]
"""The four orders in which every quarter changes sides. (Swapping top and bottom only would leave a 1 a 1.)"""


class Split(Dataset[tuple[Tensor, Tensor]]):
    """N images with the labels of their classes.

    Args:
        pixels: uint8, shape (N, C, H, W).
        targets: int64, shape (N,).
        white: The largest value that a pixel can have.
    """

    def __init__(self, pixels: Tensor, targets: Tensor, white: int = 255) -> None:
        self.pixels, self.targets, self.white = pixels, targets, white

    def __len__(self) -> int:
        return len(self.targets)

    def images(self, rows: Sequence[int]) -> Tensor:
        """Images in [0, 1] (paper, G.1), float32."""
        # channels_last: convolutions on the CPU run in less than half the time, and no slower on a GPU.
        pixels = self.pixels[torch.as_tensor(rows)].float() / self.white
        return pixels.contiguous(memory_format=torch.channels_last)

    def take(self, rows: Tensor) -> Split:
        return Split(self.pixels[rows], self.targets[rows], self.white)

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        return self.images(rows), self.targets[rows]


@dataclass(frozen=True)
class RetrievalData:
    """What an experiment needs of its data sets.

    Args:
        title: As in a table.
        train: Training images.
        test: Queries, each retrieved among the others.
        ood: Images out of distribution.
        ood_title: Their title.
        open_set: Whether no class of the queries occurs in training.
        classes: Names of the queries' classes, where there are few.
        calibration: Known images that nothing was trained on, for thresholds; ``None`` where none are held out.
    """

    title: str
    train: Split
    test: Split
    ood: Split
    ood_title: str
    open_set: bool = False
    classes: tuple[str, ...] = ()
    calibration: Split | None = None

    def fingerprint(self) -> str:
        """A hash of all images and labels, hexadecimal."""
        code = hashlib.sha256()
        for part in (self.train, self.test, self.ood):
            code.update(part.pixels.numpy().tobytes() + part.targets.numpy().tobytes())
        return code.hexdigest()


def loader(images: Dataset[Any], size: int, sampler: Sampler[int] | None = None, **more: Any) -> DataLoader[Any]:
    """Batches of images and labels, in their order unless something else is said."""
    # A generator of its own: torch's loader draws a number at its start, which would move the global random state.
    more = {"generator": torch.Generator(), "collate_fn": _same, **more}
    return DataLoader(images, batch_size=size, sampler=sampler, **more)


def _same(batch: Any) -> Any:
    return batch


def load_data(
    name: str, root: Path, train_size: int | None = None, test_size: int | None = None, download: bool = False
) -> RetrievalData:
    """Read a data set, with images that are out of distribution.

    A smaller part is a random choice of images that is the same in every run; so runs with different seeds tell how
    training and sampling vary. In open-set data a choice may leave queries without a second image of their class.

    Args:
        name: One of :data:`DATASETS`.
        root: The data root.
        train_size: Training images; ``None`` for all.
        test_size: Queries, and images out of distribution; ``None`` for all.
        download: Whether files that are missing may be fetched, with verified checksums.
    """
    if name == "digits":
        data = _digits()
    elif name in _IDX:
        title, classes = _IDX[name]
        other = "mnist" if name == "fashionmnist" else "fashionmnist"
        parts = (read_idx(name, root, part, download) for part in ("train", "t10k"))
        data = RetrievalData(title, *parts, read_idx(other, root, "t10k", download), _IDX[other][0], classes=classes)
    else:
        title = "Omniglot" if name == "omniglot" else "Omniglot, full"
        parts = read_omniglot(name, root, download=download)
        data = RetrievalData(title, *parts, read_idx("mnist", root, "t10k", download), "MNIST", open_set=True)
    return replace(
        data,
        train=_some(data.train, train_size),
        **{part: _some(getattr(data, part), test_size) for part in ("test", "ood")},
    )


def _some(split: Split, size: int | None) -> Split:
    if size is None or size >= len(split):
        return split
    return split.take(torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:size])


def _digits() -> RetrievalData:
    """A fixed split with as many test images of each class; out of distribution they have their quarters shuffled."""
    from sklearn.datasets import load_digits  # costs a second; the other data sets do without
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels, classes, test_size=600, stratify=classes, random_state=0)
    train_x, test_x = (torch.from_numpy(part).to(torch.uint8).view(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.from_numpy(part).long() for part in parts[2:])
    train, test = Split(train_x, train_y, 16), Split(test_x, test_y, 16)
    shuffled = Split(shuffle_quarters(test_x, torch.Generator().manual_seed(0)), test_y, 16)
    return RetrievalData("Digits", train, test, shuffled, "digits with shuffled quarters", classes=tuple("0123456789"))


def shuffle_quarters(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cut each image into quarters, and put them back so that each left one stands on the right, and the reverse.

    Brightness, contrast and every stroke inside a quarter stay exactly the same; only the arrangement, which makes a
    digit a digit, is destroyed. So a detector cannot win by looking at the histogram of an image, as it can against
    noise, inverted images or digits of another data set, and the images are no digits any more, as rotated or shifted
    ones still are (and as mosaics of quarters of different digits, each in its own place, often are).

    Args:
        images: Shape (N, C, H, W), H and W even.
        generator: Chooses the order of each image.
    """
    n, channels, height, width = images.shape
    half = (height // 2, width // 2)
    quarters = images.reshape(n, channels, 2, half[0], 2, half[1]).permute(0, 2, 4, 1, 3, 5).reshape(n, 4, -1)
    order = torch.tensor(_ORDERS)[torch.randint(len(_ORDERS), (n,), generator=generator)]
    moved = quarters.gather(1, order.unsqueeze(2).expand_as(quarters))
    back = moved.reshape(n, 2, 2, channels, *half).permute(0, 3, 1, 4, 2, 5)
    return back.reshape(n, channels, height, width)


def read_idx(name: str, root: Path, part: str, download: bool = False) -> Split:
    """Read the images and labels of one part, ``"train"`` or ``"t10k"``, of ``"mnist"`` or ``"fashionmnist"``.

    The format: two zero bytes, the type code (8: unsigned bytes), the number of axes, then each axis' length as a
    big-endian 32-bit number, then the values, last axis fastest.
    """
    title = _IDX[name][0]
    if download and not (root / title / "raw").is_dir():
        import torchvision

        getattr(torchvision.datasets, title)(root, download=True)
    arrays = []
    for kind in ("images-idx3", "labels-idx1"):
        path = root / title / "raw" / f"{part}-{kind}-ubyte"
        if packed := not path.is_file():
            path = path.with_name(f"{path.name}.gz")
        _require(path, f"torchvision.datasets.{title}")
        content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        start = 4 + 4 * content[3]
        shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
        if content[:3] != bytes([0, 0, 8]) or len(content) != start + math.prod(shape):
            raise InputError(str(path), "an IDX file of unsigned bytes, whole", "another", "Fetch it again.")
        # bytearray: torch wants memory that it may write to.
        arrays.append(torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape))
    return Split(arrays[0].unsqueeze(1), arrays[1].long())


def read_omniglot(name: str, root: Path, size: int = 28, download: bool = False) -> list[Split]:
    """Read Omniglot as an open-set problem: the alphabets of the first archive train, those only in the second test.

    A class is a character. The 105 x 105 drawings are scaled down by area, with bright ink on black as in MNIST. Labels
    of the test classes are those after the training classes.
    """
    splits: list[Split] = []
    seen: set[str] = set()
    first = 0
    for archive, md5 in OMNIGLOT[name].items():
        path = root / "omniglot" / archive
        if download and not path.exists():
            from torchvision.datasets.utils import download_url

            download_url(_URL + archive, path.parent, archive, md5)
        _require(path, f"{_URL}{archive}")
        drawings: dict[tuple[str, str], list[Tensor]] = {}
        with zipfile.ZipFile(path) as opened:
            for file in sorted(opened.namelist()):
                parts = PurePosixPath(file).parts
                if len(parts) == 4 and file.endswith(".png") and parts[1] not in seen:
                    drawings.setdefault((parts[1], parts[2]), []).append(_ink(opened.read(file), size))
        labels = [torch.full((len(ink),), first + at) for at, ink in enumerate(drawings.values())]
        splits.append(Split(torch.cat([torch.stack(ink) for ink in drawings.values()]), torch.cat(labels)))
        seen, first = {alphabet for alphabet, _ in drawings}, len(drawings)
    return splits


def _ink(png: bytes, size: int) -> Tensor:
    """Ink 255, paper 0, shape (1, size, size)."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = torch.from_numpy(255 - np.asarray(image.convert("L"))).view(1, 1, _SIDE, _SIDE)
    # By area, so that thin strokes fade and do not break.
    return pixels[0] if size == _SIDE else interpolate(pixels.float(), size=(size, size), mode="area").round().byte()[0]


def _require(path: Path, source: str) -> None:
    if not path.is_file():
        raise InputError("--data-root", str(path), "no such file", f"It is from {source}; --download fetches it.")

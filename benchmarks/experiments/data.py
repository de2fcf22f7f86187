"""The data sets of the tables: images to train with, to retrieve, and out of distribution.

:data:`DATASETS` has them all. A reader takes the data root and a part (``"train"``, ``"test"`` or ``"gallery"``). Sets
that are one file are held in memory; photographs are read from their files when they are asked for.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import permutations
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.transfer.feature_file import load_features
from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError
from contrastive_curvature.pairs import RelationFunction

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
_DIGITS = tuple("0123456789")
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of the channels, which networks with ImageNet's weights expect to be normalised by."""
_BORDER = 256 / 224
"""The shorter side before the crop, in sides of the crop: what torchvision evaluated ImageNet's weights with."""
_MOST_SELECTED = 10_000
"""Images that checkpoints are chosen on, which are all compared with each other."""
_ZONE = 1e7
"""Metres between the zones of UTM, in each of which eastings (below 10^6) start anew."""
SAME_PLACE, OTHER_PLACE = 10.0, 25.0
"""Images of a place train as positives up to so many metres, and as negatives beyond so many; answers are right up to
the second (Warburg et al. 2020)."""
_ORDERS = [order for order in permutations(range(4)) if all(new % 2 != old % 2 for new, old in enumerate(order))]
"""The four orders in which every quarter changes sides. (Swapping top and bottom only would leave a 1 a 1.)"""


class Split(Dataset[tuple[Tensor, Tensor]]):
    """N images with the labels of their classes.

    Args:
        pixels: uint8, shape (N, C, H, W); features in place of images: float32, shape (N, F).
        targets: int64, shape (N,).
        white: The largest value that a pixel can have; 1 for features, which stay as they are.
    """

    def __init__(self, pixels: Tensor, targets: Tensor, white: int = 255) -> None:
        self.pixels, self.targets, self.white = pixels, targets, white

    def __len__(self) -> int:
        return len(self.targets)

    def images(self, rows: Sequence[int]) -> Tensor:
        """Images in [0, 1] (paper, G.1), float32."""
        pixels = self.pixels[torch.as_tensor(rows)].float() / self.white
        # channels_last: convolutions on the CPU run in less than half the time, and no slower on a GPU.
        return pixels.contiguous(memory_format=torch.channels_last) if pixels.ndim == 4 else pixels

    def take(self, rows: Tensor) -> Split:
        return Split(self.pixels[rows], self.targets[rows], self.white)

    def at(self, size: int) -> Split:
        """The same with images of that side, where they are photographs."""
        return self

    @property
    def augmented(self) -> Split:
        """The same for training: photographs are cropped and flipped at random (paper, G.1)."""
        return self

    def content(self) -> bytes:
        """What tells it from another split."""
        return self.pixels.numpy().tobytes() + self.targets.numpy().tobytes()

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        return self.images(rows), self.targets[rows]


class Photos(Split):
    """N photographs in files, with ImageNet's normalisation.

    Args:
        paths: That Pillow can read.
        targets: Class labels, int64 (N,), or eastings and northings in metres, float64 (N, 2).
        size: Side of the images in pixels (paper, G.1: 224).
        random: Whether they are cropped and flipped at random; else the centre is taken.
    """

    def __init__(self, paths: Iterable[Any], targets: Any, size: int = 224, random: bool = False) -> None:
        from torchvision.transforms import v2  # half a second; sets in memory do without

        self.paths, self.targets, self.size, self.random = list(map(str, paths)), torch.as_tensor(targets), size, random
        centre = (v2.Resize(round(size * _BORDER), antialias=True), v2.CenterCrop(size))
        crop = (v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()) if random else centre
        pixels = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*_IMAGENET), v2.ToPureTensor())
        self._change = v2.Compose([*crop, *pixels])

    def images(self, rows: Sequence[int]) -> Tensor:
        def read(row: int) -> Image.Image:
            with Image.open(self.paths[row]) as image:
                return image.convert("RGB")

        with ThreadPoolExecutor() as pool:  # Pillow decodes without Python's lock; the random crops stay in their order
            found = [self._change(image) for image in pool.map(read, rows)]
        return torch.stack(found).contiguous(memory_format=torch.channels_last)

    def take(self, rows: Tensor) -> Photos:
        return Photos([self.paths[row] for row in rows.tolist()], self.targets[rows], self.size, self.random)

    def at(self, size: int) -> Photos:
        return Photos(self.paths, self.targets, size)

    @property
    def augmented(self) -> Photos:
        return Photos(self.paths, self.targets, self.size, random=True)

    def content(self) -> bytes:
        names = "\n".join("/".join(Path(path).parts[-2:]) for path in self.paths)
        return names.encode() + self.targets.numpy().tobytes()


def within_metres(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Positive and negative training pairs of positions (A, 2) and (B, 2), bool (A, B); in between they are neither."""
    # From differences: the product form loses all digits this far from the origin.
    metres = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return metres <= SAME_PLACE, metres > OTHER_PLACE


@dataclass(frozen=True)
class RetrievalData:
    """What an experiment needs of its data sets.

    Args:
        title: As in a table.
        train: Training images.
        test: Queries, each retrieved among the others.
        ood: Images out of distribution; ``None`` where there are none.
        ood_title: Their title.
        open_set: Whether no class of the queries occurs in training.
        classes: Names of the queries' classes, where there are few.
        calibration: Known images that nothing was trained on, for thresholds; ``None`` where none are held out.
        selection: What the checkpoint of a training is chosen on; ``None`` takes the last.
        gallery: What the queries retrieve from; ``None`` for all other queries.
        head: Of a pretrained encoder the last layer, which takes the features that are here in place of images.
    """

    title: str
    train: Split
    test: Split
    ood: Split | None
    ood_title: str
    open_set: bool = False
    classes: tuple[str, ...] = ()
    calibration: Split | None = None
    selection: Split | None = None
    gallery: Split | None = None
    head: nn.Linear | None = None

    @property
    def relation(self) -> RelationFunction | None:
        """Of training pairs, where targets are positions and not classes."""
        return within_metres if self.train.targets.ndim == 2 else None

    def fingerprint(self) -> str:
        """A hash of all images and labels, hexadecimal."""
        code = hashlib.sha256()
        for part in filter(None, (self.train, self.test, self.ood, self.gallery)):
            code.update(part.content())
        for weights in () if self.head is None else self.head.parameters():
            code.update(weights.detach().cpu().numpy().tobytes())
        return code.hexdigest()


def rank(nearest: Tensor, queries: Tensor, gallery: Tensor | None = None) -> metrics.Ranking:
    """Which retrieved neighbours (N, K) are right, by the targets of queries and gallery (``None``: leave one out)."""
    if queries.ndim == 1:
        return metrics.rank_by_labels(nearest, queries, gallery)
    among = queries if gallery is None else gallery
    right = torch.cat(
        [
            torch.cdist(block, among, compute_mode="donot_use_mm_for_euclid_dist") <= OTHER_PLACE
            for block in queries.split(256)
        ]
    )
    return metrics.Ranking(right.gather(1, nearest), right.sum(1) - int(gallery is None))


def loader(images: Dataset[Any], size: int, sampler: Sampler[int] | None = None, **more: Any) -> DataLoader[Any]:
    """Batches of images and labels, in their order unless something else is said."""
    # A generator of its own: torch's loader draws a number at its start, which would move the global random state.
    more = {"generator": torch.Generator(), "collate_fn": _same, **more}
    return DataLoader(images, batch_size=size, sampler=sampler, **more)


def _same(batch: Any) -> Any:
    return batch


def load_data(
    name: str,
    root: Path,
    train_size: int | None = None,
    test_size: int | None = None,
    download: bool = False,
    ood: str | None = None,
    size: int = 224,
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
        ood: The set whose test images are out of distribution, or ``"none"``; ``None`` for the paper's.
        size: Side of photographs in pixels.
    """
    source, ood = DATASETS[name], ood or DATASETS[name].ood
    train, test = (_part(source, root, part, download, size) for part in ("train", "test"))
    gallery = _part(source, root, "gallery", download, size) if source.gallery else None
    if train.targets.ndim == 2:  # queries without a right answer leave
        test = test.take(_answered(test.targets, test.targets if gallery is None else gallery.targets))
    outside = None if ood == "none" else _part(DATASETS[ood], root, "test", download, size)
    return RetrievalData(
        source.title,
        _some(train, train_size),
        _some(test, test_size),
        None if outside is None else _some(outside, test_size),
        "none" if ood == "none" else DATASETS[ood].title,
        open_set=test.targets.ndim == 2 or not bool(torch.isin(test.targets, train.targets).all()),
        classes=source.classes,
        gallery=gallery,
    )


def load_pretrained(
    file: Path, title: str, train_size: int | None = None, test_size: int | None = None, ood: str | None = None
) -> RetrievalData:
    """Read a pretrained encoder's last layer, and its features of a data set in place of images.

    Args:
        file: A feature file (:mod:`benchmarks.transfer.feature_file`).
        title: The data set's.
        train_size: As :func:`load_data`'s, like ``test_size``.
        test_size: See there.
        ood: One of the file's unknown sets, or ``"none"``; ``None`` for the first.
    """
    if not file.is_file():
        raise InputError("--encoder", "a feature file", f"no file {file}", "docs/results.md says what is in one.")
    content = load_features(file)
    if (ood := ood or next(iter(content.unknown), "none")) not in (*content.unknown, "none"):
        raise InputError("--ood", f"of {file}: {', '.join([*content.unknown, 'none'])}", ood)
    head = nn.Linear(*content.weight.T.shape)
    head.load_state_dict({"weight": torch.from_numpy(content.weight), "bias": torch.from_numpy(content.bias)})
    train, test = (
        Split(torch.from_numpy(features), torch.from_numpy(labels), white=1)
        for features, labels in (
            (content.train_features, content.train_labels),
            (content.test_features, content.test_labels),
        )
    )
    outside = None
    if ood != "none":
        features = torch.from_numpy(content.unknown[ood])
        outside = _some(Split(features, torch.zeros(len(features), dtype=torch.long), white=1), test_size)
    open_set = not bool(torch.isin(test.targets, train.targets).all())
    return RetrievalData(
        title, _some(train, train_size), _some(test, test_size), outside, ood, open_set=open_set, head=head
    )


def encoder_file(name: str, run: Path) -> Path:
    """The feature file of a pretrained encoder: the name itself, or that of a known encoder in the run folder."""
    return Path(name) if name.endswith(".npz") else run / f"{name}.npz"


def _part(source: Source, root: Path, part: str, download: bool, size: int) -> Split:
    try:
        split = source.read(root, part, download)
        if len(split):
            return split.at(size)
        raise FileNotFoundError("no images")
    except (OSError, RuntimeError, ValueError) as error:  # of torchvision, pytorch-metric-learning, pandas, Pillow
        if isinstance(error, InputError):
            raise
        hint = "docs: benchmarks/results/experiments.md, Data of the tables."
        raise InputError(f"--data-root {root}", f"{source.title}, {part}, as published", str(error), hint) from error


def _answered(queries: Tensor, gallery: Tensor) -> Tensor:
    nobody = torch.zeros(len(queries), 1, dtype=torch.long)
    return rank(nobody, queries, gallery).n_positives.nonzero().squeeze(1)


def classes_of(targets: Tensor, metres: float = SAME_PLACE) -> Tensor:
    """Class labels (N,); of positions (N, 2), which square of a grid they are in."""
    return targets if targets.ndim == 1 else (targets // metres).long().unique(dim=0, return_inverse=True)[1]


def hold_out(data: RetrievalData) -> RetrievalData:
    """Take a tenth of the training images, of an open set a tenth of the classes, to choose checkpoints on."""
    # Squares so wide that almost no image has a neighbour on the other side.
    targets, generator = classes_of(data.train.targets, 100.0), torch.Generator().manual_seed(3)
    if data.open_set:
        classes = targets.unique()
        chosen = classes[torch.randperm(len(classes), generator=generator)[: max(1, len(classes) // 10)]]
        held = torch.isin(targets, chosen)
    else:
        held = torch.rand(len(targets), generator=generator) < 0.1
    kept, chosen_on = ((~held).nonzero().squeeze(1), held.nonzero().squeeze(1)[:_MOST_SELECTED])
    return replace(data, train=data.train.take(kept), selection=data.train.take(chosen_on))


def _some(split: Split, size: int | None) -> Split:
    if size is None or size >= len(split):
        return split
    return split.take(torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:size])


def _digits(_root: Path, part: str, _download: bool) -> Split:
    """A fixed split with as many test images of each class; ``"shuffled"``: the test images with shuffled quarters."""
    from sklearn.datasets import load_digits  # costs a second; the other data sets do without
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels, classes, test_size=600, stratify=classes, random_state=0)
    at = 0 if part == "train" else 1
    images = torch.from_numpy(parts[at]).to(torch.uint8).view(-1, 1, 8, 8)
    if part == "shuffled":
        images = shuffle_quarters(images, torch.Generator().manual_seed(0))
    return Split(images, torch.from_numpy(parts[2 + at]).long(), 16)


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
    title = DATASETS[name].title
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


@lru_cache(1)
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


def _idx(name: str, root: Path, part: str, download: bool) -> Split:
    return read_idx(name, root, "train" if part == "train" else "t10k", download)


def _omniglot(name: str, root: Path, part: str, download: bool) -> Split:
    return read_omniglot(name, root, download=download)[part != "train"]


def _cifar10(root: Path, part: str, download: bool) -> Split:
    """``cifar-10-batches-py``; torchvision refuses all but the published files, as for SVHN and LFW."""
    from torchvision.datasets import CIFAR10

    made = CIFAR10(root, train=part == "train", download=download)
    return Split(torch.from_numpy(made.data).permute(0, 3, 1, 2), torch.tensor(made.targets))


def _svhn(root: Path, _part: str, download: bool) -> Split:
    """``test_32x32.mat``, for images out of distribution."""
    from torchvision.datasets import SVHN

    made = SVHN(root, split="test", download=download)
    return Split(torch.from_numpy(made.data), torch.from_numpy(made.labels))


def _lfw(root: Path, part: str, _download: bool) -> Split:
    """``lfw-py``: the people of ``peopleDevTrain.txt``, or of ``peopleDevTest.txt``."""
    from torchvision.datasets import LFWPeople

    made = LFWPeople(root, split=part)
    return Photos(made.data, made.targets)


def _cars(root: Path, part: str, _download: bool) -> Split:
    """Classes 1 to 98 of both official parts train, the others test: ``stanford_cars``, or Kaggle's ``cars196``."""
    from pytorch_metric_learning.datasets.cars196 import Cars196
    from torchvision.datasets import StanfordCars

    if not (root / "stanford_cars").is_dir():
        return _listed(Cars196, root / "cars196", part)
    found = [row for half in ("train", "test") for row in StanfordCars(root, split=half)._samples]
    paths, labels = zip(*[(path, label) for path, label in found if (label < 98) == (part == "train")], strict=True)
    return Photos(paths, labels)


def _listed(kind: Any, root: Path, part: str) -> Split:
    made = kind(root, split=part)
    return Photos(made.paths, made.labels)


def _metric_learning(name: str, folder: str, root: Path, part: str, _download: bool) -> Split:
    """A set of ``pytorch_metric_learning.datasets``, with its split."""
    from pytorch_metric_learning import datasets

    return _listed(getattr(datasets, name), root / folder, part)


def _inshop(root: Path, part: str, _download: bool) -> Split:
    """``inshop/Eval/list_eval_partition.txt`` and ``inshop/Img``: query and gallery are the set's own."""
    import pandas as pd

    table = pd.read_csv(root / "inshop/Eval/list_eval_partition.txt", sep=r"\s+", skiprows=1)
    chosen = table[table.evaluation_status == part.replace("test", "query")]
    return Photos(f"{root}/inshop/Img/" + chosen.image_name, chosen.item_id.str[3:].astype(int).tolist())


def _msls(root: Path, part: str, _download: bool) -> Split:
    """``msls/images/{train,val}/{database,queries}/@east@north@zone@...jpg``, by VPR-datasets-downloader."""
    folder = {"train": "train/*", "test": "val/queries", "gallery": "val/database"}[part]
    paths = sorted((root / "msls/images").glob(f"{folder}/@*.jpg"))
    fields = [path.name.split("@") for path in paths]
    places = [[float(east) + _ZONE * int(zone or 0), float(north)] for _, east, north, zone, *_ in fields]
    return Photos(paths, torch.tensor(places, dtype=torch.float64))  # single precision is off by metres


def _folder(root: Path, part: str, _download: bool) -> Split:
    """``ROOT/CLASS/*``: the images that ``ROOT/train.txt`` and ``test.txt`` list; else half of the classes trains."""
    from torchvision.datasets import ImageFolder

    found, names = ImageFolder(root), root / f"{part}.txt"
    kept = set(names.read_text(encoding="utf-8").split("\n")) if names.is_file() else ()
    rows = [
        (path, label)
        for path, label in found.samples
        if (
            Path(path).relative_to(root).as_posix() in kept
            if kept
            else (2 * label < len(found.classes)) == (part == "train")
        )
    ]
    return Photos([path for path, _ in rows], [label for _, label in rows])


@dataclass(frozen=True)
class Source:
    """A data set.

    Args:
        title: As in a table.
        read: From the data root, a part (``"train"``, ``"test"``, ``"gallery"``) and whether files may be fetched.
        ood: The set whose test images are out of distribution, or ``"none"``.
        defaults: Network, dimension and training.
        classes: Their names, where they are few.
        gallery: Whether queries have a gallery of their own.
    """

    title: str
    read: Callable[[Path, str, bool], Split]
    ood: str = "none"
    defaults: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    gallery: bool = False


_SMALL = {"network": "fashionmnist", "dim": 3, "epochs": 20}
_LETTERS = {"network": "fashionmnist", "dim": 32, "epochs": 20, "per_class": 4}
_PHOTOS = {"network": "resnet50", "dim": 2048, "epochs": 20, "lr": 1e-7, "margin": 1.0, "per_class": 4}
_METRIC = partial(partial, _metric_learning)
DATASETS = {
    "digits": Source("Digits", _digits, "shuffled", {"network": "digits", "dim": 3, "epochs": 15}, _DIGITS),
    "shuffled": Source("digits with shuffled quarters", lambda root, _, download: _digits(root, "shuffled", download)),
    "fashionmnist": Source("FashionMNIST", partial(_idx, "fashionmnist"), "mnist", _SMALL, _CLOTHES),
    "mnist": Source("MNIST", partial(_idx, "mnist"), "fashionmnist", _SMALL, _DIGITS),
    "cifar10": Source("CIFAR10", _cifar10, "svhn", _SMALL | {"network": "cifar10", "dim": 16, "lr": 1e-5}),
    "svhn": Source("SVHN", _svhn),
    "omniglot": Source("Omniglot", partial(_omniglot, "omniglot"), "mnist", _LETTERS),
    "omniglot_full": Source("Omniglot, full", partial(_omniglot, "omniglot_full"), "mnist", _LETTERS),
    "cub200": Source("CUB200", _METRIC("CUB", ""), "cars196", _PHOTOS),
    "lfw": Source("LFW", _lfw, "cub200", _PHOTOS | {"epochs": 200}),
    "cars196": Source("CARS196", _cars, "cub200", _PHOTOS),
    "sop": Source("Stanford Online Products", _METRIC("StanfordOnlineProducts", ""), defaults=_PHOTOS),
    "inaturalist": Source("iNaturalist 2018", _METRIC("INaturalist2018", "inaturalist"), defaults=_PHOTOS),
    "inshop": Source("In-Shop", _inshop, defaults=_PHOTOS, gallery=True),
    "msls": Source("MSLS", _msls, defaults=_PHOTOS | {"epochs": 200, "margin": 0.1}, gallery=True),
    "folder": Source("folder", _folder, defaults=_PHOTOS),
}
"""All data sets; ``shuffled`` and ``svhn`` stand for the unknown only. Defaults are the paper's (G.1, G.2) and, where
it is silent (margins, CIFAR10's dimension), the released configurations'."""

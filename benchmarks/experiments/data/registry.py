"""The data sets by name, and what is known of each before it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.images import (
    idx_test,
    load_cifar10,
    load_digits_data,
    load_fashionmnist,
    load_mnist,
    svhn_test,
)
from benchmarks.experiments.data.omniglot import load_omniglot, load_omniglot_full
from benchmarks.experiments.data.photos import bird_split, car_split, load_cub200, load_folder, load_lfw
from benchmarks.experiments.data.places import load_msls
from benchmarks.experiments.data.split import RetrievalData, Split

NONE, SHUFFLED = "none", "shuffled"
"""What may stand for the unknown without being a data set: nothing, and the test images with shuffled quarters."""


@dataclass(frozen=True)
class DatasetEntry:
    """A data set.

    Args:
        load: Reads it, without images out of distribution (``folder`` may bring its own).
        title: As in a table.
        network: The paper's for it, a name for :func:`benchmarks.experiments.networks.make_network`.
        ood: What is out of distribution where nobody says otherwise, a name in :data:`OUTSIDE`.
        test: Reads the test images alone, where that needs fewer files.
        largest: Side in pixels of the largest images that it can give; 0 where they have one size.
    """

    load: Callable[[Path, LoadOptions], RetrievalData]
    title: str
    network: str
    ood: str = NONE
    test: Callable[[Path, LoadOptions], Split] | None = None
    largest: int = 0

    @property
    def photos(self) -> bool:
        """Whether its images have ImageNet's normalisation."""
        return self.network == "resnet50"


_ANY = 10_000
_PHOTOS = {"network": "resnet50", "largest": _ANY}

DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(load_digits_data, "Digits", "digits", SHUFFLED),
    "fashionmnist": DatasetEntry(
        load_fashionmnist, "FashionMNIST", "fashionmnist", "mnist", partial(idx_test, "FashionMNIST")
    ),
    "mnist": DatasetEntry(load_mnist, "MNIST", "fashionmnist", "fashionmnist", partial(idx_test, "MNIST")),
    "cifar10": DatasetEntry(load_cifar10, "CIFAR10", "cifar10", "svhn"),
    "omniglot": DatasetEntry(load_omniglot, "Omniglot", "fashionmnist", "mnist", largest=105),
    "omniglot_full": DatasetEntry(load_omniglot_full, "Omniglot, full", "fashionmnist", "mnist", largest=105),
    "cub200": DatasetEntry(load_cub200, "CUB200", ood="cars196", test=bird_split, **_PHOTOS),
    "lfw": DatasetEntry(load_lfw, "LFW", ood="cub200", **_PHOTOS),
    "msls": DatasetEntry(load_msls, "MSLS", **_PHOTOS),
    "folder": DatasetEntry(load_folder, "folder", **_PHOTOS),
}
"""Names for :func:`benchmarks.experiments.data.load_data`."""


@dataclass(frozen=True)
class Outside:
    """Images that can stand for the unknown.

    Args:
        load: Reads them.
        title: As in a table.
        photos: Whether they have ImageNet's normalisation.
        largest: See :class:`DatasetEntry`.
    """

    load: Callable[[Path, LoadOptions], Split]
    title: str
    photos: bool = False
    largest: int = 0


def _test_of(entry: DatasetEntry, root: Path, options: LoadOptions) -> Split:
    return entry.load(root, options).test if entry.test is None else entry.test(root, options)


OUTSIDE: dict[str, Outside] = {
    name: Outside(partial(_test_of, entry), entry.title, entry.photos, entry.largest)
    for name, entry in DATASETS.items()
} | {"svhn": Outside(svhn_test, "SVHN"), "cars196": Outside(car_split, "CARS196", photos=True, largest=_ANY)}
"""What ``ood`` may name beside :data:`NONE` and :data:`SHUFFLED`: the test images of every data set, and two more."""

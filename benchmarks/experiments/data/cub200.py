"""CUB-200-2011: open-set retrieval of birds (paper, section 4 and G.1)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.data.checks import check_images, fetch, read_lines, require
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import FileSplit, RetrievalData
from benchmarks.experiments.data.transforms import augmented, cropped, photo_size
from contrastive_curvature.errors import InputError, expected

_FOLDER = "CUB_200_2011"
_LISTS = ("images.txt", "image_class_labels.txt")
_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_MD5 = "97eceeb196236b17998738112f37df78"
_LAST_TRAINING_CLASS = 100


def load_cub200(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/CUB_200_2011``, as published: the first 100 classes train, the last 100 test (Musgrave et al. 2020).

    Args:
        root: The data root.
        options: ``download`` and ``image_size`` (224) count.

    Returns:
        5864 training and 5924 test images.

    Raises:
        InputError: Files are missing or damaged.
    """
    size = photo_size(options)
    train_paths, train_labels = bird_images(root, options.download, test=False)
    return RetrievalData(
        name="cub200",
        title="CUB200",
        ood_title="",
        train=FileSplit(train_paths, train_labels, augmented(size)),
        test=bird_split(root, options),
        open_set=True,
        train_plain=FileSplit(train_paths, train_labels, cropped(size)),
    )


def bird_split(root: Path, options: LoadOptions) -> FileSplit:
    """The test half alone, see :func:`load_cub200`."""
    return FileSplit(*bird_images(root, options.download, test=True), cropped(photo_size(options)))


def bird_images(root: Path, download: bool, *, test: bool) -> tuple[list[Path], Tensor]:
    """The images of the first 100 classes, or of those after them.

    Args:
        root: The data root, which holds ``CUB_200_2011/images.txt``, ``image_class_labels.txt`` and ``images/``.
        download: Whether the archive (1.1 GB) may be fetched if the folder is not there; its MD5 is verified.
        test: Which half.

    Returns:
        N files in the order of ``images.txt``, and their classes, counted from 0, int64 (N,).

    Raises:
        InputError: Files are missing, or the lists damaged.
    """
    folder = root / _FOLDER
    call = f"bird_images(Path({str(root)!r}), True, test=True)"
    command = (
        f'python -c "from pathlib import Path; from benchmarks.experiments.data.cub200 import bird_images; {call}"'
    )
    how = f"To fetch {_URL} (MD5 {_MD5}) into {root}, if no folder {_FOLDER} is there: {command}"
    if download and not folder.exists():
        from torchvision.datasets.utils import download_and_extract_archive

        fetch(lambda: download_and_extract_archive(_URL, str(root), md5=_MD5), _FOLDER, how)
    require(folder, [*_LISTS, "images"], how)
    names, classes = (_table(folder / name, how) for name in _LISTS)
    if names.keys() != classes.keys():
        came = f"{len(names)} and {len(classes)} numbers that differ"
        raise InputError(expected(" and ".join(str(folder / name) for name in _LISTS), "the same images", came, how))
    labels = {number: _class(folder, number, label, how) for number, label in classes.items()}
    chosen = [number for number in names if (labels[number] > _LAST_TRAINING_CLASS) == test]
    paths = [folder / "images" / names[number] for number in chosen]
    check_images(paths, how)
    return paths, torch.tensor([labels[number] - 1 for number in chosen])


def _table(path: Path, how: str) -> dict[str, str]:
    rows = [line.split() for line in read_lines(path, how)]
    wrong = next((row for row in rows if len(row) != 2), None)
    if wrong is not None:
        raise InputError(expected(str(path), "lines of two words", " ".join(wrong), how))
    return {row[0]: row[1] for row in rows}


def _class(folder: Path, number: str, label: str, how: str) -> int:
    if not label.isdecimal() or int(label) < 1:
        raise InputError(
            expected(str(folder / _LISTS[1]), "classes counted from 1", f"{label!r} of image {number}", how)
        )
    return int(label)

"""Photographs: birds (CUB-200-2011), cars, faces (LFW), and images of one's own in folders (paper, G.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.files import LoadOptions, check_images, fetch, names_in, read_lines, require
from benchmarks.experiments.data.split import FileSplit, RetrievalData
from contrastive_curvature.errors import InputError

PHOTO_SIZE = 224
"""Side of the images in pixels (paper, G.1)."""

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels, which networks with ImageNet weights expect to be normalised by."""
_BORDER = 256 / 224
"""The shorter side before the crop, in sides of the crop: what torchvision's ImageNet weights were evaluated with."""


def photo_size(options: LoadOptions) -> int:
    """The side that is asked for, else the paper's."""
    return PHOTO_SIZE if options.image_size is None else options.image_size


def augmented(size: int) -> Callable[[Any], Tensor]:
    """For training: a random resized crop, with torchvision's default scale and ratio, and a random horizontal flip.

    The paper names the two operations without their parameters. Random numbers come from torch's global generator.

    Args:
        size: Side in pixels.

    Returns:
        Image -> float32 (3, size, size) with ImageNet's normalisation.
    """
    from torchvision.transforms import v2

    return _compose(v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip())


def cropped(size: int) -> Callable[[Any], Tensor]:
    """For all else: the centre of the image, which was scaled so that its shorter side is 256/224 of the crop's.

    Args:
        size: Side in pixels.

    Returns:
        See :func:`augmented`.
    """
    from torchvision.transforms import v2

    return _compose(v2.Resize(round(size * _BORDER), antialias=True), v2.CenterCrop(size))


def squeezed(size: int) -> Callable[[Any], Tensor]:
    """For street scenes: the whole image, as what tells two places apart may stand at its edge.

    Args:
        size: Side in pixels.

    Returns:
        See :func:`augmented`.
    """
    from torchvision.transforms import v2

    return _compose(v2.Resize((size, size), antialias=True))


def _compose(*geometry: Any) -> Callable[[Any], Tensor]:
    from torchvision.transforms import v2

    pixels = (
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_DEVIATION),
        v2.ToPureTensor(),
    )
    return v2.Compose([*geometry, *pixels])


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
        InputError: Files are missing.
    """
    folder = root / _FOLDER
    call = f"bird_images(Path({str(root)!r}), True, test=True)"
    command = (
        f'python -c "from pathlib import Path; from benchmarks.experiments.data.photos import bird_images; {call}"'
    )
    how = f"To fetch {_URL} (MD5 {_MD5}) into {root}, if no folder {_FOLDER} is there: {command}"
    if download and not folder.exists():
        from torchvision.datasets.utils import download_and_extract_archive

        fetch(lambda: download_and_extract_archive(_URL, str(root), md5=_MD5), _FOLDER, how)
    require(folder, [*_LISTS, "images"], how)
    # Lines "NUMBER NAME" and "NUMBER CLASS", in the same order.
    names, classes = (dict(line.split() for line in read_lines(folder / name, how)) for name in _LISTS)
    labels = {number: int(label) for number, label in classes.items()}
    chosen = [number for number in names if (labels[number] > _LAST_TRAINING_CLASS) == test]
    paths = [folder / "images" / names[number] for number in chosen]
    check_images(paths, how)
    return paths, torch.tensor([labels[number] - 1 for number in chosen])


_FOLDER_CARS196 = "stanford_cars"
_PARTS = (("devkit/cars_train_annos.mat", "cars_train"), ("cars_test_annos_withlabels.mat", "cars_test"))
_LAST_TRAINING_CLASS_CARS196 = 98
_HOW = (
    "The original site is gone, and torchvision does not fetch them any more. Get cars_train.tgz, cars_test.tgz, "
    "car_devkit.tgz and cars_test_annos_withlabels.mat (Krause et al. 2013; mirrors are listed at "
    "https://github.com/pytorch/vision/issues/7545) and unpack them as torchvision.datasets.StanfordCars wants them."
)


def car_images(root: Path) -> tuple[list[Path], Tensor]:
    """The images of the last 98 of the 196 classes, of both official parts (Musgrave et al. 2020).

    Args:
        root: The data root, which holds ``stanford_cars`` in the layout of ``torchvision.datasets.StanfordCars``:
            ``devkit/cars_train_annos.mat``, ``cars_test_annos_withlabels.mat``, ``cars_train/`` and ``cars_test/``.

    Returns:
        N files and their classes, counted from 0, int64 (N,).

    Raises:
        InputError: Files are missing or damaged.
    """
    from scipy.io import loadmat

    folder = root / _FOLDER_CARS196
    require(folder, [name for part in _PARTS for name in part], _HOW)
    paths, labels = [], []
    for table, images in _PARTS:
        for row in loadmat(folder / table, squeeze_me=True)["annotations"].reshape(-1):
            # Classes are counted from 1.
            if row["class"] > _LAST_TRAINING_CLASS_CARS196:
                paths.append(folder / images / str(row["fname"]))
                labels.append(int(row["class"]) - 1)
    check_images(paths, _HOW)
    return paths, torch.tensor(labels)


def car_split(root: Path, options: LoadOptions) -> FileSplit:
    """The same as photographs of ``options.image_size``."""
    return FileSplit(*car_images(root), cropped(photo_size(options)))


_FOLDER_LFW = "lfw-py"
_ALIGNMENTS = ("lfw_funneled", "lfw-deepfunneled", "lfw")
_LISTS_LFW = {"train": "peopleDevTrain.txt", "test": "peopleDevTest.txt"}
_HOW_LFW = (
    "Get peopleDevTrain.txt, peopleDevTest.txt and lfw-deepfunneled.zip, which is read as it is, or a .tgz archive "
    "(http://vis-www.cs.umass.edu/lfw/, or a mirror such as https://www.kaggle.com/datasets/jessicali9530/lfw-dataset; "
    "no library fetches the lists), unpacked as torchvision.datasets.LFWPeople wants it."
)


def load_lfw(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/lfw-py`` in the layout of ``torchvision.datasets.LFWPeople``.

    The people of ``peopleDevTrain.txt`` train, those of ``peopleDevTest.txt`` test; nobody is in both. Of the folders
    ``lfw_funneled`` (torchvision's default), ``lfw-deepfunneled`` (both aligned) and ``lfw`` (as collected), or of the
    zip archives of these names, the first that is there is read, an archive without unpacking it.

    Args:
        root: The data root.
        options: Only ``image_size`` (224) counts.

    Returns:
        9525 training and 3708 test images of 4038 and 1711 people.

    Raises:
        InputError: Files are missing or damaged.
    """
    size = photo_size(options)
    folder = root / _FOLDER_LFW
    require(folder, list(_LISTS_LFW.values()), _HOW_LFW)
    places = [place for name in _ALIGNMENTS for place in (folder / name, folder / f"{name}.zip" / name)]
    images = next((place for place in places if names_in(place)), None)
    if images is None:
        wanted = f"one of the folders {', '.join(_ALIGNMENTS)}, or its zip archive"
        raise InputError(f"data root: {folder}", wanted, "none", _HOW_LFW)
    people = {part: _people(folder / name) for part, name in _LISTS_LFW.items()}
    numbers = {name: number for number, name in enumerate([*people["train"], *people["test"]])}
    train, plain = (_split(images, people["train"], numbers, change(size)) for change in (augmented, cropped))
    return RetrievalData(
        name="lfw",
        title="LFW",
        ood_title="",
        train=train,
        test=_split(images, people["test"], numbers, cropped(size)),
        open_set=True,
        train_plain=plain,
    )


def _people(path: Path) -> dict[str, int]:
    """Names and numbers of images; the first line of the file is the number of lines that follow."""
    first, *rest = read_lines(path, _HOW_LFW)
    rows = [line.split() for line in rest]
    if first.strip() != str(len(rows)):
        came = f"{len(rows)} after the first line {first.strip()!r}"
        raise InputError(str(path), "as many people as its first line states", came, _HOW_LFW)
    return {name: int(count) for name, count in rows}


def _split(
    images: Path, people: dict[str, int], numbers: dict[str, int], transform: Callable[[Any], Tensor]
) -> FileSplit:
    rows = [(name, number) for name, count in people.items() for number in range(1, count + 1)]
    paths = [images / name / f"{name}_{number:04d}.jpg" for name, number in rows]
    check_images(paths, _HOW_LFW)
    return FileSplit(paths, torch.tensor([numbers[name] for name, _ in rows]), transform)


_FEW = 20
"""Up to so many classes get their names into plots."""
_HOW_FOLDER = "Put the images there, ROOT/train/CLASS/* and ROOT/test/CLASS/*, and, if there are any, ROOT/ood/**."


def load_folder(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/train/CLASS/*``, ``ROOT/test/CLASS/*`` and, where it exists, ``ROOT/ood/**``.

    Classes are the same where their folders have the same name. Files that are no images by their name are left out.

    Args:
        root: The folder.
        options: Only ``image_size`` (224) counts.

    Returns:
        The images, as in the experiments on photographs (:mod:`benchmarks.experiments.data.photos`): ImageNet's
        normalisation, random crops and flips in training, the centre otherwise.

    Raises:
        InputError: A part has no images, or the test set has some training classes and some others.
    """
    size = photo_size(options)
    require(root, ["train", "test"], _HOW_FOLDER)
    train, test = _by_class(root / "train"), _by_class(root / "test")
    shared = train.keys() & test.keys()
    if shared and shared != test.keys():
        came = f"both: {sorted(shared)[0]!r} is in training, {sorted(test.keys() - shared)[0]!r} is not"
        wanted = "only training classes (closed set), or none of them (open set)"
        raise InputError(f"classes of {root / 'test'}", wanted, came, "Move one kind elsewhere.")
    names = sorted(train.keys() | test.keys())
    ood = _images(root / "ood", deep=True) if (root / "ood").is_dir() else None
    if ood is not None:
        check_images(ood, "Remove the empty folder ROOT/ood, or put images there.")
    return RetrievalData(
        name="folder",
        title=root.resolve().name,
        ood_title="" if ood is None else "ood",
        train=_split_folder(train, names, augmented(size)),
        test=_split_folder(test, names, cropped(size)),
        ood=None if ood is None else FileSplit(ood, torch.zeros(len(ood), dtype=torch.long), cropped(size)),
        open_set=not shared,
        classes=tuple(names) if shared and len(names) <= _FEW else (),
        train_plain=_split_folder(train, names, cropped(size)),
    )


def _by_class(folder: Path) -> dict[str, list[Path]]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found = {path.name: images for path in classes if (images := _images(path, deep=False))}
    if not found:
        raise InputError(f"data root: {folder}", "a folder of images for each class", "none", _HOW_FOLDER)
    return found


def _images(folder: Path, deep: bool) -> list[Path]:
    from torchvision.datasets.folder import is_image_file

    files = folder.rglob("*") if deep else folder.iterdir()
    return sorted(path for path in files if path.is_file() and is_image_file(path.name))


def _split_folder(classes: dict[str, list[Path]], names: list[str], transform: Callable[[Any], Tensor]) -> FileSplit:
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers[name] for name, images in classes.items() for _ in images]
    return FileSplit([path for images in classes.values() for path in images], torch.tensor(labels), transform)

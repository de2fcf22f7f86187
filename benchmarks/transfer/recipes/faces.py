"""Faces (LFW) with a network that somebody else trained: its weights, the pairs, and the recipe."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.experiments.data.files import LoadOptions, read_lines, require
from benchmarks.experiments.data.photos import load_lfw
from benchmarks.experiments.data.split import FileSplit, Split
from benchmarks.transfer.corruption import KINDS, LEVELS, corrupt
from benchmarks.transfer.feature_file import FeatureFile, Pairs
from benchmarks.transfer.recipes.cifar10 import load_photographs
from benchmarks.transfer.recipes.image_encoder import Images, unknown_images
from benchmarks.transfer.recipes.recipe import Recipe
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError

SIDE = 112
"""Side in pixels of the images that the network takes."""
_FILES = ("encoders/mobilefacenet.param", "encoders/mobilefacenet.bin")
_FEATURES, _OUTPUTS = "conv_6dw7_7_batchnorm", "fc1"
"""Names of the blobs: the 512 pooled features, and the 128 outputs, which are linear in them."""
_HOW = "Get both from commit 4363116 of https://github.com/liguiyuan/mobilefacenet-ncnn (no licence: for experiments)."
_LINEAR_TO = 1e-4
"""Largest deviation of an output from a linear layer, in units of the largest output."""


class FaceNetwork:
    """The network, ready to run on one thread, in float32 throughout.

    Args:
        data_root: Folder that has ``encoders/mobilefacenet.param`` and ``.bin``.

    Raises:
        UnsupportedError: The package ``ncnn`` is not installed.
        InputError: The files are missing or damaged.
    """

    def __init__(self, data_root: Path) -> None:
        require(data_root, list(_FILES), _HOW)
        self._ncnn: Any = _ncnn()
        self._net = self._ncnn.Net()
        self._net.opt.num_threads = 1
        # ncnn rounds to half precision where the processor can; features should not depend on the processor.
        for option in ("packed", "storage", "arithmetic"):
            setattr(self._net.opt, f"use_fp16_{option}", False)
        for read, name in zip((self._net.load_param, self._net.load_model), _FILES, strict=True):
            if read(str(data_root / name)) != 0:
                raise InputError(str(data_root / name), "a network of ncnn", "one that ncnn refuses", _HOW)

    def __call__(self, images: Iterable[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run the network on faces.

        Args:
            images: At least one, uint8, shape (112, 112, 3), RGB.

        Returns:
            Features (N, 512) and outputs (N, 128), which are not normalised.
        """
        features, outputs = zip(*map(self._run, images), strict=True)
        return np.stack(features), np.stack(outputs)

    def _run(self, image: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        pixels = np.ascontiguousarray(image)
        mat = self._ncnn.Mat.from_pixels(pixels, self._ncnn.Mat.PixelType.PIXEL_RGB, SIDE, SIDE)
        extractor = self._net.create_extractor()
        extractor.input("data", mat)
        # Copies: ncnn's own memory is gone with the extractor.
        values = [np.array(extractor.extract(blob)[1], dtype=np.float32).reshape(-1) for blob in (_FEATURES, _OUTPUTS)]
        return values[0], values[1]


def _ncnn() -> ModuleType:
    try:
        return importlib.import_module("ncnn")
    except ImportError as error:
        raise UnsupportedError(
            f"the recipe of the faces runs its network with the package ncnn ({error}). Run: pip install ncnn"
        ) from None


def linear_layer(
    features: NDArray[np.float32], outputs: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Find the linear layer between two blobs by least squares, in float64.

    The layer and the batch normalisation behind it are one linear layer, which ncnn's file has in parts.

    Args:
        features: Shape (N, F), N above F.
        outputs: Shape (N, D).

    Returns:
        Weight (D, F) and bias (D,), float32.

    Raises:
        InputError: There are too few rows, or the outputs are not linear in the features.
    """
    rows, width = features.shape
    wanted = f"more images than the {width} features and a bias have unknowns"
    if rows <= width:
        raise InputError("features", wanted, rows)
    design = np.hstack([features.astype(np.float64), np.ones((rows, 1))])
    solution, _, rank, _ = np.linalg.lstsq(design, outputs.astype(np.float64), rcond=None)
    if rank <= width:
        raise InputError("features", wanted, f"{rows} of rank {rank}")
    error = float(np.abs(design @ solution - outputs).max() / np.abs(outputs).max())
    # written so that NaN fails too
    if not error <= _LINEAR_TO:
        raise InputError("outputs", "a linear layer's", f"a relative deviation of {error:.1g}")
    return solution[:-1].T.astype(np.float32), solution[-1].astype(np.float32)


_HOW_PAIRS = "Get pairs.txt from http://vis-www.cs.umass.edu/lfw/."
Face = tuple[str, int]
"""A person's name and the number of the image, from one."""


@dataclass(frozen=True)
class FacePair:
    """Two images.

    Args:
        left: One.
        right: The other.
        fold: From 0.
    """

    left: Face
    right: Face
    fold: int

    @property
    def same(self) -> bool:
        """Whether both show the same person."""
        return self.left[0] == self.right[0]


def read_pairs(path: Path) -> list[FacePair]:
    """Read ``pairs.txt``.

    The first line has the number F of folds and the number P of pairs of one kind in a fold; then every fold has P
    lines ``NAME NUMBER NUMBER`` (the same person) and P lines ``NAME NUMBER NAME NUMBER`` (two people).

    Args:
        path: The file.

    Returns:
        2 F P pairs in the file's order.

    Raises:
        InputError: It is not such a file.
    """
    head, *rest = (line.split() for line in read_lines(path, _HOW_PAIRS))
    wanted = "numbers of folds and of pairs, and so many pairs"
    try:
        folds, each = map(int, head)
        pairs = [_pair(words, row // (2 * each), same=row % (2 * each) < each) for row, words in enumerate(rest)]
    except ValueError as error:
        raise InputError(str(path), wanted, f"something else ({error})", _HOW_PAIRS) from None
    if len(pairs) != 2 * folds * each:
        raise InputError(str(path), wanted, f"{len(pairs)} pairs", _HOW_PAIRS)
    return pairs


def _pair(words: list[str], fold: int, same: bool) -> FacePair:
    name, number, other, *more = words
    right = (name, int(other)) if same else (other, int(*more))
    return FacePair((name, int(number)), right, fold)


_CROP = (58, 52, 191, 185)
"""The face in a deep-funneled image of 250 x 250 pixels: left, upper, right and lower edge."""
_GREY = {"mnist": "mnist", "letters": "omniglot_full"}
_UNKNOWN, _CORRUPTED = 1000, 400

Run = Callable[[Iterable[Images]], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Images (112, 112, 3) -> features (N, F) and outputs (N, D)."""


def make_faces(run: Run, data_root: Path, seed: int) -> FeatureFile:
    """Run a network on LFW, on digits, letters and photographs, and on corrupted faces.

    Corrupted are images of different people who have another test image, so that each has a right answer.

    Args:
        run: The network; its outputs are linear in its features.
        data_root: Folder with ``lfw-py``, ``MNIST``, ``omniglot`` and ``CIFAR-10-images``.
        seed: Chooses unknown images, and what is corrupted and how.

    Returns:
        The features before the last layer, that layer, and the pairs.

    Raises:
        InputError: Files are missing or damaged.
    """
    data = load_lfw(data_root, LoadOptions())
    train, test = _faces(data.plain), _faces(data.test)
    labels, test_labels = data.plain.targets.numpy(), data.test.targets.numpy()
    rows = _one_of_each(test_labels, seed)
    clean = np.stack(list(_images(test.take(torch.from_numpy(rows)))))
    train_features, outputs = run(_images(train))
    test_features, _ = run(_images(test))
    weight, bias = linear_layer(train_features, outputs)
    everybody = np.concatenate([train_features, test_features])
    return FeatureFile(
        train_features=train_features,
        train_labels=labels,
        test_features=test_features,
        test_labels=test_labels,
        weight=weight,
        bias=bias,
        unknown={name: run(images)[0] for name, images in _unknown(data_root, seed)},
        corrupted={(kind, level): run(corrupt(clean, kind, level, seed))[0] for kind in KINDS for level in LEVELS},
        corrupted_rows=rows,
        pairs=_pairs(data_root, [*train.paths, *test.paths], everybody, len(train_features)),
    )


def _faces(split: Split) -> FileSplit:
    if not isinstance(split, FileSplit):
        raise InputTypeError("split", "images in files", type(split).__name__)
    return FileSplit(split.paths, split.targets, _face)


def _face(image: Any) -> Tensor:
    """uint8, shape (112, 112, 3)."""
    face = image.crop(_CROP).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(face))


def _images(split: FileSplit) -> Iterator[Images]:
    """One after the other: all of them in memory would take half a gigabyte."""
    return (split.images([row])[0].numpy() for row in range(len(split)))


def _one_of_each(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Rows of some people's images, one each, of people who have several."""
    rng = np.random.default_rng(seed)
    people, counts = np.unique(labels, return_counts=True)
    chosen = rng.permutation(people[counts > 1])[:_CORRUPTED]
    if not len(chosen):
        raise InputError("peopleDevTest.txt", "somebody with two images", "nobody")
    return np.sort([rng.choice(np.flatnonzero(labels == person)) for person in chosen])


def _unknown(data_root: Path, seed: int) -> Iterator[tuple[str, Images]]:
    for name, source in _GREY.items():
        yield name, unknown_images(source, data_root, (3, SIDE, SIDE), _UNKNOWN, seed)
    pixels = torch.from_numpy(load_photographs(data_root, seed).test[:_UNKNOWN]).permute(0, 3, 1, 2)
    large = interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    yield "cifar10", np.ascontiguousarray(large.permute(0, 2, 3, 1).numpy())


def _pairs(data_root: Path, paths: list[Path], features: NDArray[np.float32], trained: int) -> Pairs:
    """The pairs as rows of the features of those images that occur in them."""
    listed = read_pairs(data_root / "lfw-py" / "pairs.txt")
    at: dict[Face, int] = {(path.parent.name, int(path.stem[-4:])): row for row, path in enumerate(paths)}
    people = {name for (name, _), row in at.items() if row < trained}
    if missing := next((face for pair in listed for face in (pair.left, pair.right) if face not in at), None):
        came = f"image {missing[1]} of {missing[0]}"
        raise InputError("pairs.txt", "images of people in peopleDevTrain.txt or peopleDevTest.txt", came)
    rows = [[at[pair.left] for pair in listed], [at[pair.right] for pair in listed]]
    used, numbers = np.unique(rows, return_inverse=True)
    numbers = numbers.reshape(2, -1)
    return Pairs(
        left=numbers[0],
        right=numbers[1],
        same=np.array([pair.same for pair in listed]),
        fold=np.array([pair.fold for pair in listed]),
        features=features[used],
        people_in_train=np.array([bool(people & {pair.left[0], pair.right[0]}) for pair in listed]),
    )


def _make(data_root: Path, _folder: Path, seed: int) -> FeatureFile:
    return make_faces(FaceNetwork(data_root), data_root, seed)


FACES = (Recipe("faces", "Faces, MobileFaceNet, D = 128", _make),)
"""One encoder."""

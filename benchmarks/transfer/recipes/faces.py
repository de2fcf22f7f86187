"""Faces: MobileFaceNet, which somebody else trained on other faces, on Labelled Faces in the Wild.

The encoder was not trained on LFW, so the split is the posterior's alone, which is fitted on the 9,525 images of the
people of ``peopleDevTrain.txt`` and judged on the 3,708 of ``peopleDevTest.txt``; nobody is in both.

The 6,000 pairs of ``pairs.txt`` go over all of LFW, so 4,853 of them show somebody whose images the fit has used with
their names, so with the answer to some of these pairs; embeddings do not depend on the fit, uncertainties do.
``pairs_people_in_train`` marks these pairs, so that figures can be given on the 1,147 others, too (870 of them show one
person). Nobody is in two folds, so a threshold or a calibration from nine folds has seen nobody of the tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.photos import load_lfw
from benchmarks.experiments.data.split import FileSplit, Split
from benchmarks.transfer.feature_file import FeatureFile, Pairs
from benchmarks.transfer.harm import KINDS, LEVELS, harm
from benchmarks.transfer.recipes.face_network import SIDE, FaceNetwork, linear_layer
from benchmarks.transfer.recipes.face_pairs import Face, read_pairs
from benchmarks.transfer.recipes.image_encoder import Images, unknown_images
from benchmarks.transfer.recipes.photographs import load_photographs
from benchmarks.transfer.recipes.recipe import Recipe
from contrastive_curvature.errors import InputError, InputTypeError, expected

_CROP = (58, 52, 191, 185)
"""The face in a deep-funneled image of 250 x 250 pixels: left, upper, right and lower edge."""
_GREY = {"mnist": "mnist", "letters": "omniglot_full"}
_UNKNOWN, _HARMED = 1000, 400

Run = Callable[[Iterable[Images]], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Images (112, 112, 3) -> features (N, F) and outputs (N, D)."""


def make_faces(run: Run, data_root: Path, seed: int) -> FeatureFile:
    """Run a network on LFW, on digits, letters and photographs, and on harmed faces.

    Harmed are images of different people who have another one among the test images, so that each has a right answer.

    Args:
        run: The network; its outputs are linear in its features.
        data_root: Folder with ``lfw-py``, ``MNIST``, ``omniglot`` and ``CIFAR-10-images``.
        seed: Chooses unknown images, and what is harmed and how.

    Returns:
        The features before the last layer, that layer, and the pairs.

    Raises:
        InputError: Files are missing or damaged.
    """
    data = load_lfw(data_root, LoadOptions())
    train, test = _faces(data.plain), _faces(data.test)
    labels, test_labels = data.plain.targets.numpy(), data.test.targets.numpy()
    rows = _one_of_each(test_labels, seed)
    unharmed = np.stack(list(_images(test.take(torch.from_numpy(rows)))))
    train_features, outputs = run(_images(train))
    test_features, _ = run(_images(test))
    layer = linear_layer(train_features, outputs)
    everybody = np.concatenate([train_features, test_features])
    return FeatureFile(
        train_features=train_features,
        train_labels=labels,
        test_features=test_features,
        test_labels=test_labels,
        weight=layer.weight,
        bias=layer.bias,
        unknown={name: run(images)[0] for name, images in _unknown(data_root, seed)},
        harmed={(kind, level): run(harm(unharmed, kind, level, seed))[0] for kind in KINDS for level in LEVELS},
        harmed_rows=rows,
        pairs=_pairs(data_root, [*train.paths, *test.paths], everybody, len(train_features)),
    )


def _faces(split: Split) -> FileSplit:
    if not isinstance(split, FileSplit):
        raise InputTypeError(expected("split", "images in files", type(split).__name__))
    return FileSplit(split.paths, split.targets, _face)


def face_images(split: Split, rows: Iterable[int]) -> list[Images]:
    """Some of the faces of a split as the network sees them, uint8, shape (112, 112, 3) each."""
    faces = _faces(split)
    return [faces.images([int(row)])[0].numpy() for row in rows]


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
    chosen = rng.permutation(people[counts > 1])[:_HARMED]
    if not len(chosen):
        raise InputError(expected("peopleDevTest.txt", "somebody with two images", "nobody"))
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
        raise InputError(expected("pairs.txt", "images of people in peopleDevTrain.txt or peopleDevTest.txt", came))
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

"""Faces (LFW) with a network that somebody else trained: its weights, the pairs, and the recipe.

The data root has ``encoders/mobilefacenet.param`` and ``.bin`` from commit 4363116 of
https://github.com/liguiyuan/mobilefacenet-ncnn (no licence: for experiments), and ``lfw-py`` with
``lfw-deepfunneled.zip``, ``peopleDevTrain.txt``, ``peopleDevTest.txt`` and ``pairs.txt`` (http://vis-www.cs.umass.edu/lfw/,
or a mirror such as https://www.kaggle.com/datasets/jessicali9530/lfw-dataset). It needs the package ncnn.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from benchmarks.experiments.data import shuffle_quarters
from benchmarks.transfer.corruption import KINDS, LEVELS, corrupt
from benchmarks.transfer.feature_file import FeatureFile, Pairs
from benchmarks.transfer.recipes.cifar10 import load_photographs
from benchmarks.transfer.recipes.image_encoder import Images, read_face, read_people, unknown_images
from contrastive_curvature.errors import InputError

_SIDE = 112
"""Side in pixels of the images that the network takes."""
_FEATURES, _OUTPUTS = "conv_6dw7_7_batchnorm", "fc1"
"""Names of the blobs: the 512 pooled features, and the 128 outputs, which are linear in them."""
_LINEAR_TO = 1e-4
"""Largest deviation of an output from a linear layer, in units of the largest output."""
_CROP = (58, 52, 191, 185)
"""The face in a deep-funneled image of 250 x 250 pixels: left, upper, right and lower edge."""
_UNKNOWN, _CORRUPTED = 1000, 400
Face = tuple[str, int]
"""A person's name and the number of the image, from one."""
Floats = NDArray[np.float32]
Network = Callable[[Iterable[NDArray[np.uint8]]], tuple[Floats, Floats]]
"""RGB images (112, 112, 3) -> features (N, 512) and outputs (N, 128)."""


def face_network(root: Path) -> Network:
    """The network on one thread, in float32."""
    ncnn: Any = importlib.import_module("ncnn")
    net = ncnn.Net()
    net.opt.num_threads = 1
    # ncnn rounds to half precision where the processor can; features should not depend on the processor.
    for option in ("packed", "storage", "arithmetic"):
        setattr(net.opt, f"use_fp16_{option}", False)
    for read, kind in ((net.load_param, "param"), (net.load_model, "bin")):
        path = str(root / "encoders" / f"mobilefacenet.{kind}")
        if read(path) != 0:
            raise InputError(path, "a network of ncnn", "none, or one that ncnn refuses")

    def run(images: Iterable[NDArray[np.uint8]]) -> tuple[Floats, Floats]:
        features, outputs = [], []
        for image in images:
            pixels = np.ascontiguousarray(image)
            extractor = net.create_extractor()
            extractor.input("data", ncnn.Mat.from_pixels(pixels, ncnn.Mat.PixelType.PIXEL_RGB, _SIDE, _SIDE))
            for blob, values in ((_FEATURES, features), (_OUTPUTS, outputs)):
                # Copies: ncnn's own memory is gone with the extractor.
                values.append(np.array(extractor.extract(blob)[1], dtype=np.float32).reshape(-1))
        return np.stack(features), np.stack(outputs)

    return run


def linear_layer(features: Floats, outputs: Floats) -> tuple[Floats, Floats]:
    """Find the linear layer between two blobs by least squares, in float64: weight (D, F) and bias (D,).

    The layer and the batch normalisation behind it are one linear layer, which ncnn's file has in parts.
    """
    design = np.hstack([features.astype(np.float64), np.ones((len(features), 1))])
    solution = np.linalg.lstsq(design, outputs.astype(np.float64), rcond=None)[0]
    error = float(np.abs(design @ solution - outputs).max() / np.abs(outputs).max())
    # written so that NaN fails too
    if not error <= _LINEAR_TO:
        raise InputError("outputs", "a linear layer's", f"a relative deviation of {error:.1g}")
    return solution[:-1].T.astype(np.float32), solution[-1].astype(np.float32)


def read_pairs(path: Path) -> list[tuple[Face, Face, int]]:
    """Read ``pairs.txt``: both faces of a pair, and its fold.

    The first line has the number F of folds and the number P of pairs of one kind in a fold; then every fold has P
    lines ``NAME NUMBER NUMBER`` (the same person) and P lines ``NAME NUMBER NAME NUMBER`` (two people).
    """
    (_, each), *rest = (line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    pairs = []
    for row, words in enumerate(rest):
        name, number, *other = words if len(words) == 4 else (words[0], words[1], words[0], words[2])
        pairs.append(((name, int(number)), (other[0], int(other[1])), row // (2 * int(each))))
    return pairs


def _make(root: Path, _folder: Path, seed: int) -> FeatureFile:
    """Run the network on LFW, on digits, letters and photographs, and on corrupted faces.

    Corrupted are images of different people who have another test image, so that each has a right answer.
    """
    run, train, test = face_network(root), read_people(root, "Train"), read_people(root, "Test")
    known = _known(root, run)
    rows = _one_of_each(known.test_labels, seed)
    clean = np.stack([_face(root, *test[row]) for row in rows])
    shape = (3, _SIDE, _SIDE)
    photographs = torch.from_numpy(load_photographs(root, seed).test[:_UNKNOWN]).permute(0, 3, 1, 2)
    large = interpolate(photographs, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
    unknown = {
        "mnist": unknown_images("mnist", root, shape, _UNKNOWN, seed),
        "letters": unknown_images("omniglot_full", root, shape, _UNKNOWN, seed),
        "cifar10": large.permute(0, 2, 3, 1).numpy(),
    }
    return replace(
        known,
        unknown={name: run(images)[0] for name, images in unknown.items()},
        corrupted={(kind, level): run(corrupt(clean, kind, level, seed))[0] for kind in KINDS for level in LEVELS},
        corrupted_rows=rows,
        pairs=_pairs(root, train, test, np.concatenate([known.train_features, known.test_features])),
    )


def make_table(root: Path, seed: int) -> FeatureFile:
    """Run the network on LFW, on its test faces with shuffled quarters, and on clothes."""
    run, generator = face_network(root), torch.Generator().manual_seed(seed)

    def shuffled(face: Face) -> Images:
        image = torch.from_numpy(_face(root, *face)).permute(2, 0, 1).unsqueeze(0)
        return shuffle_quarters(image, generator)[0].permute(1, 2, 0).numpy()

    clothes = unknown_images("fashionmnist", root, (3, _SIDE, _SIDE), _UNKNOWN, seed)
    unknown = {"shuffled": (shuffled(face) for face in read_people(root, "Test")), "fashionmnist": clothes}
    return replace(_known(root, run), unknown={name: run(images)[0] for name, images in unknown.items()})


def _known(root: Path, run: Network) -> FeatureFile:
    """The last layer, and the features of all people of the lists."""
    train, test = read_people(root, "Train"), read_people(root, "Test")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in train + test))}
    labels, test_labels = (np.array([numbers[name] for name, _ in part]) for part in (train, test))
    # One after the other: all of them in memory would take half a gigabyte.
    train_features, outputs = run(_face(root, *face) for face in train)
    test_features, _ = run(_face(root, *face) for face in test)
    weight, bias = linear_layer(train_features, outputs)
    return FeatureFile(train_features, labels, test_features, test_labels, weight, bias)


def _face(root: Path, name: str, number: int) -> Images:
    return np.array(read_face(root, name, number).crop(_CROP).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR))


def _one_of_each(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Rows of some people's images, one each, of people who have several."""
    rng = np.random.default_rng(seed)
    people, counts = np.unique(labels, return_counts=True)
    chosen = rng.permutation(people[counts > 1])[:_CORRUPTED]
    return np.sort([rng.choice(np.flatnonzero(labels == person)) for person in chosen])


def _pairs(root: Path, train: list[Face], test: list[Face], features: Floats) -> Pairs:
    """The pairs as rows of the features of those images that occur in them."""
    lefts, rights, folds = zip(*read_pairs(root / "lfw-py" / "pairs.txt"), strict=True)
    at, people = {face: row for row, face in enumerate(train + test)}, {name for name, _ in train}
    used, numbers = np.unique([[at[face] for face in side] for side in (lefts, rights)], return_inverse=True)
    left, right = numbers.reshape(2, -1)
    both = list(zip(lefts, rights, strict=True))
    return Pairs(
        left=left,
        right=right,
        same=np.array([a[0] == b[0] for a, b in both]),
        fold=np.array(folds),
        features=features[used],
        people_in_train=np.array([bool(people & {a[0], b[0]}) for a, b in both]),
    )


TABLE_ENCODERS = {"mobilefacenet": make_table}
"""Encoders whose feature file the paper's table on LFW makes for itself, from the data root and a seed."""
FACES = {"faces": ("Faces, MobileFaceNet, D = 128", _make)}
"""One encoder."""

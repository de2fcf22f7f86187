"""The scores that are compared: one :class:`Row` each, larger is less certain.

To add a score, write a function ``(Fitted, Points) -> Tensor`` and put a :class:`Row` with it into :func:`all_rows`. A
further score of the posterior itself is one line in ``fitted.READ`` and its title here. A row that an encoder does not
allow raises an error of the library, and is left out of that encoder's table with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experiments.methods.scores import VMFMixture, neighbor_distance
from benchmarks.transfer import baselines
from benchmarks.transfer.fitted import DEFAULT, STRUCTURES, Fitted, Points
from contrastive_curvature.hessian.sphere import normalize


class Needs(StrEnum):
    """What a score has to keep after the fit."""

    NOTHING = "nothing"
    """The posterior or constants, whose size does not grow with training data or classes."""
    CLASSES = "classes"
    """Something for each training class."""
    GALLERY = "gallery"
    """Training inputs, or the gallery that is searched."""
    LABELS = "labelled gallery"
    """The gallery that is searched, with the class of each of its points."""


@dataclass(frozen=True)
class Row:
    """One score.

    Args:
        name: In files.
        title: In tables.
        needs: What it keeps.
        score: Scores (N,) of N inputs, finite, larger is less certain.
    """

    name: str
    title: str
    needs: Needs
    score: Callable[[Fitted, Points], Tensor]


ANSWERS = {
    "retrieval": f"{DEFAULT}/uncertainty",
    "known": f"{DEFAULT}/novelty",
    "gallery": "gated_labels",
    "unlabelled": "gated",
}
"""The library's answers to "is the nearest neighbour right?" and "is the input of the known kind?", and to both with a
gallery, with labels of its points and without: names of rows. The tables show how far each is from the best row.

The last two were of ``RetrievalUncertainty``, which is no more: committed results have them. The tables of
``cc.Retriever`` are made by :mod:`benchmarks.transfer.answers`.
"""


def resolve(row: str, result: dict[str, Any]) -> str:
    """The name of a row of the default posterior with the name of its structure."""
    return row.replace(f"{DEFAULT}/", f"{result['default']}/")


_OF_POSTERIOR = {
    "uncertainty": "uncertainty",
    "novelty": "novelty",
    "without_classes": "uncertainty without class centres",
    "lost_length": "lost length",
    "angle": "V / n^2 (1 / kappa)",
    "variance": "tangential variance",
}


def all_rows() -> list[Row]:
    """Every score, in the order of the tables."""
    rows = [_posterior(structure, name) for structure in STRUCTURES for name in _OF_POSTERIOR]
    return [
        *rows,
        Row("norm", "minus norm", Needs.NOTHING, lambda _, points: -points.outputs.norm(dim=1)),
        Row("vmf", "vMF density", Needs.CLASSES, _vmf),
        Row("mahalanobis", "Mahalanobis, features", Needs.CLASSES, lambda f, points: _classes(f)(points.features)),
        Row("mahalanobis_unit", "Mahalanobis, normalised features", Needs.CLASSES, _mahalanobis_unit),
        Row(
            "mahalanobis_relative",
            "relative Mahalanobis, features",
            Needs.CLASSES,
            lambda f, points: _classes(f).relative(points.features),
        ),
        Row("mahalanobis_one", "Mahalanobis, features, one centre", Needs.NOTHING, _mahalanobis_one),
        Row("residual", "ViM's residual, features", Needs.NOTHING, _residual),
        Row(
            "knn_embedding",
            "10-NN, embedding",
            Needs.GALLERY,
            lambda f, points: neighbor_distance(points.outputs, f.train.outputs),
        ),
        Row("knn_features", "10-NN, features", Needs.GALLERY, _knn_features),
        Row(
            "match",
            "distance to match",
            Needs.GALLERY,
            lambda f, points: baselines.match_distance(points.outputs, f.test.outputs, points.rows),
        ),
        Row(
            "knn_votes",
            "votes of 10-NN",
            Needs.LABELS,
            lambda f, points: baselines.match_votes(points.outputs, f.test.outputs, f.gallery_labels, points.rows),
        ),
    ]


def _posterior(structure: str, name: str) -> Row:
    def score(fitted: Fitted, points: Points) -> Tensor:
        return fitted.answers(structure, points)[name]

    # The angle grows between the centres of the training classes, and novelty takes the nearest of their features.
    needs = Needs.CLASSES if name in ("uncertainty", "novelty") else Needs.NOTHING
    return Row(f"{structure}/{name}", f"`{structure}`, {_OF_POSTERIOR[name]}", needs, score)


def _vmf(fitted: Fitted, points: Points) -> Tensor:
    mixture = fitted.once("vmf", lambda: VMFMixture.fit(normalize(fitted.train.outputs)[0], fitted.labels))
    return -mixture.log_prob(normalize(points.outputs)[0])


def _classes(fitted: Fitted) -> baselines.ClassGaussians:
    return fitted.once("classes", lambda: baselines.ClassGaussians(fitted.train.features, fitted.labels))


def _mahalanobis_unit(fitted: Fitted, points: Points) -> Tensor:
    gaussians = fitted.once("unit", lambda: baselines.ClassGaussians(F.normalize(fitted.train.features), fitted.labels))
    return gaussians(F.normalize(points.features))


def _mahalanobis_one(fitted: Fitted, points: Points) -> Tensor:
    gaussians = fitted.once(
        "one", lambda: baselines.ClassGaussians(fitted.train.features, torch.zeros_like(fitted.labels))
    )
    return gaussians(points.features)


def _residual(fitted: Fitted, points: Points) -> Tensor:
    space = fitted.once(
        "residual", lambda: baselines.principal_space(fitted.train.features, fitted.weight, fitted.bias)
    )
    return baselines.residual(points.features, *space)


def _knn_features(fitted: Fitted, points: Points) -> Tensor:
    return fitted.once("knn_features", lambda: baselines.FeatureNeighbors(fitted.train.features))(points.features)

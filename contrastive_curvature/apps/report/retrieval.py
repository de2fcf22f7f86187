"""Does the encoder retrieve the right class, and are the uncertain queries the wrong ones?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.apps.report.curves import decimated
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.scored import Scored

__all__ = ["Errors", "Retrieval", "Search", "errors_of", "retrieval_of", "search"]


_SAME = 1e-5
"""Entries of the directions of one input in another batch differ less, in float32."""

_MOST_FOUND = 0.5


@dataclass(frozen=True)
class Search:
    """The neighbours of every test input.

    Attributes:
        ranking: Which of them are right.
        first: Row of the nearest one in what was searched, shape (N,).
        right: Whether it is of the input's class, shape (N,).
        size: Number of points that each input was compared with.
    """

    ranking: metrics.Ranking
    first: Tensor
    right: Tensor
    size: int


@dataclass(frozen=True)
class Retrieval:
    """Recall and mean average precision.

    Attributes:
        recall: By k.
        mean_average_precision: By k.
        n_queries: Test inputs that have something of their class to find; only they count.
        gallery_size: Number of points that each of them is compared with.
        too_large: Values of k for which there are too few points.
    """

    recall: dict[int, float]
    mean_average_precision: dict[int, float]
    n_queries: int
    gallery_size: int
    too_large: tuple[int, ...]


@dataclass(frozen=True)
class Errors:
    """How well the uncertainty finds the queries whose nearest neighbour is wrong.

    Attributes:
        ausc: Area under the sparsification curve.
        best_ausc: That of an order which knows what is wrong.
        r_auroc: AUROC for "the nearest neighbour is wrong", or why there is none.
        curve: Removed fraction and mean AP@1 of the rest, at most 200 points.
        best_curve: The same in the order which knows what is wrong.
        n_wrong: Queries whose nearest neighbour is wrong.
        n_queries: Test inputs that have something of their class to find.
    """

    ausc: float
    best_ausc: float
    r_auroc: float | Missing
    curve: list[tuple[float, float]]
    best_curve: list[tuple[float, float]]
    n_wrong: int
    n_queries: int


def search(test: Scored, gallery: Scored | None, most: int) -> Search | Missing:
    """Find the neighbours of the test inputs: in the gallery, or among the other test inputs.

    Args:
        test: The test inputs.
        gallery: What is searched; ``None`` for the test inputs.
        most: Largest number of neighbours to find.
    """
    if test.labels is None:
        return Missing("The test inputs have no labels, so no neighbour is right or wrong.")
    if gallery is not None and gallery.labels is None:
        return Missing("The gallery has no labels, so no neighbour is right or wrong.")
    size = len(test) - 1 if gallery is None else len(gallery)
    if not size:
        return Missing("There is one test input and no gallery, so it has no neighbour. Give more inputs or a gallery.")
    theirs = None if gallery is None else gallery.labels
    here = test.labels if theirs is None else theirs
    same = (test.labels.unsqueeze(1) == here.unique()).any(1)
    if theirs is None:
        _, inverse, counts = test.labels.unique(return_inverse=True, return_counts=True)
        same = counts[inverse] > 1
    if not bool(same.any()):
        where = "another test input" if gallery is None else "a gallery point"
        return Missing(f"No test input has {where} of its class, so there is nothing right to find.")
    found = metrics.nearest_neighbors(test.mu, None if gallery is None else gallery.mu, k=min(most, size))
    if gallery is not None:
        _warn_of_itself(test.mu, gallery.mu[found[:, 0]])
    ranking = metrics.rank_by_labels(found, test.labels, theirs)
    return Search(ranking, found[:, 0], ranking.relevant[:, 0], size)


def _warn_of_itself(mu: Tensor, nearest: Tensor) -> None:
    """Warn where most inputs are their own nearest neighbours: all would seem right."""
    if float(((mu - nearest).abs().amax(1) < _SAME).double().mean()) > _MOST_FOUND:
        msg = (
            "evaluate: most test inputs are in the gallery too, so that each is its own nearest neighbour and seems "
            "right. Leave them out of the gallery, or give no gallery: then each input is left out of its own search."
        )
        warnings.warn(msg, stacklevel=4)


def retrieval_of(found: Search, ks: tuple[int, ...]) -> Retrieval:
    """Recall and mAP for all k that there are points for."""
    fitting = [k for k in ks if k <= found.size]
    return Retrieval(
        {k: metrics.recall_at_k(found.ranking, k) for k in fitting},
        {k: metrics.map_at_k(found.ranking, k) for k in fitting},
        int((found.ranking.n_positives > 0).sum()),
        found.size,
        tuple(k for k in ks if k > found.size),
    )


def errors_of(found: Search, uncertainty: Tensor) -> Errors:
    """Judge an uncertainty, shape (N,), by whether the nearest neighbours are right."""
    right = metrics.average_precision_at_k(found.ranking, 1)
    counted = found.ranking.n_positives > 0
    wrong = counted & (right == 0)
    n_wrong, n_queries = int(wrong.sum()), int(counted.sum())
    r_auroc: float | Missing
    if 0 < n_wrong < n_queries:
        r_auroc = metrics.auroc(uncertainty[counted & ~wrong], uncertainty[wrong])
    else:
        all_are = "wrong" if n_wrong else "right"
        r_auroc = Missing(
            f"Every nearest neighbour is {all_are}, so no order of the inputs separates right from wrong."
        )
    by_right = torch.nan_to_num(1 - right, nan=1.0)
    return Errors(
        metrics.ausc(uncertainty, right),
        metrics.ausc(by_right, right),
        r_auroc,
        decimated(*metrics.sparsification_curve(uncertainty, right)),
        decimated(*metrics.sparsification_curve(by_right, right)),
        n_wrong,
        n_queries,
    )

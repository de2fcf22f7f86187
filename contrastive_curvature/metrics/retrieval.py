"""Recall at k and mean average precision at k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.metrics._checks import check_integers, check_k, check_labels, check_tensor


@dataclass(frozen=True)
class Ranking:
    """Which retrieved neighbours are positives of their query, by any definition; for labels use ``rank_by_labels``.

    Attributes:
        relevant: Whether the neighbour at each rank is a positive of the query, bool, shape (N, K), nearest first.
        n_positives: Number of positives of each query in the whole gallery, without the query itself, int, shape (N,).
            Every metric leaves out queries without a positive, because no retrieval can answer them.

    Raises:
        InputError: If the shapes disagree or are empty, a count is negative or smaller than the positives
            retrieved, or no query has a positive.
    """

    relevant: Tensor
    n_positives: Tensor

    def __post_init__(self) -> None:
        """Check that the two fields fit together."""
        relevant, counts = check_tensor("relevant", self.relevant), check_integers("n_positives", self.n_positives)
        if relevant.dtype != torch.bool:
            raise InputTypeError("relevant", "a bool tensor", str(relevant.dtype))
        if relevant.ndim != 2 or relevant.numel() == 0:
            raise InputError("relevant", "shape (N, K), not empty", tuple(relevant.shape))
        if counts.shape != relevant.shape[:1]:
            raise InputError("n_positives", f"shape ({len(relevant)},)", tuple(counts.shape))
        if bool((counts < relevant.sum(1)).any()):
            raise InputError("n_positives", "at least the positives retrieved", "fewer for some query")
        if not bool((counts > 0).any()):
            raise InputError("n_positives", "a positive for some query", "none for any")


def rank_by_labels(neighbors: Tensor, labels: Tensor, gallery_labels: Tensor | None = None) -> Ranking:
    """Build a ranking in which a neighbour is positive if it has the label of the query.

    Args:
        neighbors: Gallery indices, nearest first, int, shape (N, K), from ``nearest_neighbors``.
        labels: Labels of the queries, int, shape (N,).
        gallery_labels: Labels of the gallery, int, shape (M,). ``None`` means leave-one-out among the queries.

    Returns:
        The ranking, on the device of ``labels``.

    Raises:
        InputError: An index is outside the gallery, a query retrieved itself, or no query has a positive.
    """
    query_labels = check_labels("labels", labels)
    labels_in_gallery = query_labels if gallery_labels is None else check_labels("gallery_labels", gallery_labels)
    labels_in_gallery = labels_in_gallery.to(query_labels.device)
    indices = check_integers("neighbors", neighbors).to(query_labels.device).long()
    if indices.ndim != 2 or indices.numel() == 0 or len(indices) != len(query_labels):
        raise InputError("neighbors", f"shape ({len(query_labels)}, K), K >= 1", tuple(indices.shape))
    if bool(((indices < 0) | (indices >= len(labels_in_gallery))).any()):
        raise InputError(
            "neighbors",
            f"indices in [0, {len(labels_in_gallery)})",
            f"{int(indices.min())} to {int(indices.max())}",
        )
    own = torch.arange(len(indices), device=indices.device).unsqueeze(1)
    if gallery_labels is None and bool((indices == own).any()):
        raise InputError("neighbors", "no query among its own neighbours", "some", "Leave each query out.")
    classes, positions = torch.unique(labels_in_gallery, return_inverse=True)
    sizes = torch.bincount(positions, minlength=len(classes))
    place = torch.searchsorted(classes, query_labels).clamp(max=len(classes) - 1)
    counts = torch.where(classes[place] == query_labels, sizes[place], torch.zeros_like(place))
    return Ranking(labels_in_gallery[indices] == query_labels.unsqueeze(1), counts - int(gallery_labels is None))


def _first(ranking: Ranking, k: int) -> Tensor:
    """Return which of the first k neighbours are positives, (N, k)."""
    most = ranking.relevant.shape[1]
    return ranking.relevant[:, : check_k(k, most, f"Only {most} neighbours per query were retrieved.")]


def recall_at_k(ranking: Ranking, k: int) -> float:
    """Return the fraction of queries with at least one positive among their k nearest neighbours.

    This is the recall of the metric-learning and place-recognition literature, not the fraction of retrieved positives.

    Args:
        ranking: The retrieved neighbours, K of them.
        k: Ranks to count, 1 <= k <= K.

    Returns:
        A number in [0, 1], over the queries that have a positive in the gallery.

    Source: Warburg et al. (2023), section 4.
    """
    hit = _first(ranking, k).any(1)
    return float(hit[ranking.n_positives > 0].double().mean())


def average_precision_at_k(ranking: Ranking, k: int) -> Tensor:
    """Return the average precision at k of every query.

    ``AP@k = sum_(r <= k) relevant_r * precision_r / min(k, n_positives)``, with ``precision_r`` the fraction of
    positives among the first r; MAP@R for k = n_positives. torchmetrics' ``retrieval_average_precision(top_k=k)``
    divides by the RETRIEVED positives, so it does not penalise missed positives; multiply it by
    ``retrieved / min(k, n_positives)`` to compare.

    Args:
        ranking: The retrieved neighbours, K of them.
        k: Ranks to count, 1 <= k <= K.

    Returns:
        float64, shape (N,), in [0, 1]; NaN for queries without any positive in the gallery.

    Source: https://github.com/FrederikWarburg/bayesian-metric-learning, ``src/evaluate/map.py`` (which gives 1 to a
        query without positives); Musgrave et al. (2020), MAP@R.
    """
    hits = _first(ranking, k).double()
    precision = hits.cumsum(1) / torch.arange(1, k + 1, device=hits.device, dtype=torch.float64)
    # 0 / 0 gives NaN for a query without positives, as documented.
    return (hits * precision).sum(1) / ranking.n_positives.clamp(max=k)


def map_at_k(ranking: Ranking, k: int) -> float:
    """Return the mean of ``average_precision_at_k`` over the queries that have a positive in the gallery.

    Args:
        ranking: The retrieved neighbours, K of them.
        k: Ranks to count, 1 <= k <= K. For k = 1 it equals ``recall_at_k``.

    Returns:
        A number in [0, 1].

    Source: Warburg et al. (2023), section 4 and Table 2.
    """
    return float(average_precision_at_k(ranking, k)[ranking.n_positives > 0].mean())

"""Calibration of the sampled networks' votes, read as probabilities: calibration bins, ECE and Brier score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics._checks import check_integers, check_labels
from contrastive_curvature.metrics.neighbors import Backend, Metric
from contrastive_curvature.metrics.votes import Samples, retrieval_votes


@dataclass(frozen=True)
class CalibrationBins:
    """The calibration curve. Bin b holds confidences in (b/n, (b+1)/n].

    Attributes:
        edges: Bin edges from 0 to 1, float64, shape (n_bins + 1,).
        count: Points in each bin, int64, shape (n_bins,).
        confidence: Mean confidence in each bin, float64, shape (n_bins,); NaN where empty.
        accuracy: Fraction of right predictions in each bin, float64, shape (n_bins,); NaN where empty.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def expected_calibration_error(self) -> float:
        """ECE, ``sum_b count_b / N * |accuracy_b - confidence_b|``: Eq. 121 with ``1/|B|`` corrected."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return float((self.count * gap).sum() / self.count.sum())


_HINT = (
    "Votes are labels: retrieval_votes(samples, labels) computes them from sampled embeddings (S, N, D), such as "
    "la.predictive_samples(x, n_samples=..., joint=True); retrieval_ece and retrieval_brier do both steps."
)


def _check_votes(votes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    checked = check_integers("votes", votes, "an integer tensor of labels (S, N)", _HINT)
    if checked.ndim != 2 or checked.numel() == 0:
        raise InputError("votes", "shape (S, N), not empty", f"shape {tuple(checked.shape)}", _HINT)
    return checked.long(), check_labels("labels", labels, checked.shape[1]).to(checked.device)


def _count_agreement(votes: Tensor) -> tuple[Tensor, Tensor]:
    """Return each point's sorted votes, and the number of votes equal to each: both (N, S), with no class table."""
    ordered = votes.T.contiguous().sort(1).values
    agree = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    return ordered, agree


def calibration_bins(votes: Tensor, labels: Tensor, n_bins: int = 10) -> CalibrationBins:
    """Bin the points by the confidence of their majority vote.

    The prediction of a point is the label with the most votes, the smallest label in a tie; the confidence is the
    fraction of the votes for it. Bins have equal width and include their upper edge. (The authors' released code drops
    points on which all votes agree.)

    Args:
        votes: Voted labels, int, shape (S, N), from ``retrieval_votes``.
        labels: True labels, int, shape (N,).
        n_bins: Number of bins, >= 1.

    Returns:
        The bins; ``.expected_calibration_error`` is their ECE.

    Source: Warburg et al. (2023), appendix G.3.
    """
    checked, truth = _check_votes(votes, labels)
    n_bins = validate.count("n_bins", n_bins)
    n_samples = len(checked)
    ordered, agree = _count_agreement(checked)
    # In a tie argmax gives the first position, which is the smallest label because the votes are sorted.
    best = agree.argmax(1, keepdim=True)
    prediction, majority = ordered.gather(1, best).squeeze(1), agree.gather(1, best).squeeze(1)
    # Computed in integers, because floating-point rounding could put a confidence on an edge into the next bin.
    position = (majority * n_bins + n_samples - 1) // n_samples - 1
    count = torch.bincount(position, minlength=n_bins)

    def mean(values: Tensor) -> Tensor:
        total = torch.zeros(n_bins, dtype=torch.float64, device=values.device)
        return total.index_add_(0, position, values.double()) / count

    edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64, device=checked.device)
    return CalibrationBins(edges, count, mean(majority) / n_samples, mean(prediction == truth))


def brier_score(votes: Tensor, labels: Tensor) -> float:
    """Return the Brier score of the fractions of votes ``p_ic``, ``mean_i sum_c (p_ic - 1[y_i = c])^2``.

    This is a proper score: unlike the ECE, it is not small for inaccurate predictions. With S votes its expectation
    exceeds the limit of infinitely many votes by ``(1 - sum_c p_c^2) / S``, so compare only scores of equal S.

    Args:
        votes: Voted labels, int, shape (S, N), from ``retrieval_votes``.
        labels: True labels, int, shape (N,).

    Returns:
        A number in [0, 2]; 0 is perfect.

    Source: Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    checked, truth = _check_votes(votes, labels)
    n_samples = len(checked)
    _, agree = _count_agreement(checked)
    # Each of the n_c votes for class c agrees with n_c votes, so the sum of agreements is sum_c n_c^2.
    squares = agree.sum(1).double() / n_samples**2
    right = (checked == truth).double().mean(0)
    return float((squares - 2 * right + 1).mean())


def retrieval_ece(
    samples: Samples,
    labels: Tensor,
    gallery: Samples | None = None,
    gallery_labels: Tensor | None = None,
    *,
    n_bins: int = 10,
    backend: Backend = "auto",
    metric: Metric = "cosine",
) -> float:
    """Return the expected calibration error of retrieval from sampled embeddings.

    Args:
        samples: Sampled embeddings, (S, N, D) or an iterable of (N, D); see ``retrieval_votes``.
        labels: Labels of the points, int, shape (N,).
        gallery: Embeddings to search, as for ``retrieval_votes``; ``None`` is leave-one-out among the points.
        gallery_labels: Labels of the gallery, int, shape (M,).
        n_bins: Number of bins, >= 1.
        backend: ``"auto"``, ``"faiss"`` or ``"sklearn"``, see ``nearest_neighbors``.
        metric: ``"cosine"`` or ``"euclidean"``, see ``nearest_neighbors``.

    Returns:
        A number in [0, 1]; 0 is perfectly calibrated.

    Source: Warburg et al. (2023), Eq. 121, with ``1/|B|`` corrected to ``|B|/N``.
    """
    n_bins = validate.count("n_bins", n_bins)
    votes = retrieval_votes(samples, labels, gallery, gallery_labels, backend=backend, metric=metric)
    return calibration_bins(votes, labels, n_bins).expected_calibration_error


def retrieval_brier(
    samples: Samples,
    labels: Tensor,
    gallery: Samples | None = None,
    gallery_labels: Tensor | None = None,
    *,
    backend: Backend = "auto",
    metric: Metric = "cosine",
) -> float:
    """Return the Brier score of retrieval from sampled embeddings.

    Args:
        samples: Sampled embeddings, (S, N, D) or an iterable of (N, D); see ``retrieval_votes``.
        labels: Labels of the points, int, shape (N,).
        gallery: Embeddings to search, as for ``retrieval_votes``; ``None`` is leave-one-out among the points.
        gallery_labels: Labels of the gallery, int, shape (M,).
        backend: ``"auto"``, ``"faiss"`` or ``"sklearn"``, see ``nearest_neighbors``.
        metric: ``"cosine"`` or ``"euclidean"``, see ``nearest_neighbors``.

    Returns:
        A number in [0, 2]; 0 is perfect. See ``brier_score``.
    """
    votes = retrieval_votes(samples, labels, gallery, gallery_labels, backend=backend, metric=metric)
    return brier_score(votes, labels)

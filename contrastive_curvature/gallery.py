"""The uncertainty of a retrieval, given the gallery that is searched."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_count, check_embeddings, check_scores

__all__ = ["RetrievalUncertainty", "neighbor_distance"]

_ENTRIES = 2**24
"""Numbers in one block of differences to neighbours: 64 MiB in float32."""


class RetrievalUncertainty:
    """One score for two causes of wrong matches: inputs unlike the training data, and inputs between classes.

    A match is right if the input is of a known kind and if its neighbours are of its class: ``P(match) = P(known)
    P(match | known)``. The posterior's uncertainty measures the first factor, the distance to the gallery the second.
    Neither can replace the other: among inputs of a known kind the uncertainty ranks worse than the distance, and the
    distance of an unknown input to its nearest class may be small. So the uncertainty only decides which inputs are
    unknown, by a threshold that flags the fraction ``share`` of the known inputs. Inputs above the threshold are ranked
    last, ordered by uncertainty; all others are ordered by distance.

    Args:
        gallery: Embeddings that are searched, of any norm, shape (M, D).
        calibration: Uncertainties of inputs of a known kind, such as a validation set, shape (C,).
        k: Number of neighbours.
        share: Fraction of known inputs that may be flagged as unknown (false-positive rate), in (0, 1).

    Attributes:
        threshold: Uncertainty above which an input counts as unknown.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape is wrong, or a value is out of range.
    """

    def __init__(self, gallery: Tensor, calibration: Tensor, *, k: int = 10, share: float = 0.1) -> None:
        self.gallery = check_embeddings("gallery", gallery)
        self.k = check_count("k", k, 1, len(self.gallery), f"There are {len(self.gallery)} gallery points.")
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise InputTypeError(expected("share", "a number in (0, 1)", repr(share)))
        if not 0 < share < 1:
            raise InputError(expected("share", "a number in (0, 1)", share))
        known = check_scores("calibration", calibration)
        self.threshold = float(known.double().quantile(1 - share))
        if not self.threshold > 0:
            hint = "An uncertainty that is zero for so many inputs cannot separate known from unknown ones."
            raise InputError(expected("calibration", "a positive quantile", self.threshold, hint))

    def __call__(self, embeddings: Tensor, uncertainty: Tensor) -> Tensor:
        """Score queries.

        Args:
            embeddings: Embeddings of N inputs, of any norm, shape (N, D). The inputs must not be in the gallery: each
                would be its own nearest neighbour.
            uncertainty: Uncertainties of the same inputs, computed as those in ``calibration``, shape (N,).

        Returns:
            Scores, shape (N,); larger is less certain. The score of a known input is its mean cosine distance to its
            neighbours, in [0, 2]. The score of an unknown input is 2 plus its uncertainty divided by the threshold.

        Raises:
            InputError: The arguments are malformed.
        """
        queries = check_embeddings("embeddings", embeddings)
        if queries.shape[1] != self.gallery.shape[1]:
            wanted = f"D = {self.gallery.shape[1]}, that of the gallery"
            raise InputError(expected("embeddings", wanted, f"D = {queries.shape[1]}"))
        score = check_scores("uncertainty", uncertainty)
        if len(score) != len(queries):
            raise InputError(expected("uncertainty", f"shape ({len(queries)},)", f"shape {tuple(score.shape)}"))
        near = neighbor_distance(embeddings, self.gallery.to(queries), self.k)
        score = score.to(near)
        return torch.where(score > self.threshold, 2 + score / self.threshold, near)


def neighbor_distance(queries: Tensor, gallery: Tensor, k: int = 10) -> Tensor:
    """Mean cosine distance to the k nearest gallery points.

    For unit embeddings it is half the mean squared Euclidean distance, so both give the same order.

    Args:
        queries: Embeddings of any norm, shape (N, D).
        gallery: Embeddings that are searched, of any norm, shape (M, D), M >= k.
        k: Number of neighbours.

    Returns:
        Shape (N,), in [0, 2].

    Raises:
        InputError: The arguments are malformed.
    """
    neighbors = metrics.nearest_neighbors(queries, gallery, k=k)
    v = normalize(gallery)[0]
    rows = max(1, _ENTRIES // (k * v.shape[1]))
    # Differences, because 1 - cosine loses all digits in float32 when neighbours are close.
    near = [
        (normalize(block)[0].unsqueeze(1) - v[nearest]).square().sum(2).mean(1) / 2
        for block, nearest in zip(queries.split(rows), neighbors.split(rows), strict=True)
    ]
    return torch.cat(near)

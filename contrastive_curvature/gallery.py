"""How uncertain a retrieval is, given the gallery that is searched."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_count, check_embeddings, check_scores

__all__ = ["RetrievalUncertainty", "neighbor_distance"]

_ENTRIES = 2**24
"""Of differences to neighbours that are held at once: 64 MiB in float32."""


class RetrievalUncertainty:
    """One score that knows both unknown inputs and ambiguous ones.

    A match is right if the input is of a known kind, and its neighbours are of its class: ``P(match) = P(known)
    P(match | known)``. The posterior's uncertainty speaks of the first, the distance to the gallery of the second, and
    each is poor at the other's: uncertainty ranks inputs of a known kind worse than the distance does, and the distance
    takes an unknown input for its nearest class. So the uncertainty only decides who is unknown: the most uncertain
    ``share`` of known inputs, and whatever is beyond, are ranked last, by uncertainty; all others by distance.

    Args:
        gallery: Embeddings that are searched, any length, shape (M, D).
        calibration: Uncertainties of inputs of the known kind, such as a validation set, shape (C,).
        k: Neighbours.
        share: Of the known inputs, how many may be taken for unknown, in (0, 1).

    Attributes:
        threshold: Uncertainty above which an input counts as unknown.

    Raises:
        InputTypeError: Something is no tensor of floats.
        InputError: A shape or a value is out of range.
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
            hint = "An uncertainty that is zero for so many inputs cannot tell them apart."
            raise InputError(expected("calibration", "a positive quantile", self.threshold, hint))

    def __call__(self, embeddings: Tensor, uncertainty: Tensor) -> Tensor:
        """Score queries.

        Args:
            embeddings: Of any length, shape (N, D); not of the gallery, where an input would find itself.
            uncertainty: Of the same inputs, from the same source as the calibration's, shape (N,).

        Returns:
            Shape (N,): for an input of a known kind its mean cosine distance to its neighbours, in [0, 2]; for another
            one 2 plus its uncertainty in units of the threshold. Larger is less certain.

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

    For unit embeddings that is half the mean squared Euclidean distance, so the two rank alike.

    Args:
        queries: Embeddings of any length, shape (N, D).
        gallery: The same, shape (M, D), M >= k.
        k: Neighbours.

    Returns:
        Shape (N,), in [0, 2].

    Raises:
        InputError: The arguments are malformed.
    """
    found = metrics.nearest_neighbors(queries, gallery, k=k)
    v = normalize(gallery)[0]
    rows = max(1, _ENTRIES // (k * v.shape[1]))
    # From differences, not as 1 - cosine: close neighbours would cancel in float32.
    near = [
        (normalize(block)[0].unsqueeze(1) - v[nearest]).square().sum(2).mean(1) / 2
        for block, nearest in zip(queries.split(rows), found.split(rows), strict=True)
    ]
    return torch.cat(near)

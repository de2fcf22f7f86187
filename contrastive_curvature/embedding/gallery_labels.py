"""How uncertain a match is, given the class labels of the gallery that was searched."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics.neighbors import MORE, squared_distances

__all__ = ["AGREEMENT_WEIGHT", "RATIO_WEIGHT", "GalleryClasses"]

RATIO_WEIGHT = 2.0
"""Weight of the distance ratio, beside the logarithm of a distance.

It and :data:`AGREEMENT_WEIGHT` were chosen together, in a trial on the 43 encoders of ``benchmarks.transfer`` in 8
families (data set and trunk), by the mean over families of the R-AUROC without a threshold for unknown inputs: 0.885,
against 0.783 for the order without labels and 0.833 for the share of votes. With one family left out at a time, the
others choose 2 or 3 and always 4; over the families that had no say, the mean is 0.883.
"""

AGREEMENT_WEIGHT = 4.0
"""Weight of the share of neighbours that agree with the match; chosen with :data:`RATIO_WEIGHT`."""

_ENTRIES = 2**24
"""Similarities in one block: 64 MiB in float32."""


class GalleryClasses:
    """The classes of a gallery.

    Args:
        labels: Class of each gallery point, int64, shape (M,).

    Attributes:
        index: Number of each point's class, 0 to C - 1, shape (M,).
        sizes: Number of points of each class, shape (C,).
    """

    def __init__(self, labels: Tensor) -> None:
        _, self.index, self.sizes = labels.unique(return_inverse=True, return_counts=True)

    def score(
        self, queries: Tensor, gallery: Tensor, nearest: Tensor, distances: Tensor, itself: Tensor | None
    ) -> Tensor:
        """Uncertainty of matches: ``2 sigmoid(s)`` with ``s = log(c1 + mean c) + 2 c1 / c_other - 4 agree``.

        ``c`` are chords: distances of unit embeddings. ``c1`` is that to the match, the nearest point; ``mean c`` that
        to the k nearest, on average; ``c_other`` that to the nearest point of another class than the match. ``agree``
        is the number of the k nearest that are of the match's class, over the number that could be:
        ``min(k, points of that class)``.

        Args:
            queries: Embeddings of any norm, shape (N, D).
            gallery: Embeddings of any norm, shape (M, D).
            nearest: Rows of the k nearest gallery points, the match first, shape (N, k).
            distances: Cosine distances to them, shape (N, k).
            itself: Row of each query in the gallery, which does not count, -1 for none, shape (N,).

        Returns:
            Shape (N,), in (0, 2).

        Source:
            Lowe, "Distinctive image features from scale-invariant keypoints" (2004), section 7.1: the ratio of the
            distances to the nearest point and to the nearest of another object.
        """
        index, sizes = self.index.to(nearest.device), self.sizes.to(nearest.device)
        own = torch.full_like(nearest[:, 0], -1) if itself is None else itself.to(nearest)
        match = index[nearest[:, 0]]
        votes = (index[nearest] == match.unsqueeze(1)).sum(1)
        # For a query that is in the gallery, the own row is no point that could agree.
        there = sizes[match] - ((own >= 0) & (index[own.clamp(min=0)] == match)).to(sizes)
        agree = votes.to(distances) / there.clamp(max=nearest.shape[1]).to(distances)
        chords = _chord(distances)
        first = chords[:, 0]
        # Rounding could let the match seem farther than the nearest of another class.
        ratio = (first / self._other(queries, gallery, match, own)).clamp(max=1)
        s = (first + chords.mean(1)).log() + RATIO_WEIGHT * ratio - AGREEMENT_WEIGHT * agree
        return 2 * s.sigmoid()

    def _other(self, queries: Tensor, gallery: Tensor, match: Tensor, own: Tensor) -> Tensor:
        """Chords to the nearest points of another class than ``match``, infinite where there is none, shape (N,)."""
        v, index = normalize(gallery)[0], self.index.to(match)
        rows = max(1, _ENTRIES // max(v.shape))
        out = []
        for block, number, row in zip(queries.split(rows), match.split(rows), own.split(rows), strict=True):
            u = normalize(block)[0]
            with torch.autocast(u.device.type, enabled=False):
                cosine = (u.detach() @ v.T).masked_fill_(index == number.unsqueeze(1), -torch.inf)
            inside = (row >= 0).nonzero().squeeze(1)
            cosine[inside, row[inside]] = -torch.inf
            top, other = cosine.topk(min(1 + MORE, len(v)), dim=1)
            # The largest cosines of float32 are ranked again: 1 - cosine has lost all digits when points are close.
            apart = squared_distances(u, v, other).masked_fill(top == -torch.inf, torch.inf)
            out.append(_chord(apart.amin(1) / 2))
        return torch.cat(out)


def _chord(distances: Tensor) -> Tensor:
    """Distances of unit vectors, from cosine distances; of equal vectors tiny, so that logarithm and ratio exist."""
    return (2 * distances).clamp(min=torch.finfo(distances.dtype).tiny).sqrt()

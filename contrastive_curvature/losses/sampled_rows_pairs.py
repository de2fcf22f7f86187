"""Derivatives of a loss of anchors between points of a batch and candidates that they share, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.losses.row_rules import row_terms
from contrastive_curvature.losses.sampled_rows_anchors import PAIRS, SampledAnchors
from contrastive_curvature.losses.sampled_rows_points import Candidates

__all__ = ["PairTerms", "SampledPairs", "find_places"]


class PairTerms(NamedTuple):
    """What pairs of points and candidates add to the blocks of the points, each (B, C) and scaled.

    Args:
        y: ``-dL/ds`` with the point as anchor, and as candidate.
        second: Second derivatives of both; ``None`` for a linear loss.
        roots: Roots of the points as anchors.
        cosine: Cosines of the pairs.
    """

    y: Tensor
    second: Tensor | None
    roots: tuple[Tensor, ...]
    cosine: Tensor


class SampledPairs:
    """B points and C candidates.

    Args:
        anchors: What is known of the whole data set.
        scale: By what the loss of all anchors is multiplied.
        x: Unit embeddings of the points in float64, shape (B, D).
        index: Numbers of their classes, shape (B,).
        place: Their places among all points, shape (B,).
        others: The candidates.
    """

    def __init__(
        self, anchors: SampledAnchors, scale: float, x: Tensor, index: Tensor, place: Tensor, others: Candidates
    ) -> None:
        self.anchors, self.scale = anchors, scale
        self.x, self.index, self.place, self.others = x, index, place, others
        self._held: list[tuple[Tensor, Tensor]] = []

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of the points, of a bounded number of pairs."""
        step = max(1, PAIRS // max(1, len(self.others.u)))
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def hold(self, terms: PairTerms) -> None:
        """Keep the second derivatives of the next block of points, from the first one on, for :meth:`weigh`."""
        if terms.second is not None:
            self._held.append((terms.second, terms.cosine))

    def terms(self, start: int, stop: int) -> PairTerms:
        """Derivatives of points ``start..stop``."""
        known, others = self.anchors, self.others
        loss, points = known.loss, known.points
        place, index = self.place[start:stop], self.index[start:stop]
        cosine = self.x[start:stop] @ others.u.T
        equal = index.unsqueeze(1) == others.index
        nothing = torch.zeros_like(cosine)
        if others.positives:
            related = (equal & (place.unsqueeze(1) != others.place)).double()
            times = points.weight.new_ones(len(index), 1)
            as_anchor, as_candidate = (related, nothing), (related.T, nothing.T)
        else:
            related = known.share * (~equal).double()
            times = points.weight[index].unsqueeze(1)
            as_anchor, as_candidate = (nothing, times * related), (nothing.T, related.T)
        mine = row_terms(loss, cosine, *as_anchor, known.statistics[place], known.kept[place])
        theirs = row_terms(loss, cosine.T, *as_candidate, *known.of(others))
        y = -self.scale * (mine.first + times * theirs.first.T)
        if mine.second is None or theirs.second is None:
            return PairTerms(y, None, (), cosine)
        own = theirs.second
        for sign, root in zip(loss.root_signs, theirs.roots, strict=True):
            own = torch.addcmul(own, root, root, value=float(sign))
        second = self.scale * (mine.second + times * own.T)
        return PairTerms(y, second, tuple(self.scale**0.5 * root for root in mine.roots), cosine)

    def weigh(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Second derivatives of points ``start..stop`` of a loss that has some, and the cosines of the same pairs."""
        if len(self._held) > 1:
            seconds, cosines = zip(*self._held, strict=True)
            self._held = [(torch.cat(seconds), torch.cat(cosines))]
        if self._held:
            second, cosine = self._held[0]
            return second[start:stop], cosine[start:stop]
        found = [self.terms(*block) for block in self.blocks(start, stop)]
        return torch.cat([part.second for part in found if part.second is not None]), torch.cat(
            [part.cosine for part in found]
        )


def find_places(x: Tensor, index: Tensor, same: Candidates) -> Tensor:
    """Which points of the data set some are: of their class, the closest. Equal ones are as good as each other.

    Args:
        x: Unit embeddings of the points in float64, shape (B, D).
        index: Numbers of their classes, shape (B,).
        same: All points of these classes.

    Returns:
        Places among all points, shape (B,).
    """
    out = torch.empty_like(index)
    for some in torch.arange(len(x), device=x.device).split(max(1, PAIRS // len(same.u))):
        cosine = (x[some] @ same.u.T).masked_fill(index[some].unsqueeze(1) != same.index, -torch.inf)
        out[some] = same.place[cosine.argmax(1)]
    return out

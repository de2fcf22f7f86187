"""What is known of all anchors of a data set whose negatives come from a bank, from one look at their candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.losses.row_rules import row_numbers
from contrastive_curvature.losses.sampled_refusals import refuse_sampled
from contrastive_curvature.losses.sampled_rows_points import BankedPoints, Candidates

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss

__all__ = ["PAIRS", "SampledAnchors"]

PAIRS = 2**17
"""Pairs whose derivatives are computed at once: few enough for the cache of a core."""

_COSINES = 2**23
"""Cosines of the bank with all points that are held at once."""

_ROWS = 2**11
"""Points that are held in float64 at once, of all."""

_STATISTICS = 2**27
"""Numbers that are kept of all anchors: one GiB."""


class SampledAnchors:
    """Statistics of the rows of N anchors, in float64.

    The row of an anchor has all its positives, and the bank for its negatives. The anchors of the bank, of which every
    point is a candidate, are known from rows of all N points, too: the share of a point in a softmax that has it in its
    sum is below one, whether or not the point is in the bank.

    Args:
        loss: The loss.
        points: All points and the bank.
        share: How much a negative counts.

    Attributes:
        statistics: See :meth:`RowLoss._statistics`, of all points sorted by class, shape (N, K).
        kept: Whether an anchor has a term, in the same order, shape (N,).
        terms: Number of terms of all anchors.
        total: Loss of all anchors, not scaled.
        least: What no embeddings make it fall below.

    Raises:
        UnsupportedError: What the loss keeps of every anchor grows with its candidates and is too much.
    """

    def __init__(self, loss: RowLoss, points: BankedPoints, share: float) -> None:
        self.loss, self.points, self.share = loss, points, share
        n, many = len(points.index), len(points.bank.u)
        zeros = points.weight.new_zeros
        probe = [loss._statistics(*[zeros(1, wide)] * 3).shape[1] for wide in (1, 2)]
        # What grows with the candidates has to be equally long for all anchors.
        self._width = points.widest() + many if probe[0] != probe[1] else 0
        size = probe[0] + (probe[1] - probe[0]) * max(0, self._width - 1)
        if n * size > _STATISTICS:
            refuse_sampled(f"{type(loss).__name__} keeps {size} numbers of each of the {n} anchors, which is too much")
        self.statistics = zeros(n, size)
        self.kept = torch.zeros(n, dtype=torch.bool, device=points.index.device)
        self.terms, self.total, self.least = 0.0, zeros(()), zeros(())
        for _, same in points.groups(points.index):
            self._look_at(same)
        # What grows with the candidates is a list of them, from which the bank's serve as well.
        sampled = bool(self._width) or not size or not many
        self._of_bank = self.statistics[points.bank.place] if sampled else self._whole_rows(size)

    def of(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Statistics of candidates as anchors, shape (C, K), and whether they have a term, shape (C,)."""
        statistics = self.statistics[candidates.place] if candidates.positives else self._of_bank
        return statistics, self.kept[candidates.place]

    def _look_at(self, same: Candidates) -> None:
        """Fill in the anchors of some classes."""
        loss, points, bank = self.loss, self.points, self.points.bank
        u, index = torch.cat([same.u, bank.u]), torch.cat([same.index, bank.index])
        own = (torch.arange(len(index), device=u.device) < len(same.u)).unsqueeze(0)
        pad = (0, max(0, self._width - len(u)))
        for some in torch.arange(len(same.u), device=u.device).split(max(1, PAIRS // max(len(u), self._width))):
            place = same.place[some]
            equal = same.index[some].unsqueeze(1) == index
            positive = (equal & own).double()
            positive[torch.arange(len(some), device=u.device), some] = 0.0
            negative = (~equal & ~own) * (self.share * points.weight[same.index[some]].unsqueeze(1))
            cosine, positive, negative = (F.pad(part, pad) for part in (same.u[some] @ u.T, positive, negative))
            kept = row_numbers(loss, "_counts", loss._counts(positive, negative), len(some)) > 0
            counts = row_numbers(loss, "_counts_at", loss._counts_at(cosine, positive, negative), len(some))
            self.terms += float(counts.sum())
            self.statistics[place], self.kept[place] = loss._statistics(cosine, positive, negative), kept
            if bool(kept.any()):
                values = loss._value(cosine[kept], positive[kept], negative[kept])
                self.total += row_numbers(loss, "_value", values, int(kept.sum())).sum()
                self.least += loss._least(positive[kept], negative[kept]).sum()

    def _whole_rows(self, size: int) -> Tensor:
        """Statistics of the anchors of the bank over all N points, shape (M, K)."""
        points, bank, n = self.points, self.points.bank, len(self.points.index)
        out = bank.u.new_zeros(len(bank.u), size)
        everywhere, few = torch.arange(n, device=bank.u.device), max(1, PAIRS // max(1, n))
        for anchors in torch.arange(len(bank.u), device=bank.u.device).split(max(1, _COSINES // max(1, n))):
            cosines = torch.cat([bank.u[anchors] @ points.wide(some).T for some in everywhere.split(_ROWS)], dim=1)
            for some, cosine in zip(anchors.split(few), cosines.split(few), strict=True):
                positive = (bank.index[some].unsqueeze(1) == points.index).double()
                negative = self.share * (1 - positive)
                positive.scatter_(1, bank.place[some].unsqueeze(1), 0.0)
                out[some] = self.loss._statistics(cosine, positive, negative)
        return out

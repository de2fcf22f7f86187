"""The cheap estimate of a data set's curvature, from the pairs inside each batch, rescaled (paper, Proposition B.1).

A first pass counts the pairs, of the data set and inside the batches. Then every pair inside a batch has its weight
among all pairs of the data set, divided by the part of the pairs of its type that lies inside a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.dataset import check_fittable
from contrastive_curvature.fit.loop import Problem, Seen
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.readers import Batch, Reader
from contrastive_curvature.fit.state import Findings
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.class_table import ClassTableCollector
from contrastive_curvature.losses.weighting import ClassShares, Shares, count_shares, pair_totals
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.pairs.relation import make_target_relation
from contrastive_curvature.pairs.rows import RowCollector

_INSIDE, _TARGETS = "inside", "targets"


class BatchFit(Problem):
    """Pairs inside batches, which stand for all pairs of the data set."""

    loss: PairLoss
    _totals: tuple[float, float]
    _shares: Callable[[Tensor], Shares]
    _inside: list[float]

    def first_pass(self, reader: Reader) -> Findings:
        """Count the pairs; the network does not run."""
        relation, n = self.options.relation, 0
        inside = torch.zeros(2, dtype=torch.float64)
        # Class labels are counted; of other targets it takes all to know the pairs of a point.
        rows, table = RowCollector(0 if relation is None else None), ClassTableCollector()
        self.record = PassRecord()
        for batch in self.progress.over(reader, "[targets]"):
            y: Any = batch.labels
            inside += inside.new_tensor(pair_totals(*make_relation(len(y), y.device, y, relation).counts()))
            rows.add(batch.numbers, {"targets": y})
            self.record.add_targets(y)
            if relation is None:
                table.add(torch.zeros(len(y), 0, dtype=torch.float64, device=y.device), y, unit=True)
            n += len(y)
        return Findings(n, {_INSIDE: inside}, {_TARGETS: rows.rows()}, table.table())

    def begin(self, statistics: Findings) -> None:
        """Take what the first pass has counted."""
        if not statistics.n:
            raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
        self._inside = statistics.sums[_INSIDE].tolist()
        check_fittable(statistics.n, self._inside[0])
        table, loss = statistics.classes, self.loss
        if table is not None:
            every = ClassShares.of_counts(table.labels, table.counts, loss.normalization, torch.float64)
            self._totals, self._shares = every.totals, lambda targets: every.shares[every.index(targets)]
            return
        targets = statistics.kept[_TARGETS].columns["targets"]
        related = make_target_relation(targets, len(targets), targets.device, self.options.relation)
        totals = pair_totals(*related.counts())

        def shares(some: Tensor) -> Shares:
            positive, negative = related.counts_of(some)
            return count_shares(positive, negative, loss.normalization, torch.float64, totals)

        self._totals, self._shares = totals, shares

    def hessian(self, z: Tensor, context: Any, batch: Batch) -> Seen:
        """Return the Hessian of the pairs inside a batch, as its part of the data set's."""
        del context
        targets: Any = batch.labels
        relation = make_relation(len(z), z.device, targets, self.options.relation)
        shares = self._shares(targets).standing_for(self._totals, self._inside)
        return Seen.of(self.loss.data_hessian(z, relation, shares.to(z.dtype)))

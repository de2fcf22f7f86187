"""The cheap estimate of a data set's curvature, from the pairs inside each batch, rescaled (paper, Proposition B.1).

A first pass counts the pairs of the data set and the pairs inside batches. Then every pair inside a batch gets its
weight among all pairs of the data set, divided by the fraction of pairs of its type that are inside a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from contrastive_curvature.fit.dataset import check_fittable
from contrastive_curvature.fit.loop import Fit, Source, closed
from contrastive_curvature.fit.passes import Passes, PassRecord
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.class_table import ClassTableCollector
from contrastive_curvature.losses.weighting import Related, Shares, count_shares, pair_totals
from contrastive_curvature.network.loader import check_not_empty
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.pairs.relation import make_target_relation
from contrastive_curvature.pairs.rows import RowCollector

_INSIDE, _TARGETS = "inside", "targets"

InsideShares = Callable[[Tensor], Shares]
"""From targets of a batch (n, ...) to the weights of its pairs, which stand for all pairs of the data set."""


def statistics(f: Fit, passes: Passes) -> Total:
    """Count the pairs; the network does not run."""
    relation, n = f.options.relation, 0
    inside = torch.zeros(2, dtype=torch.float64, device="cpu")
    # Class labels are counted; other targets are all kept, because the pairs of a point depend on all of them.
    rows, table, record = RowCollector(0 if relation is None else None), ClassTableCollector(), PassRecord()
    for batch in f.progress.over(passes.reader, "[targets]", last=False):
        y: Any = batch.labels
        inside += inside.new_tensor(pair_totals(*make_relation(len(y), y.device, y, relation).counts()))
        rows.add(batch.numbers, {"targets": y})
        record.add_targets(y)
        if relation is None:
            table.add(torch.zeros(len(y), 0, dtype=torch.float64, device=y.device), y, unit=True)
        n += len(y)
    passes.first = passes.latest = record
    return Total(n, {_INSIDE: inside}, {_TARGETS: rows.rows()}, table.table())


def inside_shares(f: Fit, statistics: Total) -> InsideShares:
    """Return a function that weights the pairs of a batch, from the counts of the first passes over all parts."""
    check_not_empty(statistics.n)
    inside = statistics.terms[_INSIDE].tolist()
    check_fittable(statistics.n, inside[0])
    table, normalization = statistics.classes, cast("PairLoss", f.options.loss).normalization
    if table is not None:
        every = Related.of_labels(table, normalization, torch.float64)
        return lambda targets: every.shares[every.index(targets)].standing_for(every.totals, inside)
    targets = statistics.kept[_TARGETS].columns["targets"]
    related = make_target_relation(targets, len(targets), targets.device, f.options.relation)
    totals = pair_totals(*related.counts())

    def of_counts(some: Tensor) -> Shares:
        positive, negative = related.counts_of(some)
        shares = count_shares(positive, negative, normalization, torch.float64, totals)
        return shares.standing_for(totals, inside)

    return of_counts


def parts(f: Fit, shares: InsideShares, passes: Passes) -> Iterator[Part | Total]:
    """Yield the Hessian of the pairs inside every batch, as its part of the data set."""
    loss = f.options.loss
    for batch, z, context in passes.again(f.progress, "[curvature]"):
        targets: Any = batch.labels
        relation = make_relation(len(z), z.device, targets, f.options.relation)
        hessian = loss.hessian_at(z, relation, shares=shares(targets).to(z))
        yield Part.of_batch(hessian, context, batch.classes)


BATCHES = Source(statistics, inside_shares, parts, closed)

"""The output Hessian of a data set: over all pairs, or with a bank of points that stands for all negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.columns import ColumnDerivatives, Columns
from contrastive_curvature.losses.pair_derivatives import warn_of_many
from contrastive_curvature.losses.weighting import ClassShares, PointShares
from contrastive_curvature.pairs.relation import RelationFunction, make_target_relation
from contrastive_curvature.pairs.rows import Rows


def dataset_hessian(
    loss: PairLoss,
    table: ClassTable | None,
    relation: RelationFunction | None,
    rows: Rows | None,
    bank: Rows | None,
    dtype: torch.dtype,
) -> DatasetHessian:
    """Return the Hessian over all pairs of a data set.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        table: Numbers and sums of all classes; ``None`` with a relation.
        relation: Which pairs are positive and negative; ``None`` for class labels.
        rows: All points by ascending numbers, where they were kept.
        bank: Points that stand for all negatives; ``None`` counts all.
        dtype: Floating-point type of the outputs.
    """

    def of(some: Rows) -> tuple[Tensor, Tensor, Tensor]:
        u = normalize(some.columns["outputs"])[0]
        numbers = some.numbers.to(u.device)
        return u, related.index(some.columns["targets"], numbers), numbers

    def over(some: Columns | None) -> ColumnDerivatives:
        return loss.dataset_derivatives(related, table, points, some)

    related: ClassShares | PointShares
    if table is not None:
        related = ClassShares.of_counts(table.labels, table.counts, loss.normalization, dtype)
    else:
        assert rows is not None
        targets, numbers = rows.columns["targets"], rows.numbers.to(rows.columns["outputs"].device)
        related = PointShares(
            make_target_relation(targets, len(rows), numbers.device, relation), numbers, loss.normalization, dtype
        )
    points = None if rows is None else Columns(*of(rows))
    if bank is None or table is None:
        if points is not None and not (table is not None and loss.sums_suffice):
            warn_of_many(*points.u.shape)
        return DatasetHessian(over(None), loss.distance, loss.pd_fix)
    least = min(2, len(table.labels))
    kinds = len(bank.columns["targets"].unique()) if len(bank) else 0
    if kinds < least:
        wanted = f"a sample with points of two of the {len(table.labels)} classes at least"
        hint = "Use a larger number; about 1,000 give all pairs to three digits."
        raise InputError("negative_samples", wanted, f"{len(bank)} points of {kinds}", hint)
    whole, *halves = (Columns.bank(*of(part), table.counts) for part in (bank, *bank.halves()))
    halves = [half for half in halves if len(half.index.unique()) >= least]
    return DatasetHessian(over(whole), loss.distance, loss.pd_fix, [over(half) for half in halves])

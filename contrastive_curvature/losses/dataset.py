"""The output Hessian of a data set: over all pairs, or with a bank of points that stands for all negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.columns import ColumnDerivatives, Columns
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.contrastive_classes import ContrastiveOfClasses
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.pair_derivatives import warn_of_many
from contrastive_curvature.losses.weighting import ClassShares, PointShares
from contrastive_curvature.options import PDFix
from contrastive_curvature.pairs.relation import RelationFunction, make_target_relation
from contrastive_curvature.pairs.rows import Rows

MANY_POINTS = 30_000
"""From so many points on a sample stands for all negatives, where the user leaves it open."""

NEGATIVE_SAMPLES = 2000
"""Points of that sample."""


def sums_suffice(loss: CosineLoss) -> bool:
    """Return whether sums over classes hold all of the negatives of class labels, so that nothing is sampled."""
    return isinstance(loss, ContrastiveLoss) and (loss.threshold is None or not loss.negative_weight)


def sampled_unasked(loss: CosineLoss) -> bool:
    """Return whether a sample may stand for all negatives of many points: cross terms would need its inputs."""
    by_class = isinstance(loss, ContrastiveLoss) and loss.pd_fix.attracting_only
    return not sums_suffice(loss) and (by_class or not loss.coupled)


def needs_points(loss: CosineLoss) -> bool:
    """Return whether the positives of a point cannot be summed up by class, so that all points have to be known."""
    return not isinstance(loss, ContrastiveLoss)


def without_cross_terms(loss: CosineLoss) -> CosineLoss:
    """Return the loss with a fix that has the same blocks of single points and couples none, where there is one."""
    fixes = {PDFix.FULL: PDFix.FIXED, PDFix.GGN: PDFix.GGN_FIXED}
    return loss.replaced(pd_fix=fixes.get(loss.pd_fix, loss.pd_fix))


def check_samplable(loss: CosineLoss, couples: bool) -> None:
    """Refuse a loss whose cross terms go through the pairs of other points, unless a structure leaves them out."""
    coupled = loss.coupled if couples else without_cross_terms(loss).coupled
    if needs_points(loss) and coupled:
        msg = (
            f"negative_samples with pd_fix={str(loss.pd_fix)!r}: the cross terms of {type(loss).__name__} go through "
            "all pairs of points. Use pd_fix='psd_parts', 'psd' or 'ggn_fixed', which couple no points, or "
            "negative_samples=None."
        )
        raise UnsupportedError(msg)


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
        if table is not None and isinstance(loss, ContrastiveLoss):
            assert isinstance(related, ClassShares)
            return ContrastiveOfClasses(loss, related, table, points, some)
        return ColumnDerivatives(loss, related, points, some)

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
        if points is not None and not (table is not None and sums_suffice(loss)):
            warn_of_many(*points.u.shape)
        return DatasetHessian(over(None), loss.distance, loss.pd_fix)
    least = min(2, len(table.labels))
    kinds = len(bank.columns["targets"].unique()) if len(bank) else 0
    if kinds < least:
        wanted = f"a sample with points of two of the {len(table.labels)} classes at least"
        hint = "Use a larger number; about 1,000 give all pairs to three digits."
        raise InputError(expected("negative_samples", wanted, f"{len(bank)} points of {kinds}", hint))
    whole, *halves = (Columns.bank(*of(part), table.counts) for part in (bank, *bank.halves()))
    halves = [half for half in halves if len(half.index.unique()) >= least]
    return DatasetHessian(over(whole), loss.distance, loss.pd_fix, [over(half) for half in halves])

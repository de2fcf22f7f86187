"""The output Hessian of a data set whose negatives are sums over classes, or a sample of points that stands for all."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.derivatives import DatasetDerivatives
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.contrastive_classes import LabelledPoints, SampledContrastive
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.sampled import SampledPairDerivatives
from contrastive_curvature.losses.sampled_rows import SampledRowDerivatives
from contrastive_curvature.options import PDFix, Structure
from contrastive_curvature.parts.class_table import ClassTable
from contrastive_curvature.parts.rows import Rows

__all__ = [
    "MANY_POINTS",
    "NEGATIVE_SAMPLES",
    "check_samplable",
    "needs_points",
    "needs_sample",
    "sampled_hessian",
    "sampled_unasked",
    "sums_suffice",
    "without_cross_terms",
]

MANY_POINTS = 30_000
"""From so many points on a sample stands for all negatives, where the user leaves it open."""

NEGATIVE_SAMPLES = 2000
"""Points of that sample."""

_OUTPUTS, _TARGETS = "outputs", "targets"


def sums_suffice(loss: CosineLoss) -> bool:
    """Whether sums over classes say everything about the negatives of class labels, so that nothing is sampled."""
    if not isinstance(loss, ContrastiveLoss):
        return False
    return loss.threshold is None or not loss.negative_weight


def sampled_unasked(loss: CosineLoss) -> bool:
    """Whether a sample may stand for all negatives of many points: cross terms would need inputs of the sample."""
    by_class = isinstance(loss, ContrastiveLoss) and loss.pd_fix.attracting_only
    return not sums_suffice(loss) and (by_class or not loss.coupled)


def needs_points(loss: CosineLoss) -> bool:
    """Whether the positives of a point cannot be summed up by class, so that all points have to be known."""
    return not isinstance(loss, ContrastiveLoss)


def needs_sample(loss: CosineLoss) -> bool:
    """Whether only a sample makes this a sum over points that come in any order: losses of anchors."""
    return isinstance(loss, RowLoss)


def without_cross_terms(loss: CosineLoss) -> CosineLoss:
    """The loss with a fix that has the same blocks of single points and couples no points, where there is one."""
    fixes = {PDFix.FULL: PDFix.FIXED, PDFix.GGN: PDFix.GGN_FIXED}
    return loss.replaced(pd_fix=fixes.get(loss.pd_fix, loss.pd_fix))


def check_samplable(loss: CosineLoss, structure: Structure | None) -> None:
    """Refuse a loss whose negatives are not sampled.

    Args:
        loss: The loss.
        structure: Of the curvature; Kronecker factors leave the cross terms out.

    Raises:
        UnsupportedError: Its cross terms go through the pairs of other points.
    """
    coupled = without_cross_terms(loss).coupled if structure is Structure.KRON else loss.coupled
    if needs_points(loss) and coupled:
        msg = (
            f"negative_samples with pd_fix={str(loss.pd_fix)!r}: the cross terms of {type(loss).__name__} go through "
            "all pairs of points. Use pd_fix='psd_parts', 'psd' or 'ggn_fixed', which couple no points, or "
            "negative_samples=None."
        )
        raise UnsupportedError(msg)


def sampled_hessian(
    loss: CosineLoss,
    table: ClassTable,
    points: Rows | None,
    sample: Rows | None,
    keeps: bool,
    like: Tensor,
    negatives_per_anchor: int | None = None,
) -> DatasetHessian:
    """The Hessian over all pairs of a data set with class labels.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        table: Numbers and sums of all classes.
        points: All points, where they were kept.
        sample: Points that stand for all negatives; ``None`` where sums over classes suffice.
        keeps: Whether products with the Hessian of all points will be asked for.
        like: A tensor of the outputs' type and device, shape (..., D).
        negatives_per_anchor: See the backend.

    Raises:
        InputError: The sample has points of one class only, and there are others.
    """
    if sample is not None:
        _check_sample(sample, table)
    if not isinstance(loss, ContrastiveLoss):
        if points is None or sample is None:
            msg = "this loss needs all points, and a sample of them"
            raise RuntimeError(msg)
        return _of_points(loss, points, sample, negatives_per_anchor)
    halves = [] if sample is None else [_labelled(half) for half in sample.halves() if len(half)]
    everything = _labelled(points) if points is not None and keeps else None
    derivatives = SampledContrastive(loss, table, halves, like, everything)
    z = points.columns[_OUTPUTS] if points is not None and keeps else None
    return DatasetHessian(z, derivatives, loss.distance, loss.pd_fix)


def _of_points(loss: CosineLoss, points: Rows, sample: Rows, negatives_per_anchor: int | None) -> DatasetHessian:
    """For losses whose positives have to be known one by one."""
    u, labels = _labelled(points)

    def derivatives(rows: Rows) -> DatasetDerivatives:
        places = torch.searchsorted(points.numbers, rows.numbers).to(labels.device)
        if isinstance(loss, PairLoss):
            return SampledPairDerivatives(loss, u, labels, places)
        if isinstance(loss, RowLoss):
            return SampledRowDerivatives(loss, u, labels, places, negatives_per_anchor)
        msg = f"negative_samples: {type(loss).__name__} has no negatives that a sample could stand for."
        raise UnsupportedError(msg)

    halves = [derivatives(half) for half in sample.halves() if len(half.columns[_TARGETS].unique()) > 1]
    return DatasetHessian(points.columns[_OUTPUTS], derivatives(sample), loss.distance, loss.pd_fix, halves)


def _labelled(rows: Rows) -> LabelledPoints:
    return LabelledPoints(normalize(rows.columns[_OUTPUTS])[0], rows.columns[_TARGETS])


def _check_sample(sample: Rows, table: ClassTable) -> None:
    kinds: Tensor = sample.columns[_TARGETS].unique() if len(sample) else torch.zeros(0)
    if len(kinds) < min(2, len(table.labels)):
        wanted = f"a sample with points of two of the {len(table.labels)} classes at least"
        came = f"{len(sample)} points of {len(kinds)}"
        hint = "Use a larger number; about 1,000 give all pairs to three digits."
        raise InputError(expected("negative_samples", wanted, came, hint))

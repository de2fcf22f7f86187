"""The output Hessian of a data set whose negatives are sums over classes, or a sample of points that stands for all."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.contrastive_classes import LabelledPoints, SampledContrastive
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sampled import SampledPairDerivatives
from contrastive_curvature.options import PDFix
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


def sampled_hessian(
    loss: PairLoss,
    table: ClassTable,
    points: Rows | None,
    sample: Rows | None,
    keeps: bool,
    like: Tensor,
) -> DatasetHessian:
    """Return the Hessian over all pairs of a data set with class labels.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        table: Numbers and sums of all classes.
        points: All points, where they were kept; but for the contrastive loss they are needed.
        sample: Points that stand for all negatives; ``None`` where sums over classes suffice.
        keeps: Whether products with the Hessian of all points will be asked for.
        like: A tensor of the outputs' type and device, shape (..., D).
    """
    if sample is not None:
        kinds = len(sample.columns["targets"].unique()) if len(sample) else 0
        if kinds < min(2, len(table.labels)):
            wanted = f"a sample with points of two of the {len(table.labels)} classes at least"
            hint = "Use a larger number; about 1,000 give all pairs to three digits."
            raise InputError(expected("negative_samples", wanted, f"{len(sample)} points of {kinds}", hint))
    if isinstance(loss, ContrastiveLoss):
        halves = [] if sample is None else [_labelled(half) for half in sample.halves() if len(half)]
        kept = points if keeps else None
        everything = None if kept is None else _labelled(kept)
        derivatives = SampledContrastive(loss, table, halves, like, everything)
        z = None if kept is None else kept.columns["outputs"]
        return DatasetHessian(z, derivatives, loss.distance, loss.pd_fix)
    points, sample = cast("Rows", points), cast("Rows", sample)
    u, labels = _labelled(points)

    def of_sample(rows: Rows) -> SampledPairDerivatives:
        places = torch.searchsorted(points.numbers, rows.numbers).to(labels.device)
        return SampledPairDerivatives(loss, u, labels, places)

    parts = [of_sample(half) for half in sample.halves() if len(half.columns["targets"].unique()) > 1]
    return DatasetHessian(points.columns["outputs"], of_sample(sample), loss.distance, loss.pd_fix, parts)


def _labelled(rows: Rows) -> LabelledPoints:
    return LabelledPoints(normalize(rows.columns["outputs"])[0], rows.columns["targets"])

"""The curvature of a loss of anchors over a data set: the sum over its batches, in one pass.

The candidates of an anchor are those of its batch, as in training. So nothing has to be known of other batches, inputs
may be augmented anew, and the result does not change where a batch of the training size is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import add_factors, per_point
from contrastive_curvature.ggn.class_sums import ClassSums
from contrastive_curvature.ggn.dataset import DatasetCurvature, mean_norm
from contrastive_curvature.ggn.dominance import Dominance
from contrastive_curvature.ggn.feature_sample import FeatureSample
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.sampling import BlockSampler
from contrastive_curvature.ggn.sharing import structured_curvature
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Structure
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.progress import Progress

__all__ = ["AnchorBatch", "AnchorReader", "anchors_curvature", "note_skipped"]

_log = logging.getLogger("contrastive_curvature")


class AnchorBatch(NamedTuple):
    """A batch of n points with what the loss takes besides their embeddings.

    Args:
        x: The points.
        labels: Class labels, shape (n,), or ``None``.
        pairs: See the loss, or ``None``.
        classes: Class labels that are not only those of views of one input, for the centres of the classes.
    """

    x: Inputs
    labels: Tensor | None
    pairs: Pairs | None
    classes: Tensor | None


AnchorReader = Callable[[Any], AnchorBatch]
"""Converts what the loader yields into a batch on the model's device."""


def anchors_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: AnchorReader,
    loss: CosineLoss,
    structure: Structure,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
) -> DatasetCurvature:
    """Sum of the curvatures of all batches, unclamped; a mean over anchors counts times their number.

    Args:
        pullback: Pullback to the parameters.
        loader: Batches, iterated once.
        read: Takes a batch apart.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        kfac_approx: How ``kron`` treats points that are coupled.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.

    Returns:
        The sum. If a single point contributes most of it, there is a warning.

    Raises:
        InputError: The loader is empty, no anchor has a positive, a batch is malformed, or a curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    progress = Progress.of(progress)
    curvature: Any = None
    value: Any = 0
    cost: Any = 0
    norms: Any = 0
    n = anchors = skipped = 0
    dominance, sample = Dominance(pullback, structure, 1), FeatureSample.of(pullback)
    classes: ClassSums | None = ClassSums()
    for number, batch in enumerate(progress.over(loader, "[curvature]")):
        given = read(batch)
        z, context = pullback.forward(given.x)
        z = check_outputs(z, "model(x)")
        hessian = batch_of_data(loss, z, given.labels, given.pairs)
        anchors, skipped = anchors + hessian.derivatives.anchors, skipped + hessian.derivatives.skipped
        part = structured_curvature(pullback, context, hessian, structure, 1, kfac_approx, sampler)
        check_finite(part, pullback, f"batch {number} (counted from 0)")
        if sample is not None:
            sample.add(context)
        if given.classes is None:
            classes = None
        elif classes is not None:
            classes.add(z, given.classes)
        if kfac_approx is KFACApprox.EXPAND:
            alone = hessian.coupled and structure is not Structure.KRON
            term = pullback.block_term(context, hessian.blocks, Structure.DIAG) if alone else part
            dominance.add(context, len(z), hessian.blocks, term)
        if structure is Structure.KRON:
            curvature = add_factors(curvature, part)
        else:
            curvature = part if curvature is None else curvature + part
        found = hessian.loss_and_cost()
        value, cost = value + found[0].double(), cost + found[1].double()
        n, norms = n + len(z), norms + len(z) * mean_norm(z)
    if curvature is None:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    note_skipped(anchors, skipped)
    check_finite(curvature, pullback, "the sum over all batches")
    dominance.warn()
    if structure is Structure.KRON:
        curvature = per_point(curvature, n)
    centres = None if classes is None else classes.centres()
    dtype = z.dtype
    return DatasetCurvature(curvature, value.to(dtype), cost.to(dtype), n, sample, norms / n, centres)


def batch_of_data(loss: CosineLoss, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> OutputHessian:
    """The Hessian of a batch as its part of a data set.

    Args:
        loss: The loss.
        z: Checked raw outputs, shape (n, D).
        labels: See the loss.
        pairs: See the loss.
    """
    return loss.data_hessian(z, loss.relate(z, labels, pairs))


def note_skipped(anchors: int, skipped: int) -> None:
    """Say how many anchors had nothing to be compared with.

    Raises:
        InputError: None had.
    """
    if not anchors:
        hint = "An anchor needs a positive among the candidates of its batch: larger batches, or several of each class."
        raise InputError(expected("train_loader", "at least one anchor with a positive", f"none of {skipped}", hint))
    if skipped:
        _log.info(
            "%d of %d anchors had no positive among their candidates, and add nothing to the curvature",
            skipped,
            anchors + skipped,
        )

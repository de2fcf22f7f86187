"""The cheap estimate of a data set's curvature, from the pairs inside each batch, rescaled (paper, Proposition B.1).

The loss determines the scale (:func:`contrastive_curvature.losses.dataset.batch_hessian`). A batch without positive, or
without negative, pairs contributes nothing to the estimate for these pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import add_factors
from contrastive_curvature.ggn.class_sums import ClassSums
from contrastive_curvature.ggn.dataset import BatchReader, DatasetCurvature, check_fittable, check_targets, mean_norm
from contrastive_curvature.ggn.dominance import Dominance
from contrastive_curvature.ggn.feature_sample import FeatureSample
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.passes import PassRecord
from contrastive_curvature.ggn.sampling import BlockSampler
from contrastive_curvature.ggn.sharing import structured_curvature
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.dataset import batch_hessian
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Normalization, Structure
from contrastive_curvature.pairs import RelationFunction, make_relation
from contrastive_curvature.progress import Progress

__all__ = ["batch_curvature", "batches_curvature"]


def batches_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: BatchReader,
    loss: PairLoss,
    structure: Structure,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
) -> DatasetCurvature:
    """Sum of the rescaled batch curvatures, unclamped.

    Args:
        pullback: Pullback to the parameters.
        loader: Batches, iterated twice. The first pass only counts pairs and does not run the network.
        read: Converts what the loader yields into inputs and targets.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Progress of the whole fit, or whether to show progress.
        kfac_approx: How ``kron`` treats the two points of a pair.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.

    Returns:
        The estimate. If a single point contributes most of the curvature, there is a warning.

    Raises:
        InputError: The loader is empty or has one point only, no batch has a positive pair, targets are malformed or
            differ in the second pass, or a curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    progress = Progress.of(progress)
    n, inside = 0, 0.0
    targets, record = [], PassRecord()
    for batch in progress.over(loader, "[targets]"):
        x, y = read(batch)
        y = check_targets(y, input_length(x), relation)
        n += input_length(x)
        inside += float(make_relation(y.shape[0], y.device, y, relation).counts()[0].sum())
        targets.append(y)
        record.add_targets(y)
    if not targets:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    check_fittable(n, inside)
    totals = None
    if loss.normalization is Normalization.SUM:
        whole = make_relation(n, targets[0].device, torch.cat(targets), relation)
        positive, negative = whole.counts()
        totals = (float(positive.sum()) / 2, float(negative.sum()) / 2)
    curvature: Any = None
    value: Any = 0
    cost: Any = 0
    norms: Any = 0
    again, dominance, sample = PassRecord(), Dominance(pullback, structure, n), FeatureSample.of(pullback)
    classes = ClassSums() if relation is None else None
    for number, batch in enumerate(progress.over(loader, "[curvature]")):
        x, y = read(batch)
        y = check_targets(y, input_length(x), relation)
        again.add_targets(y)
        part = batch_curvature(
            pullback, x, y, loss, structure, n, totals, relation, kfac_approx, dominance, sampler, sample, classes
        )
        check_finite(part.curvature, pullback, f"batch {number} (counted from 0)")
        value, cost = value + part.loss, cost + part.cost
        norms = norms + input_length(x) * cast("Tensor", part.typical_norm)
        if structure is Structure.KRON:
            curvature = add_factors(curvature, part.curvature)
        else:
            curvature = part.curvature if curvature is None else curvature + part.curvature
    record.check_same_targets(again)
    check_finite(curvature, pullback, "the sum over all batches")
    dominance.warn()
    return DatasetCurvature(
        curvature, value, cost, n, sample, norms / n, None if classes is None else classes.centres()
    )


def batch_curvature(
    pullback: Pullback,
    x: Inputs,
    targets: Tensor,
    loss: PairLoss,
    structure: Structure,
    n_data: int,
    totals: tuple[float, float] | None = None,
    relation: RelationFunction | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    dominance: Dominance | None = None,
    sampler: BlockSampler | None = None,
    sample: FeatureSample | None = None,
    classes: ClassSums | None = None,
) -> DatasetCurvature:
    """The contribution of one batch to the estimate for a data set.

    Args:
        pullback: Pullback to the parameters.
        x: A batch of B points.
        targets: Labels or targets of the points.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        n_data: Number N of points in the data set.
        totals: Number of positive and negative pairs in the data set; ``None`` estimates both numbers from the batch,
            as ``N (N - 1) / (B (B - 1))`` times those of the batch.
        relation: ``None`` for class labels, or a callable on targets.
        kfac_approx: How ``kron`` treats the two points of a pair.
        dominance: Records the contribution of the batch, if given.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        sample: Draws from the features of the batch, if given.
        classes: Sums the embeddings of the batch by class label, if given.

    Returns:
        Unclamped curvature, loss and non-negative loss.
    """
    z, context = pullback.forward(x)
    if sample is not None:
        sample.add(context)
    hessian = batch_hessian(loss, check_outputs(z, "model(x)"), targets, n_data, totals, relation)
    if classes is not None:
        classes.add(hessian.z, targets)
    curvature = structured_curvature(pullback, context, hessian, structure, n_data, kfac_approx, sampler)
    if dominance is not None and kfac_approx is KFACApprox.EXPAND:
        with_cross_terms = hessian.coupled and structure is not Structure.KRON
        # Cross terms nearly cancel the terms of single points, so points are compared without cross terms.
        without_cross_terms = (
            pullback.block_term(context, hessian.blocks, Structure.DIAG) if with_cross_terms else curvature
        )
        dominance.add(context, len(hessian), hessian.blocks, without_cross_terms)
    return DatasetCurvature(curvature, *hessian.loss_and_cost(), n_data, typical_norm=mean_norm(z))

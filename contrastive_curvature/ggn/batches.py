"""The cheap estimate of a data set's curvature: only the pairs inside a batch, rescaled (paper, Proposition B.1).

``sum``: the positives of a batch stand for all positives of the data set, its negatives for all negatives (Eq. 29-38);
batches count by their number of points. ``type``: means are averaged over the batches. ``anchor``: every point brings
its own share, so batches add up as they are. A batch without a pair of one type contributes nothing of that type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import make_blocks
from contrastive_curvature.ggn.dataset import BatchReader, DatasetCurvature, check_fittable, check_targets
from contrastive_curvature.ggn.dominance import Dominance
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.kron import add_factors
from contrastive_curvature.ggn.passes import PassRecord
from contrastive_curvature.ggn.sharing import structured_curvature
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.weights import PairWeights
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.pullback import Points, Pullback
from contrastive_curvature.options import CurvatureOptions, KFACApprox, Normalization, Structure
from contrastive_curvature.pairs import Pairs, Relation, RelationFunction, make_relation
from contrastive_curvature.progress import Progress

__all__ = ["batch_curvature", "batch_weights", "batches_curvature"]


def batches_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: BatchReader,
    options: CurvatureOptions,
    structure: Structure,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
) -> DatasetCurvature:
    """Sum of the rescaled batch curvatures, unclamped.

    Args:
        pullback: The parameters.
        loader: Batches; a first pass only counts pairs and runs no network.
        read: Takes a batch apart.
        options: The curvature options.
        structure: ``diag``, ``full`` or ``kron``.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Of the fit that this is part of.
        kfac_approx: How ``kron`` treats the two points of a pair.

    Returns:
        The estimate. Warns where a single point carries most of it.

    Raises:
        InputError: No data, fewer than two points, no positive pair inside any batch, malformed targets, other targets
            in the second pass, or a curvature that is not finite.
        UnsupportedError: ``kron`` for a layer that has no factors.
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
    if options.normalization is Normalization.SUM:
        whole = make_relation(n, targets[0].device, torch.cat(targets), relation)
        positive, negative = whole.counts()
        totals = (float(positive.sum()) / 2, float(negative.sum()) / 2)
    curvature: Any = None
    loss: Any = 0
    cost: Any = 0
    again, dominance = PassRecord(), Dominance(pullback, structure, n)
    for number, batch in enumerate(progress.over(loader, "[curvature]")):
        x, y = read(batch)
        y = check_targets(y, input_length(x), relation)
        again.add_targets(y)
        part = batch_curvature(pullback, x, y, options, structure, n, totals, relation, kfac_approx, dominance)
        check_finite(part.curvature, pullback, f"batch {number} (counted from 0)")
        loss, cost = loss + part.loss, cost + part.cost
        if structure is Structure.KRON:
            curvature = add_factors(curvature, part.curvature)
        else:
            curvature = part.curvature if curvature is None else curvature + part.curvature
    record.check_same_targets(again)
    check_finite(curvature, pullback, "the sum over all batches")
    dominance.warn()
    return DatasetCurvature(curvature, loss, cost, n)


def batch_curvature(
    pullback: Pullback,
    x: Inputs,
    targets: Tensor,
    options: CurvatureOptions,
    structure: Structure,
    n_data: int,
    totals: tuple[float, float] | None = None,
    relation: RelationFunction | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    dominance: Dominance | None = None,
) -> DatasetCurvature:
    """What one batch adds to the estimate for a data set.

    Args:
        pullback: The parameters.
        x: A batch of B points.
        targets: Their labels or targets.
        options: The curvature options.
        structure: ``diag``, ``full`` or ``kron``.
        n_data: Number N of points in the data set.
        totals: Number of positive and negative pairs in the data set; ``None`` takes the batch for representative of
            both, ``N (N - 1) / (B (B - 1))`` times its own.
        relation: ``None`` for class labels, or a callable on targets.
        kfac_approx: How ``kron`` treats the two points of a pair.
        dominance: Told of the batch, if given.

    Returns:
        Unclamped curvature, loss and cost.
    """
    z, context = pullback.forward(x)
    z = check_outputs(z, "model(x)")
    u, n = normalize(z)
    weights = batch_weights(u, targets, options, n_data, totals, relation)
    points = Points(context, u, n)
    curvature = structured_curvature(pullback, points, weights, options, structure, n_data, kfac_approx)
    if dominance is not None and kfac_approx is KFACApprox.EXPAND:

        def blocks() -> NodeBlocks:
            return make_blocks(u, n, *weights.node_sums(), options)

        with_cross_terms = options.pd_fix.coupled and structure is not Structure.KRON
        # Cross terms nearly cancel what the points add, so these are compared without them.
        alone = pullback.block_term(points, blocks(), Structure.DIAG) if with_cross_terms else curvature
        dominance.add(points, blocks, alone)
    return DatasetCurvature(curvature, *weights.loss_and_cost(), n_data)


def batch_weights(
    u: Tensor,
    targets: Tensor,
    options: CurvatureOptions,
    n_data: int,
    totals: tuple[float, float] | None = None,
    relation: RelationFunction | None = None,
    pairs: Pairs | None = None,
) -> PairWeights:
    """Pair weights of B points as their share of a data set's; arguments as in :func:`batch_curvature`.

    Args:
        u: Unit embeddings, shape (B, D).
        targets: Their labels or targets.
        options: The curvature options.
        n_data: Number N of points in the data set.
        totals: Number of positive and negative pairs in the data set.
        relation: ``None`` for class labels, or a callable on targets.
        pairs: Index tuples of a miner, instead of targets and relation.

    Returns:
        Weights that sum over batches to an estimate of those of all pairs.
    """
    made = make_relation(u.shape[0], u.device, *((targets, relation) if pairs is None else (None, pairs)))
    return PairWeights(made, u, options, _scale(made, options.normalization, n_data, totals))


def _scale(
    relation: Relation, normalization: Normalization, n_data: int, totals: tuple[float, float] | None
) -> tuple[float, float]:
    share = relation.n / n_data
    if normalization is Normalization.ANCHOR:
        return 1.0, 1.0
    if normalization is Normalization.TYPE:
        return share, share
    if totals is None:
        ratio = (n_data - 1) / max(relation.n - 1, 1)
        return ratio, ratio
    counts = [float(count.sum()) / 2 for count in relation.counts()]
    first, second = (share * total / count if count else 0.0 for total, count in zip(totals, counts, strict=True))
    return first, second

"""The cheap estimate of a data set's curvature, from the pairs inside each batch, rescaled (paper, Proposition B.1).

A first pass counts the pairs, of the data set and inside the batches. Then every pair inside a batch has its weight
among all pairs of the data set, divided by the part of the pairs of its type that lies inside a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.class_sums import TYPICAL, ClassSums
from contrastive_curvature.fit.dataset import BatchReader, DatasetCurvature, check_fittable, check_targets, mean_norm
from contrastive_curvature.fit.dominance import Dominance
from contrastive_curvature.fit.feature_sample import FeatureSample
from contrastive_curvature.fit.finished import COST, NORMS, VALUE, finished_sums
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.passes import PassRecord, different_data
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.fit.sharing import structured_curvature
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.derivatives import PairDerivatives
from contrastive_curvature.losses.weighting import Shares, lone_shares, pair_totals
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Structure
from contrastive_curvature.pairs import RelationFunction, make_relation
from contrastive_curvature.pairs.relation import LabelRelation, TargetRelation, make_target_relation
from contrastive_curvature.parts.class_table import ClassTableCollector
from contrastive_curvature.parts.rows import RowCollector
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import CURVATURE, STATISTICS, Origin, State
from contrastive_curvature.parts.sums import CURVATURE_SUM, FEATURES, added, named_factors
from contrastive_curvature.progress import Progress

__all__ = ["batch_curvature", "batches_curvature", "batches_of_part", "targets_of_part"]

_INSIDE, _TARGETS = "inside", "targets"


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
    share = Share(loader)
    known = targets_of_part(share, read, relation, progress)
    part = batches_of_part(pullback, share, read, known, loss, structure, relation, progress, kfac_approx, sampler)
    return finished_sums(pullback, part, structure)


def targets_of_part(
    share: Share,
    read: BatchReader,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
    *,
    identity: Mapping[str, str] | None = None,
    part: tuple[int, int] = (0, 1),
) -> State:
    """First pass over a part of the data: it only counts pairs, and does not run the network.

    Args:
        share: Batches with the numbers of their points.
        read: Converts what the loader yields into inputs and targets.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Progress of the whole fit, or whether to show progress.
        identity: See :class:`~contrastive_curvature.parts.State`.
        part: Index of the part and number of all parts.

    Raises:
        InputError: Targets are malformed.
    """
    index, count = part
    inside = torch.zeros(2, dtype=torch.float64)
    # Class labels are counted; of other targets it takes all to know the pairs of a point.
    record, rows, table = PassRecord(), RowCollector(0 if relation is None else None), ClassTableCollector()
    for batch, numbers in Progress.of(progress).over(share, "[targets]"):
        x, y = read(batch)
        y = check_targets(y, input_length(x), relation)
        inside += inside.new_tensor(pair_totals(*make_relation(y.shape[0], y.device, y, relation).counts()))
        rows.add(numbers, {"targets": y})
        record.add_targets(y)
        if relation is None:
            table.add(torch.zeros(len(y), 0, dtype=torch.float64, device=y.device), y, unit=True)
    origins = {index: record.origin()}
    return State(STATISTICS, identity or {}, origins, count, {_INSIDE: inside}, {_TARGETS: rows.rows()}, table.table())


def batches_of_part(
    pullback: Pullback,
    share: Share,
    read: BatchReader,
    known: State,
    loss: PairLoss,
    structure: Structure,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
    *,
    identity: Mapping[str, str] | None = None,
    part: tuple[int, int] = (0, 1),
) -> State:
    """Second pass over a part of the data; see :func:`batches_curvature`.

    Args:
        pullback: Pullback to the parameters.
        share: The same points as in the first pass, in any order.
        read: Converts what the loader yields into inputs and targets.
        known: Result of the first pass over all parts.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Progress of the whole fit, or whether to show progress.
        kfac_approx: How ``kron`` treats the two points of a pair.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        identity: See :class:`~contrastive_curvature.parts.State`.
        part: Index of the part and number of all parts.

    Raises:
        InputError: A part of the first pass is missing; there is one point only, or no batch has a positive pair;
            targets are malformed or differ from those of the first pass; or a curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    (index, count), n = part, known.n
    known.check_complete()
    if not n:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    every, inside = _all_pairs(known, loss, relation), known.sums[_INSIDE].tolist()
    check_fittable(n, inside[0])
    sums: dict[str, Tensor] = {}
    record, sample = PassRecord(), FeatureSample.of(pullback)
    dominance = Dominance(pullback, structure, n, index if count > 1 else -1)
    classes = ClassSums() if relation is None else None
    for number, (batch, numbers) in enumerate(Progress.of(progress).over(share, "[curvature]")):
        x, y = read(batch)
        y = check_targets(y, input_length(x), relation)
        found = batch_curvature(
            pullback,
            x,
            y,
            loss,
            structure,
            n,
            every.shares_for(y).standing_for(every.totals, inside),
            relation,
            kfac_approx,
            dominance,
            sampler,
            sample,
            classes,
            numbers,
            record,
            f"model(x) of batch {number} (counted from 0)",
        )
        check_finite(found.curvature, pullback, f"batch {number} (counted from 0)")
        terms = named_factors(found.curvature) if structure is Structure.KRON else {CURVATURE_SUM: found.curvature}
        norm = cast("Tensor", found.typical_norm)
        terms |= {VALUE: found.loss, COST: found.cost, NORMS: input_length(x) * norm}
        sums = added(sums, terms)
    _check_same(known, record.origin(), index)
    kept = {} if sample is None or not len(sample) else {FEATURES: sample.kept()}
    table = None
    if classes is not None:
        table, kept[TYPICAL] = classes.found()
    origins = {index: record.origin()}
    return State(CURVATURE, identity or {}, origins, count, sums, kept, table, dominance.contributions())


def _all_pairs(known: State, loss: PairLoss, relation: RelationFunction | None) -> PairDerivatives:
    """What the first pass has counted of the pairs of the data set; without any embedding."""
    if known.classes is not None:
        table = known.classes
        made: TargetRelation = LabelRelation(table.labels.repeat_interleave(table.counts))
    else:
        targets = known.kept[_TARGETS].columns["targets"]
        made = make_target_relation(targets, len(targets), targets.device, relation)
    return loss.derivatives(made, torch.zeros(0, 1, dtype=torch.float64, device=made.device))


def _check_same(known: State, again: Origin, index: int) -> None:
    before = known.origins.get(index)
    if before is None or (before.n, before.targets) != (again.n, again.targets):
        received = "other targets"
        raise different_data(received)


def batch_curvature(
    pullback: Pullback,
    x: Inputs,
    targets: Tensor,
    loss: PairLoss,
    structure: Structure,
    n_data: int,
    shares: Shares | None = None,
    relation: RelationFunction | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    dominance: Dominance | None = None,
    sampler: BlockSampler | None = None,
    sample: FeatureSample | None = None,
    classes: ClassSums | None = None,
    numbers: Tensor | None = None,
    record: PassRecord | None = None,
    where: str = "model(x)",
) -> DatasetCurvature:
    """The contribution of one batch to the estimate for a data set.

    Args:
        pullback: Pullback to the parameters.
        x: A batch of B points.
        targets: Labels or targets of the points.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        n_data: Number N of points in the data set.
        shares: Of the points, for their pairs with each other to stand for all of theirs; ``None`` takes the batch for
            representative of the data set.
        relation: ``None`` for class labels, or a callable on targets.
        kfac_approx: How ``kron`` treats the two points of a pair.
        dominance: Records the contribution of the batch, if given.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        sample: Draws from the features of the batch, if given.
        classes: Sums the embeddings of the batch by class label, if given.
        numbers: Of the points, shape (B,), for the draw.
        record: Takes note of the points, if given.
        where: What the outputs are, for error messages.

    Returns:
        Unclamped curvature, loss and non-negative loss.
    """
    z, context = pullback.forward(x)
    if sample is not None:
        sample.add(context, numbers)
    made = make_relation(len(z), z.device, targets, relation)
    if shares is None:
        shares = lone_shares(made, loss.normalization, z.dtype, n_data)
    hessian = loss.data_hessian(check_outputs(z, where), made, shares.to(z.dtype))
    if classes is not None:
        classes.add(hessian.z, targets, numbers)
    if record is not None:
        record.add(hessian.z, targets)
    curvature = structured_curvature(pullback, context, hessian, structure, n_data, kfac_approx, sampler)
    if dominance is not None and kfac_approx is KFACApprox.EXPAND:
        with_cross_terms = hessian.coupled and structure is not Structure.KRON
        # Cross terms nearly cancel the terms of single points, so points are compared without cross terms.
        without_cross_terms = (
            pullback.block_term(context, hessian.blocks, Structure.DIAG) if with_cross_terms else curvature
        )
        dominance.add(context, len(hessian), hessian.blocks, without_cross_terms)
    return DatasetCurvature(curvature, *hessian.loss_and_cost(), n_data, typical_norm=mean_norm(z))

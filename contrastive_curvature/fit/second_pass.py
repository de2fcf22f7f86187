"""The second pass over a data set: the curvature of every point with all others, as a state that merges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from contrastive_curvature.fit.cross_sums import CrossSums, finished_cross, make_cross
from contrastive_curvature.fit.dataset import DatasetCurvature, DatasetPoints
from contrastive_curvature.fit.dominance import Dominance
from contrastive_curvature.fit.feature_sample import FeatureSample
from contrastive_curvature.fit.finished import kept_features, summed_curvature
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.fit.standard_error import StandardError, relative_error
from contrastive_curvature.fit.statistics import BatchReader, NumberedReader, check_targets, numbered
from contrastive_curvature.hessian.derivatives import Totals
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.loader import in_fixed_order
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import CURVATURE, State
from contrastive_curvature.parts.sums import CURVATURE_SUM, FEATURES, added, named_factors
from contrastive_curvature.progress import Progress

__all__ = ["curvature_of_part", "dataset_curvature", "finished_curvature"]

_TOTALS = ("degree", "along", "value")


def dataset_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: BatchReader,
    points: DatasetPoints,
    structure: Structure,
    progress: Progress | bool | None = None,
    sampler: BlockSampler | None = None,
) -> DatasetCurvature:
    """The curvature of all pairs of a data set in one part, unclamped.

    Args:
        pullback: Pullback to the parameters.
        loader: The same data as in the first pass, in any order.
        read: Converts what the loader yields into inputs and targets.
        points: Result of the first pass.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.

    Returns:
        The curvature. If a single point contributes most of it, there is a warning.

    Raises:
        InputError: The loader gave other data than in the first pass, or the curvature of a batch is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    part = curvature_of_part(pullback, Share(loader), numbered(read), points, structure, progress, sampler, whole=read)
    return finished_curvature(pullback, part, points, structure)


def curvature_of_part(
    pullback: Pullback,
    share: Share,
    read: NumberedReader,
    points: DatasetPoints,
    structure: Structure,
    progress: Progress | bool | None = None,
    sampler: BlockSampler | None = None,
    *,
    whole: BatchReader | None = None,
    identity: Mapping[str, str] | None = None,
    part: tuple[int, int] = (0, 1),
) -> State:
    """What some points add to the curvature of all.

    Args:
        pullback: Pullback to the parameters.
        share: The same points as in the first pass over this part, in any order.
        read: Converts a batch into inputs, targets and numbers of points.
        points: Result of the first pass over all parts.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        whole: Where there is one part: converts batches for cross terms, which go over the data several times.
        identity: See :class:`~contrastive_curvature.parts.State`.
        part: Index of the part and number of all parts.

    Raises:
        InputError: The points are not those of the first pass, or the curvature of a batch is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors, or the fix couples points of
            different parts.
    """
    progress, (index, count) = Progress.of(progress), part
    hessian = points.hessian
    coupled = hessian.coupled and structure is not Structure.KRON
    cross: CrossSums | None = make_cross(pullback, points, structure, count) if coupled else None
    sums: dict[str, Tensor] = {}
    totals: Totals | None = None
    record, sample = PassRecord(), FeatureSample.of(pullback)
    dominance = Dominance(pullback, structure, points.n, index if count > 1 else -1)
    # Cross terms are sampled, too, and would have to be known for each half of the sample.
    error = StandardError(pullback, points.n) if points.sampled is not None and not coupled else None
    for number, (batch, given) in enumerate(progress.over(share, _described(points))):
        x, y, numbers = read(batch, given)
        y = check_targets(y, input_length(x), points.function)
        z, context = pullback.forward(x)
        z = check_outputs(z, "model(x)")
        record.add(z, y)
        if sample is not None:
            sample.add(context, numbers)
        found = hessian.at(z, y)
        totals = found.totals if totals is None else totals + found.totals
        if error is not None:
            error.add(hessian, z, y, context, numbers)
        sampled = found.blocks if sampler is None else sampler(found.blocks, pullback)
        if structure is Structure.KRON:
            factors = pullback.kron_factors(context, sampled, points.n)
            check_finite(factors, pullback, f"batch {number} (counted from 0)")
            dominance.add(context, len(z), found.blocks, factors)
            term: Any = named_factors(factors)
        else:
            blocks = sampled
            if cross is not None:
                blocks = cross.add(context, found)
            curvature = pullback.block_term(context, blocks, structure)
            check_finite(curvature, pullback, f"batch {number} (counted from 0)")
            dominance.add(context, len(z), blocks, curvature)
            term = {CURVATURE_SUM: curvature}
        sums = added(sums, term)
    points.check_same(record, index)
    if cross is not None:
        sums = added(sums, cross.sums(in_fixed_order(share.loader), whole, progress))
    if totals is not None:
        sums |= {name: getattr(totals, name) for name in _TOTALS}
    if error is not None:
        sums |= error.sums()
    kept = {} if sample is None or not len(sample) else {FEATURES: sample.kept()}
    origins = {index: record.origin()}
    return State(CURVATURE, identity or {}, origins, count, sums, kept, None, dominance.contributions())


def finished_curvature(
    pullback: Pullback, state: State, points: DatasetPoints, structure: Structure
) -> DatasetCurvature:
    """The curvature of a data set, from the states of all its parts.

    Args:
        pullback: Pullback to the parameters.
        state: Of all parts.
        points: Result of the first pass.
        structure: ``diag``, ``full`` or ``kron``.

    Raises:
        InputError: A part is missing, or the sum is not finite.
    """
    sums, coupled = state.sums, points.hessian.coupled and structure is not Structure.KRON
    state.check_complete()
    total = summed_curvature(pullback, state, structure, finished_cross(sums, points, structure) if coupled else 0)
    # The sums over all pairs, the expensive part of the loss, are in the totals.
    loss, cost = points.hessian.loss_and_cost(Totals(*(sums[name] for name in _TOTALS)))
    error = None if points.sampled is None else relative_error(sums, len(points.sampled), points.n)
    features = kept_features(state)
    return DatasetCurvature(total, loss, cost, points.n, features, points.typical_norm, points.classes, error)


def _described(points: DatasetPoints) -> str:
    return "[curvature]" if points.sampled is None else f"[curvature, {len(points.sampled):,} negatives]"

"""The curvature over all pairs of a data set, not only those inside batches, in two passes over its batches.

The first pass collects the data that a point needs of all others: all outputs, or sums over classes and a sample of
points that replaces all negatives. The second pass computes ``J_i^T H_ii J_i`` for every point i, and the cross terms
``J_i^T H_ij J_j`` of coupled fixes, which may need one more pass for every block of points
(:func:`~.cross_terms.streamed`). For a last layer, the first pass keeps the features up to a limit, and the second pass
does not run the encoder again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit import loop
from contrastive_curvature.fit.class_centres import TYPICAL, CentreCollector, ClassCentres, centres_of
from contrastive_curvature.fit.cross_terms import (
    BY_CLASS,
    class_coupling,
    of_classes,
    products_of_classes,
    refuse_in_parts,
    sampled_columns,
    streamed,
    with_sample,
)
from contrastive_curvature.fit.curvature_options import CurvatureOptions
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, Source
from contrastive_curvature.fit.passes import Passes, PassRecord
from contrastive_curvature.fit.readers import Batch
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.hessian.derivatives import Totals
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.over_dataset import ClassWeights, DatasetHessian, dataset_hessian
from contrastive_curvature.losses.weighting import class_pairs
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.loader import check_not_empty
from contrastive_curvature.pairs.rows import RowCollector, Rows
from contrastive_curvature.structures.structure import added

_log = logging.getLogger("contrastive_curvature")

_POINTS, _INPUT = "points", "input"
"""Names of what is kept: all points, or those that stand for all negatives; and of their inputs."""

_TOTALS = ("degree", "along", "value")

MANY_POINTS = 30_000
"""From so many points on a sample stands for all negatives, where the user leaves it open."""

NEGATIVE_SAMPLES = 2000
"""Points of that sample."""

FEATURES_KEPT = 2**26
"""Numbers that the first pass of a last layer keeps: with as many the encoder runs once a point, with more twice."""


@dataclass(frozen=True)
class AllPairs:
    """The pairs of all points of a data set.

    Args:
        hessian: Output Hessian of all points.
        n: Number N of points.
        dim: Number D of outputs.
        points: All points by ascending numbers; ``None`` if they were not kept.
        centres: Centres of the classes; ``None`` if targets are not class labels.
        sampled: Points that replace all negatives; ``None`` if all pairs are counted.
    """

    hessian: DatasetHessian
    n: int
    dim: int
    points: Rows | None
    centres: ClassCentres | None
    sampled: Rows | None

    @cached_property
    def class_weights(self) -> ClassWeights | None:
        """See :meth:`.DatasetHessian.class_weights`: C^2 numbers, needed before and after the second pass."""
        return self.hessian.class_weights()

    def sampled_inputs(self) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of the points that replace all negatives, which were kept for cross terms."""
        columns = {} if self.sampled is None else self.sampled.columns
        inputs = {name: part for name, part in columns.items() if name.split("/")[0] == _INPUT}
        if set(inputs) == {_INPUT}:
            return inputs[_INPUT], columns["targets"]
        return {name.removeprefix(f"{_INPUT}/"): part for name, part in inputs.items()}, columns["targets"]


@waiting.seldom_waiting()
def statistics(f: Fit, passes: Passes, every: bool = False) -> Total:
    """Run the encoder, and return counts and sums by class, and all points (``every``) or a sample of them."""
    n_kept, keep_inputs = (None, False) if every else _kept_points(f)
    record, classes, points = PassRecord(), CentreCollector(limited=False), RowCollector(n_kept)
    n, numbers_left = 0, FEATURES_KEPT
    for batch, z, features in passes.embedded(f.progress):
        targets = _targets(batch)
        record.add(z, targets)
        if f.options.relation is None:
            classes.add(z, targets)
        columns = {"outputs": z, "targets": batch.labels}
        points.add(batch.numbers, {**columns, **(_columns(batch.x) if keep_inputs else {})})
        n += len(z)
        if features is not None and numbers_left > 0:
            numbers_left -= z.numel() + features.numel()
            passes.cached.append((batch._replace(x={}), z, features))
            if numbers_left < 0:
                passes.cached.clear()
                _log.info(
                    "the features are more than the %d numbers that are kept: the encoder runs twice a point. "
                    "docs/large_data.md#features-once keeps any number of them on disk",
                    FEATURES_KEPT,
                )
    passes.first = passes.latest = record
    table, typical = classes.found()
    kept = points.rows()
    if f.alone and kept.size is not None and _misses_a_class(f.options, kept, n, table):
        passes.cached.clear()
        return statistics(f, passes, every=True)
    return Total(n, {}, {_POINTS: kept, TYPICAL: typical}, table)


def all_pairs(f: Fit, statistics: Total) -> AllPairs:
    """Build the output Hessian of the data set."""
    loss, relation, n = cast("PairLoss", f.options.loss), f.options.relation, statistics.n
    samples = samples_of(f.options, n)
    if statistics.kept[_POINTS].size is None and _misses_a_class(
        f.options, statistics.kept[_POINTS], n, statistics.classes
    ):
        samples = None
    if samples is not None and not loss.from_sums:
        # A sample gives no cross terms here, and Kronecker factors leave them out anyway.
        loss = loss.uncoupled()
    check_not_empty(n)
    kept, table = statistics.kept, statistics.classes
    kept_points = kept[_POINTS].in_order()
    _check_different(kept_points)
    # A sample of few points holds all points.
    every = kept_points.size is None or (samples is None and len(kept_points) == n)
    points = kept_points if every else None
    sampled = None if samples is None else kept_points.subsample(samples)
    check_fittable(n, 1.0 if table is None else class_pairs(table.counts)[2][0])
    outputs = (kept[TYPICAL] if points is None else points).columns["outputs"]
    hessian = dataset_hessian(loss, table, relation, points, sampled, outputs.dtype)
    if table is None:
        check_fittable(n, hessian.related.totals[0])
    return AllPairs(hessian, n, outputs.shape[1], points, centres_of(table, kept[TYPICAL]), sampled)


def parts(f: Fit, pairs: AllPairs, passes: Passes) -> Iterator[Part | Total]:
    """Yield the blocks of every batch over all pairs of the data set, and the cross terms of a coupled fix."""
    pullback = f.pullbacks[0]
    couples = pairs.hessian.coupled and f.structure.couples
    coupling = class_coupling(f, pairs) if couples else None
    columns = sampled_columns(f, pairs) if coupling is not None else []
    title = "[curvature]" if pairs.sampled is None else f"[curvature, {len(pairs.sampled):,} negatives]"
    for batch, z, context in passes.again(f.progress, title):
        targets = _targets(batch)
        points = pairs.hessian.at(z, targets, batch.numbers)
        blocks, cross = points.blocks, None
        terms = {name: getattr(points.totals, name) for name in _TOTALS}
        if coupling is not None:
            blocks, terms[BY_CLASS] = of_classes(pullback, coupling, context, points)
            cross = with_sample(f, pairs, columns, context, points)
        yield Part(z, context, blocks, coupled=None, cross=cross, terms=terms, classes=batch.classes)
    if couples and coupling is None:
        yield Total(curvature=streamed(f, pairs, passes))


def closed(f: Fit, pairs: AllPairs, totals: list[Total]) -> list[DatasetCurvature]:
    """Return the curvature, with the cross terms that need the sums over all points."""
    (total,) = totals
    _tell_samples(f.options, pairs)
    if BY_CLASS in total.terms:
        coupling = class_coupling(f, pairs)
        assert coupling is not None
        cross = products_of_classes(f.structure, coupling, total.terms[BY_CLASS])
        total = replace(total, curvature=added(total.curvature, cross))
    (curvature,) = loop.closed(f, pairs, [total])
    # loop.closed has only summed the expensive part of the loss; this line adds the rest.
    loss, cost = pairs.hessian.loss_and_cost(Totals(*(total.terms[name] for name in _TOTALS)))
    return [replace(curvature, loss=loss, cost=cost, classes=pairs.centres)]


def _targets(batch: Batch) -> Tensor:
    """Return the labels of a batch, on the CPU if possible, or the targets of a relation."""
    return batch.labels if batch.classes is None else batch.classes


DATASET = Source(statistics, all_pairs, parts, closed, sums_classes=False)


def refuse_cross_terms_in_parts(f: Fit) -> None:
    """Refuse cross terms between different parts of the data, before anything is computed."""
    options, loss = f.options, f.options.loss
    if f.source is not DATASET or f.alone or not loss.coupled or not f.structure.couples:
        return
    if options.relation is not None or not (loss.pairs_by_class or samples_of(options) is not None):
        refuse_in_parts(loss)


def _kept_points(f: Fit) -> tuple[int | None, bool]:
    """Return how many points the first pass keeps (``None``: all), and whether it keeps their inputs too."""
    options, loss = f.options, f.options.loss
    if options.relation is not None or not loss.from_sums:
        return None, False
    if loss.sums_suffice:
        # Cross terms of very many classes are computed from the points, if all data are in one part.
        return (None if loss.coupled and f.alone else 0), False
    # The number of points is not known yet; if there are fewer, all are kept.
    wanted = samples_of(options, MANY_POINTS)
    if wanted is None:
        return None, False
    if options.negative_samples == "auto":
        return MANY_POINTS - 1, False
    crosses = loss.coupled and not loss.pairs_by_class and f.structure.couples
    return wanted, crosses


def samples_of(options: CurvatureOptions, n: int = 0) -> int | None:
    """Return the size of the sample that replaces all negatives of ``n`` points; ``None`` counts all pairs."""
    loss = options.loss
    if loss.sums_suffice or options.negative_samples is None:
        return None
    if isinstance(options.negative_samples, int):
        return options.negative_samples
    # Excludes cross terms with negatives, which would need the inputs of the sample.
    unasked = options.relation is None and (loss.pairs_by_class or not loss.coupled)
    return NEGATIVE_SAMPLES if unasked and n >= MANY_POINTS else None


def _misses_a_class(options: CurvatureOptions, kept: Rows, n: int, table: ClassTable | None) -> bool:
    """Return whether a sample that nobody asked for has points of one class only, so that all pairs have to count."""
    if options.negative_samples != "auto" or table is None or len(table.labels) < 2:
        return False
    samples = samples_of(options, n)
    return samples is not None and len(kept.subsample(samples).columns["targets"].unique()) < 2


def _tell_samples(options: CurvatureOptions, pairs: AllPairs) -> None:
    """Log whether a sample replaced all negatives, if the user left the choice open."""
    if options.loss.sums_suffice:
        if isinstance(options.negative_samples, int):
            _log.info("negative_samples is of no effect: sums over classes say everything about the negatives")
    elif options.negative_samples == "auto" and pairs.sampled is None:
        _log.info("negative_samples='auto': all pairs of %d points count", pairs.n)
    elif options.negative_samples == "auto":
        _log.info(
            "negative_samples='auto': of %d points, %d drawn at random stand for all negatives, as from %d points "
            "on; backend_kwargs=dict(negative_samples=None) counts all pairs",
            pairs.n,
            NEGATIVE_SAMPLES,
            MANY_POINTS,
        )


def check_fittable(n: int, positives: float) -> None:
    """Refuse data whose curvature has no positive part."""
    if n < 2:
        wanted = "at least two points, because the loss is a sum over pairs"
        raise InputError("train_loader", wanted, f"{n} point")
    if not positives:
        hint = "The positive part of the curvature is a sum over positive pairs. Check the labels."
        raise InputError("train_loader", "at least one positive pair", "none", hint)


def _check_different(rows: Rows) -> None:
    same = (rows.numbers[1:] == rows.numbers[:-1]).nonzero().flatten()
    if len(same):
        got = f"point {int(rows.numbers[same[0]])} twice"
        hint = "Give every part points of its own; loader.numbers says which points of the data set they are."
        raise InputError("statistics", "every point in one part", got, hint)


def _columns(x: Inputs) -> dict[str, Tensor]:
    """Return inputs as columns of kept points."""
    if isinstance(x, Tensor):
        return {_INPUT: x}
    n = input_length(x)
    whole = [name for name, part in x.items() if not isinstance(part, Tensor) or not part.ndim or part.shape[0] != n]
    if whole:
        raise UnsupportedError(
            f"negative_samples with cross terms between points: the inputs {whole} have no row for every point, so "
            "those of the sampled points cannot be kept. Use pd_fix='psd' or 'fixed', or negative_samples=None."
        )
    return {f"{_INPUT}/{name}": part for name, part in x.items()}

"""The exact curvature of a data set over all its pairs, not only those inside batches, in two passes in any order.

The first pass finds what a point has to know of all others: all outputs, or sums over classes and a sample that stands
for all. The second computes ``J_i^T H_ii J_i`` for every point i, and the cross terms ``J_i^T H_ij J_j`` of coupled
fixes. For a last layer, the first pass keeps the features up to a limit, and the second one takes them from there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.class_centres import TYPICAL, CentreCollector, ClassCentres, centres_of
from contrastive_curvature.fit.cross_terms import CrossTerms, make_cross_terms, refuse_in_parts
from contrastive_curvature.fit.loop import DatasetCurvature, Problem, Seen, finished
from contrastive_curvature.fit.options import CurvatureOptions
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.readers import Batch, Reader
from contrastive_curvature.fit.standard_error import error_terms, relative_error
from contrastive_curvature.fit.state import Findings
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.derivatives import Totals
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.dataset import (
    MANY_POINTS,
    NEGATIVE_SAMPLES,
    dataset_hessian,
    needs_points,
    sampled_unasked,
    sums_suffice,
    without_cross_terms,
)
from contrastive_curvature.losses.weighting import class_pairs
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.pairs.rows import RowCollector, Rows
from contrastive_curvature.structures import Structure

_log = logging.getLogger("contrastive_curvature")

_POINTS, _INPUT = "points", "input"
"""Names of what is kept: all points, or those that stand for all negatives; and of their inputs."""

_TOTALS = ("degree", "along", "value")

FEATURES_KEPT = 2**26
"""Numbers that the first pass of a last layer keeps: with as many the encoder runs once a point, with more twice."""


class DatasetFit(Problem):
    """All pairs of a data set.

    Attributes:
        data_hessian: Output Hessian of all points, after :meth:`take`.
        n: Number N of points.
        classes: Centres of the classes; ``None`` where targets are no class labels.
        dim: Number D of outputs.
        points: All points by ascending numbers; ``None`` where they were not kept.
        sampled: Points that stand for all negatives; ``None`` where all have been counted.
    """

    sums_classes: ClassVar[bool] = False

    data_hessian: DatasetHessian
    n: int
    dim: int
    points: Rows | None
    classes: ClassCentres | None
    sampled: Rows | None
    _seen: Sequence[Batch] = ()
    _cross: CrossTerms | None

    def sampled_inputs(self) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of the points that stand for all negatives, which were kept for cross terms."""
        columns = {} if self.sampled is None else self.sampled.columns
        found = {name: part for name, part in columns.items() if name.split("/")[0] == _INPUT}
        if set(found) == {_INPUT}:
            return found[_INPUT], columns["targets"]
        return {name.removeprefix(f"{_INPUT}/"): part for name, part in found.items()}, columns["targets"]

    def first_pass(self, reader: Reader, *, everything: bool = False) -> Findings:
        """Return numbers and sums of the classes, and all points, or a sample of them."""
        options = self.options
        size, inputs = (None, False) if everything else self._kept()
        self.record, classes, points = PassRecord(), CentreCollector(limited=False), RowCollector(size)
        n = 0
        seen: list[Batch] = []
        room = 0 if everything else FEATURES_KEPT
        for batch, z, features in self.embedded(reader.in_fixed_order()):
            targets: Any = batch.labels
            self.record.add(z, targets)
            if options.relation is None:
                classes.add(z, targets)
            points.add(batch.numbers, {"outputs": z, "targets": targets, **(_columns(batch.x) if inputs else {})})
            if features is not None:
                room -= z.numel() + features.numel()
                outputs: Any = z, features
                seen.append(batch._replace(x=outputs))
            if room < 0 and seen:
                seen.clear()
                _log.info(
                    "the features are more than the %d numbers that are kept: the encoder runs twice a point. A "
                    "feature folder (contrastive_curvature.features) holds any number of them",
                    FEATURES_KEPT,
                )
            n += len(z)
        self._seen = seen
        table, typical = classes.found()
        return Findings(n, {}, {_POINTS: points.rows(), TYPICAL: typical}, table)

    def again(self, reader: Reader) -> Iterable[Batch]:
        """Return the batches of a later pass: the reader's, or those kept, with outputs and features for inputs."""
        return self._seen or reader.in_fixed_order()

    def look(self, batch: Batch, where: str) -> list[tuple[Any, Seen, Batch]]:
        """Return the context of the pullback, the Hessian and the points of a batch."""
        z, context = self.outputs(batch, f"model(x) of {where}")
        return [(context, self.hessian(z, context, batch), batch)]

    def outputs(self, batch: Batch, where: str = "model(x)") -> tuple[Tensor, Any]:
        """Return raw outputs (n, D) and context of a batch that :meth:`again` gave."""
        x: Any = batch.x
        if self._seen:
            return x[0], x[1]
        z, context = self.pullback.forward(x)
        return check_outputs(z, where), context

    def take(self, statistics: Findings, *, keeps: bool = False) -> None:
        """Make the output Hessian of the data set from what the first passes over all parts found.

        Args:
            statistics: The findings.
            keeps: Whether products with the Hessian of all points will be asked for.
        """
        loss, relation, n = self.loss, self.options.relation, statistics.n
        samples = samples_of(self.options, n)
        if not keeps and samples is not None and needs_points(loss):
            # Kronecker factors leave the cross terms out, which a sample does not give.
            loss = without_cross_terms(loss)
        assert isinstance(loss, PairLoss)
        if not n:
            raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
        kept, table = statistics.kept, statistics.classes
        self.n, self.classes, self.sampled = n, centres_of(table, kept[TYPICAL]), None
        points = kept[_POINTS].in_order()
        _check_different(points)
        # Of few points a sample has all.
        every = points.size is None or (samples is None and len(points) == n)
        self.points = points if every else None
        check_fittable(n, 1.0 if table is None else class_pairs(table.counts)[2][0])
        if samples is not None:
            self.sampled = points.first(samples)
        outputs = (kept[TYPICAL] if self.points is None else self.points).columns["outputs"]
        self.dim = outputs.shape[1]
        self.data_hessian = dataset_hessian(loss, table, relation, self.points, self.sampled, outputs.dtype)
        if table is None:
            check_fittable(n, self.data_hessian.derivatives.totals[0])

    def collect(self, reader: Reader) -> None:
        """Keep all points of a reader, and make their output Hessian; no second pass follows."""
        self.take(self.first_pass(reader, everything=True), keeps=True)

    def whole(self) -> OutputHessian:
        """Return the Hessian of all points at once, in the order of their numbers, after :meth:`collect`."""
        assert self.points is not None
        z, targets, hessian = self.points.columns["outputs"], self.points.columns["targets"], self.data_hessian
        if self.sampled is not None:
            return OutputHessian(z, hessian.derivatives, hessian.distance, hessian.pd_fix)
        return self.loss.hessian_at(z, make_relation(self.n, z.device, targets, self.options.relation))

    def begin(self, statistics: Findings) -> None:
        """Make the Hessian of all points, and what observes the second pass."""
        self.take(statistics)
        coupled = self.data_hessian.coupled and self.structure.couples
        self._cross = make_cross_terms(self) if coupled else None
        if self.sampled is not None:
            self.title = f"[curvature, {len(self.sampled):,} negatives]"

    def hessian(self, z: Tensor, context: Any, batch: Batch) -> Seen:
        """Return the blocks of some points over all pairs of the data set."""
        targets: Any = batch.labels
        found = self.data_hessian.at(z, targets, batch.numbers)
        terms = {name: getattr(found.totals, name) for name in _TOTALS}
        if self._cross is None:
            # Cross terms would have to be known for each half of the bank.
            terms |= error_terms(self.data_hessian, self.pullback, z, targets, context, batch.numbers)
            return Seen(z, found.blocks, None, terms)
        blocks, more, cross = self._cross.of_batch(context, found)
        return Seen(z, blocks, None, terms | more, cross)

    def remaining(self, reader: Reader) -> Structure | None:
        """Return the cross terms that the loop has not summed."""
        return None if self._cross is None else self._cross.remaining(reader)

    def finish(self, found: Findings) -> DatasetCurvature:
        """Return the curvature of all parts."""
        sums = found.sums
        tell_samples(self.options, self.n)
        cross = None if self._cross is None else self._cross.finish(sums)
        curvature = finished(self.pullback, found, cross)
        # The sums over all pairs, the expensive part of the loss, are in the totals.
        loss, cost = self.data_hessian.loss_and_cost(Totals(*(sums[name] for name in _TOTALS)))
        error = None if self.sampled is None else relative_error(sums, len(self.sampled), self.n)
        return replace(curvature, loss=loss, cost=cost, classes=self.classes, error=error)

    def check_adds_up(self) -> None:
        """Refuse cross terms between different parts of the data, before anything is computed."""
        loss = self.loss
        if self.alone or not loss.coupled or not self.structure.couples:
            return
        by_class = isinstance(loss, ContrastiveLoss) and (loss.pd_fix.attracting_only or sums_suffice(loss))
        if self.options.relation is not None or not (by_class or samples_of(self.options) is not None):
            refuse_in_parts(loss)

    def _kept(self) -> tuple[int | None, bool]:
        """Return how many points the first pass keeps, ``None`` for all, and whether their inputs, too."""
        options, loss = self.options, self.loss
        if options.relation is not None or needs_points(loss):
            return None, False
        if sums_suffice(loss):
            # Cross terms of very many classes are computed from the points, where they are in one part.
            return (None if loss.coupled and self.alone else 0), False
        # How many points there are is not known yet: of fewer all are kept.
        wanted = samples_of(options, MANY_POINTS)
        if wanted is None:
            return None, False
        if options.negative_samples == "auto":
            return MANY_POINTS - 1, False
        crosses = loss.coupled and not loss.pd_fix.attracting_only and self.structure.couples
        return wanted, crosses


def samples_of(options: CurvatureOptions, n: int = 0) -> int | None:
    """Return the number of points that stand for all negatives of ``n`` points; ``None`` counts all."""
    if isinstance(options.negative_samples, int):
        return None if sums_suffice(options.loss) else options.negative_samples
    many = n >= MANY_POINTS and options.relation is None and sampled_unasked(options.loss)
    return NEGATIVE_SAMPLES if many and options.negative_samples == "auto" else None


def tell_samples(options: CurvatureOptions, n: int) -> None:
    """Say in the log whether a sample stood for all negatives, where the user left it open."""
    if sums_suffice(options.loss):
        if isinstance(options.negative_samples, int):
            _log.info("negative_samples is of no effect: sums over classes say everything about the negatives")
    elif options.negative_samples == "auto" and samples_of(options, n) is None:
        _log.info("negative_samples='auto': all pairs of %d points count", n)
    elif options.negative_samples == "auto":
        _log.info(
            "negative_samples='auto': of %d points, %d drawn at random stand for all negatives, as from %d points "
            "on; backend_kwargs=dict(negative_samples=None) counts all pairs",
            n,
            NEGATIVE_SAMPLES,
            MANY_POINTS,
        )


def check_fittable(n: int, positives: float) -> None:
    """Refuse data whose curvature has no positive part."""
    if n < 2:
        wanted = "at least two points, because the loss is a sum over pairs"
        raise InputError(expected("train_loader", wanted, f"{n} point"))
    if not positives:
        hint = "The positive part of the curvature is a sum over positive pairs. Check the labels."
        raise InputError(expected("train_loader", "at least one positive pair", "none", hint))


def _check_different(rows: Rows) -> None:
    same = (rows.numbers[1:] == rows.numbers[:-1]).nonzero().flatten()
    if len(same):
        came = f"point {int(rows.numbers[same[0]])} twice"
        hint = "Give every part points of its own; loader.numbers says which points of the data set they are."
        raise InputError(expected("statistics", "every point in one part", came, hint))


def _columns(x: Inputs) -> dict[str, Tensor]:
    """Return inputs as columns of kept points."""
    if isinstance(x, Tensor):
        return {_INPUT: x}
    n = input_length(x)
    whole = [name for name, part in x.items() if not isinstance(part, Tensor) or not part.ndim or part.shape[0] != n]
    if whole:
        msg = (
            f"negative_samples with cross terms between points: the inputs {whole} have no row for every point, so "
            "those of the sampled points cannot be kept. Use pd_fix='psd' or 'fixed', or negative_samples=None."
        )
        raise UnsupportedError(msg)
    return {f"{_INPUT}/{name}": part for name, part in x.items()}

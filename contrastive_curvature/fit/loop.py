"""One fit: the loop over the data, what it adds up, and the curvature that comes of it.

A fit is ``J^T H J`` summed over points, with the Hessian ``H`` of the loss in the outputs. :func:`fit` is all of it: a
first pass finds what a point has to know of all others, the loss makes its Hessian of that, and a second pass adds the
curvature of every batch. A :class:`Problem` says which loss over which data this is:

- pairs of the whole data set, of all points or of a sample (:mod:`contrastive_curvature.fit.dataset`);
- pairs inside batches, weighted to stand for all (:mod:`contrastive_curvature.fit.batches`);
- anchors with the candidates of their batch (:mod:`contrastive_curvature.fit.anchors`);
- two towers, each with a curvature of its own (:mod:`contrastive_curvature.fit.towers`).

All of them read batches from a :class:`~contrastive_curvature.fit.readers.Reader`. What is summed merges, so several
processes or jobs may each take a part of the data (:mod:`contrastive_curvature.fit.processes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.class_centres import TYPICAL, CentreCollector, ClassCentres, centres_of
from contrastive_curvature.fit.dominance import Dominance
from contrastive_curvature.fit.mc_samples import Sampler, make_sampler, term_of
from contrastive_curvature.fit.options import CurvatureOptions
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.readers import Batch, Reader
from contrastive_curvature.fit.state import Findings, Origin
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import RowCollector, Rows, content_numbers, united
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures import Diagonal, Structure
from contrastive_curvature.structures.base import added
from contrastive_curvature.structures.finite import check_finite, sum_is_finite

VALUE, COST = "value", "cost"
"""Names of sums over batches: the loss, and its non-negative version."""

_B = TypeVar("_B")
Look = Callable[[_B, str], Sequence[tuple[Any, "Seen", Batch]]]
"""From a batch and its name to what each sum adds: context of the pullback, Hessian and points."""

_FEATURES, _NORMS = "features", "norms"


@dataclass(frozen=True)
class DatasetCurvature:
    """Unclamped curvature of a data set.

    Args:
        curvature: The curvature.
        loss: Value of the loss.
        cost: The loss above the least that it can be, from which the default temperature is computed; see
            :meth:`DatasetHessian.loss_and_cost`.
        n: Number of points.
        features: A sample of the features of a last layer, in the column ``features``, where the second pass saw them;
            with class labels in the column ``classes``, where all points have one.
        typical_norm: Mean norm of the raw outputs, one number.
        classes: Centres of the classes, where targets are class labels.
        error: Relative standard error of the curvature, where the negatives are a sample.
    """

    curvature: Structure
    loss: Tensor
    cost: Tensor
    n: int
    features: Rows | None = None
    typical_norm: Tensor | None = None
    classes: ClassCentres | None = None
    error: float | None = None


def fit(problem: Problem, reader: Reader) -> DatasetCurvature:
    """Return the unclamped curvature of all data of a reader; warns of a point that contributes most of it."""
    problem.begin(problem.first_pass(reader))
    return problem.finish(second_pass(problem, reader)[0])


def second_pass(problem: Problem, reader: Reader) -> tuple[Findings, PassRecord | None]:
    """Return the curvature of all batches of a reader, as a sum that merges, and which points they were."""
    total = problem.new_sum()
    add_up([total], problem.again(reader), problem.look, problem.progress, problem.title)
    problem.check_same(total.record)
    return total.findings(problem.remaining(reader)), total.record


def add_up(
    totals: Sequence[CurvatureSum], batches: Iterable[_B], look: Look[_B], progress: Progress, title: str
) -> None:
    """Add every batch to the sum of each set of parameters: of one encoder, or of two towers."""
    for number, batch in enumerate(progress.over(batches, title)):
        for total, seen in zip(totals, look(batch, f"batch {number} (counted from 0)"), strict=True):
            total.add(*seen)
    for total in totals:
        total.check_finite()


class Seen(NamedTuple):
    """The Hessian at the points of a batch.

    Args:
        z: Raw outputs, shape (n, D).
        blocks: Hessian blocks of single points.
        coupled: The Hessian with its cross terms, where the points of the batch are coupled with each other alone.
        terms: Further numbers to be summed, by name.
        cross: Cross terms of the points of the batch with others.
    """

    z: Tensor
    blocks: Blocks
    coupled: OutputHessian | None = None
    terms: Mapping[str, Tensor] = {}
    cross: Structure | None = None

    @classmethod
    def of(cls, hessian: OutputHessian, **terms: Tensor) -> Seen:
        """Return what a batch adds whose points are compared with each other alone."""
        value, cost = hessian.loss_and_cost()
        terms |= {VALUE: value.double(), COST: cost.double()}
        return cls(hessian.z, hessian.blocks, hessian if hessian.coupled else None, terms)


class CurvatureSum:
    """What a pass over points adds up: their curvature, and what a posterior keeps of them.

    Args:
        pullback: Pullback to the parameters.
        structure: What is kept of the curvature.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        part: Index of the part of the data; -1 for all of it.
        record: Takes note of the points, so that other passes can be compared.
        classes: Whether sums of embeddings by class are wanted.
    """

    def __init__(
        self,
        pullback: Pullback,
        structure: type[Structure],
        sampler: Sampler | None = None,
        part: int = -1,
        record: PassRecord | None = None,
        *,
        classes: bool = True,
    ) -> None:
        self.pullback, self.structure, self.sampler = pullback, structure, sampler
        self.record = record
        self._dominance = Dominance(pullback, structure, part)
        self._features: RowCollector | None = None
        if isinstance(pullback, LastLayerPullback):
            # 2,000 rows and 2^24 numbers at most, but 200 rows of any width: some of each class.
            width = pullback.encoder.require_last_layer().in_features
            self._features = RowCollector(max(200, min(2000, 2**24 // max(1, width))))
        self._classes: CentreCollector | None = CentreCollector() if classes else None
        self._curvature: Structure | None = None
        self._sums: dict[str, Tensor] = {}
        self._batches = self._n = 0
        self._finite: Tensor | bool = True
        self._first_bad: Tensor | int = 0
        """Number of the first batch whose curvature is not finite, or of batches."""

    def add(self, context: Any, seen: Seen, batch: Batch) -> None:
        """Add a batch."""
        term, alone = self._terms_of(context, seen)
        z = seen.z
        # Read once at the end: a look at the device in every batch would keep it waiting.
        self._finite = self._finite & sum_is_finite(term.tensors())
        self._first_bad = self._first_bad + self._finite
        self._dominance.add(context, seen.blocks, alone)
        if self._features is not None:
            classes = {} if batch.classes is None else {"classes": batch.classes}
            self._features.add(content_numbers(z), {"features": context} | classes)
        if batch.classes is None:
            self._classes = None
        elif self._classes is not None:
            self._classes.add(z, batch.classes)
        if self.record is not None:
            self.record.add(z, torch.zeros(len(z)) if batch.labels is None else batch.labels)
        self._curvature = added(self._curvature, added(term, seen.cross))
        self._sums = united(self._sums, {**seen.terms, _NORMS: len(z) * mean_norm(z)}, torch.add)
        self._batches, self._n = self._batches + 1, self._n + len(z)

    def check_finite(self) -> None:
        """Refuse a curvature with NaN or infinity, which no further batch takes out of the sum."""
        if self._batches and not bool(self._finite):
            assert self._curvature is not None
            check_finite(self._curvature.plain(), self.pullback, f"batch {int(self._first_bad)} (counted from 0)")

    def _terms_of(self, context: Any, seen: Seen) -> tuple[Structure, Structure]:
        """Return the unclamped curvature of a batch, and that of its points each by itself."""
        if seen.coupled is None or not self.structure.couples:
            blocks = seen.blocks if self.sampler is None else self.sampler(seen.blocks, self.pullback)
            term = self.structure.term(self.pullback, context, blocks)
            return term, term
        # Cross terms nearly cancel the terms of single points, so points are compared without cross terms.
        alone = Diagonal.term(self.pullback, context, seen.blocks)
        return term_of(self.structure, self.pullback, context, seen.coupled, self.sampler), alone

    def findings(self, more: Structure | None = None) -> Findings:
        """Return all that was found, with what the loop has not summed."""
        table, kept = None, {}
        if self._classes is not None and self._batches:
            table, kept[TYPICAL] = self._classes.found()
        if self._features is not None and self._batches:
            kept[_FEATURES] = self._features.rows()
        curvature = added(self._curvature, more)
        return Findings(self._n, self._sums, kept, table, self._dominance.contributions(), curvature)


class Problem:
    """A loss over data, whose methods :func:`fit` calls in the order below.

    1. ``first_pass(reader)`` goes over the data for what a point has to know of all others;
    2. ``begin(statistics)`` makes the Hessian of the data set from that;
    3. ``look(batch)``, for every batch of the second pass, runs the encoder and asks ``hessian(z, ...)`` for the
       Hessian at its outputs, which a :class:`CurvatureSum` adds;
    4. ``remaining(reader)`` gives what the loop has not summed, such as cross terms of points in different batches;
    5. ``finish(found)`` makes the curvature.

    The default, :class:`~contrastive_curvature.fit.dataset.DatasetFit`, takes loss, cost and class centres in
    ``finish`` from its first pass; the others leave all of it to :func:`finished`.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        pullback: Pullback to the parameters.
        structure: What is kept of the curvature.
        options: The loss, and what it is summed over.
        progress: Of the whole fit.
        part: Index of the part of the data and number of all parts; ``None`` for a fit of all data in one process.
    """

    title: str = "[curvature]"
    records: ClassVar[bool] = True
    """Whether both passes have to see the same points."""

    sums_classes: ClassVar[bool] = True
    """Whether the second pass sums embeddings by class; ``False`` where the first one has done it."""

    def __init__(
        self,
        encoder: Encoder,
        pullback: Pullback,
        structure: type[Structure],
        options: CurvatureOptions,
        progress: Progress,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.encoder, self.pullback, self.structure = encoder, pullback, structure
        self.options, self.loss, self.progress, self.part = options, options.loss, progress, part
        self.record: PassRecord | None = None
        """Of the points of the first pass, where this process has run it."""

    @property
    def alone(self) -> bool:
        """Whether all data are in one part."""
        return self.part is None or self.part[1] == 1

    def embedded(self, reader: Reader) -> Iterator[tuple[Batch, Tensor, Tensor | None]]:
        """Run the encoder; give every batch with its raw outputs (n, D) and, for a last layer, its features (n, F)."""
        last_layer = isinstance(self.pullback, LastLayerPullback)
        for number, batch in enumerate(self.progress.over(reader, "[embedding]")):
            with torch.no_grad():
                z, features = self.encoder.features(batch.x) if last_layer else (self.encoder(batch.x), None)
            yield batch, check_outputs(z, f"model(x) of batch {number} (counted from 0)"), features

    def new_sum(self) -> CurvatureSum:
        """Return an empty sum."""
        index = 0 if self.part is None else self.part[0]
        # Different in every part.
        sampler = make_sampler(self.options.mc_samples, torch.Generator().manual_seed(index))
        record = PassRecord() if self.records or self.part is not None else None
        place = -1 if self.alone else index
        return CurvatureSum(self.pullback, self.structure, sampler, place, record, classes=self.sums_classes)

    def first_pass(self, reader: Reader) -> Findings:
        """Return what all batches have to know of this part of the data; by default nothing."""
        del reader
        return Findings()

    def again(self, reader: Reader) -> Iterable[Batch]:
        """Return the batches of the second pass; by default the reader's."""
        return reader

    def begin(self, statistics: Findings) -> None:
        """Make the Hessian from what the first passes over all parts found."""

    def look(self, batch: Batch, where: str) -> list[tuple[Any, Seen, Batch]]:
        """Run the encoder on a batch, and return the context of the pullback, the Hessian and the points."""
        z, context = self.pullback.forward(batch.x)
        return [(context, self.hessian(check_outputs(z, f"model(x) of {where}"), context, batch), batch)]

    def hessian(self, z: Tensor, context: Any, batch: Batch) -> Seen:
        """Return the Hessian at the outputs (n, D) of a batch."""
        raise NotImplementedError

    def check_same(self, again: PassRecord | None) -> None:
        """Refuse a second pass over other points than those of the first one."""
        if self.record is not None and again is not None:
            self.record.check_same(again)

    def check_adds_up(self) -> None:
        """Refuse a curvature with cross terms between different parts of the data, before anything is computed."""

    def check_origin(self, before: Origin | None, again: Origin, part: int, argument: str) -> None:
        """Refuse sums of a part over other points than those that its first pass saw; ``argument`` holds them."""
        same = before is not None and (before.n, before.targets) == (again.n, again.targets)
        # A first pass that counts targets has no outputs.
        if not self.records or (same and before is not None and (not before.extremes or before.same_points(again))):
            return
        n = 0 if before is None else before.n
        hint = "Give each part the same points in both passes, and use the same encoder."
        came = f"{again.n} points for {n}" if again.n != n else "other points, targets or outputs"
        raise InputError(expected(argument, f"the points of part {part} of the statistics", came, hint))

    def remaining(self, reader: Reader) -> Structure | None:
        """Return what the loop has not summed; by default nothing."""
        del reader
        return None

    def finish(self, found: Findings) -> DatasetCurvature:
        """Return the curvature of all parts."""
        return finished(self.pullback, found)


def finished(pullback: Pullback, found: Findings, more: Structure | None = None) -> DatasetCurvature:
    """Return the curvature of all batches; warns of a point that contributes most of it."""
    sums, classes = found.sums, found.classes
    curvature = added(found.curvature, more)
    if not found.n or curvature is None:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    check_finite(curvature.plain(), pullback, "the sum over all batches")
    found.contributions.warn()
    dtype = curvature.tensors()[0].dtype
    value, cost = (sums[name].to(dtype) if name in sums else torch.zeros(()) for name in (VALUE, COST))
    # Where a part had no sums of classes, those of the others do not say which classes there are.
    complete = classes is not None and int(classes.counts.sum()) == found.n and TYPICAL in found.kept
    centres = centres_of(classes, found.kept[TYPICAL]) if complete else None
    return DatasetCurvature(curvature, value, cost, found.n, found.kept.get(_FEATURES), sums[_NORMS] / found.n, centres)


def mean_norm(z: Tensor) -> Tensor:
    """Return the mean norm of raw outputs (N, D), float64 and without a graph; no sum of float32 norms overflows."""
    return normalize(z.detach())[1].double().mean()

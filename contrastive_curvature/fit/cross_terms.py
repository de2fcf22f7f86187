"""The cross terms ``sum_ij J_i^T H_ij J_j`` of coupled fixes over a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.readers import Batch, Reader
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.dataset import HessianPart, HessianPoints
from contrastive_curvature.hessian.derivatives import ClassWeights
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.contrastive_classes import ContrastiveOfClasses, LabelledPoints, SampledContrastive
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import slice_inputs
from contrastive_curvature.pairs.relation import chunks
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.base import added

if TYPE_CHECKING:
    from contrastive_curvature.fit.dataset import DatasetFit

_CLASS_SUM_ELEMENTS = 2**28
_FEATURE_ELEMENTS = 2**27

_Placed = tuple[Any, HessianPart, Tensor]
"""Context and points of a part of a batch, and the number of each point."""

_BY_CLASS = "cross/classes"
"""Name of the sums over points of the rows of ``J`` of every class."""


class CrossTerms:
    """The cross terms of some points with all others, while their batches pass by."""

    def __init__(self, problem: DatasetFit) -> None:
        self.problem, self.pullback, self.structure = problem, problem.pullback, problem.structure

    def of_batch(self, context: Any, part: HessianPoints) -> tuple[Blocks, dict[str, Tensor], Structure | None]:
        """Return the blocks of a batch, sums of it, and cross terms.

        The blocks are without the cross terms of a point with itself that the sums have.
        """
        del context
        return part.blocks, {}, None

    def remaining(self, reader: Reader) -> Structure | None:
        """Return what takes further passes over the data."""
        del reader
        return None

    def finish(self, sums: Mapping[str, Tensor]) -> Structure | None:
        """Return the cross terms from sums over all points."""
        del sums
        return None


def make_cross_terms(problem: DatasetFit) -> CrossTerms:
    """Return what computes the cross terms of some points with all others."""
    hessian = problem.data_hessian
    derivatives = hessian.derivatives
    coupling = derivatives.class_weights()
    if coupling is None and isinstance(derivatives, SampledContrastive):
        # Of a sample those of the positive pairs, which no margin decides.
        coupling = derivatives.of_classes.class_weights(attracting=True)
    if coupling is not None:
        numbers = coupling.classes.numel() * problem.dim * problem.pullback.n_params
        if numbers <= _CLASS_SUM_ELEMENTS:
            if not isinstance(derivatives, SampledContrastive) or derivatives.of_classes.pairs_by_class:
                return _ByClass(problem, coupling)
            return _WithSample(problem, coupling, derivatives.of_classes)
        if isinstance(derivatives, SampledContrastive):
            msg = (
                f"pd_fix={str(hessian.pd_fix)!r}: sums over {coupling.classes.numel()} classes of "
                f"{problem.dim} rows of {problem.pullback.n_params} parameters have {numbers:.2g} numbers. Use "
                "pd_fix='psd' or 'fixed', which couple no points, or negative_samples=None."
            )
            raise UnsupportedError(msg)
    if not problem.alone:
        refuse_in_parts(problem.loss)
    return _Streamed(problem)


def refuse_in_parts(loss: CosineLoss) -> NoReturn:
    """Say that the cross terms of a loss do not add up over parts of the data."""
    msg = (
        f"pd_fix={str(loss.pd_fix)!r}: every point is coupled with every other one, and they are in several parts. "
        "Use pd_fix='psd' or 'fixed', which couple no points; ContrastiveLoss with "
        "backend_kwargs=dict(negative_samples=2000), whose cross terms add up; or one process."
    )
    raise UnsupportedError(msg)


class _ByClass(CrossTerms):
    """For pair weights that depend on the classes only: one sum of rows per class."""

    def __init__(self, problem: DatasetFit, coupling: ClassWeights) -> None:
        super().__init__(problem)
        self.coupling = coupling

    def of_batch(self, context: Any, part: HessianPoints) -> tuple[Blocks, dict[str, Tensor], Structure | None]:
        index = torch.searchsorted(self.coupling.classes, part.targets)
        sums = self.pullback.class_sums(context, part.tangent_axes(), index, self.coupling.classes.numel())
        y = self.coupling.y if self.coupling.y.ndim == 1 else self.coupling.y.diagonal()
        return part.blocks.add_projector(y[index] / part.n / part.n), {_BY_CLASS: sums}, None

    def finish(self, sums: Mapping[str, Tensor]) -> Structure | None:
        rows = sums[_BY_CLASS]
        with torch.autocast(rows.device.type, enabled=False):
            y = self.coupling.y.to(rows)
            weighted = -(y.view(-1, 1, 1) * rows if y.ndim == 1 else (y @ rows.flatten(1)).view_as(rows))
            return self.structure.products(rows.flatten(0, 1), weighted.flatten(0, 1))


class _WithSample(_ByClass):
    """The positives by class; the negatives of a point among the sampled ones, which stand for all."""

    def __init__(self, problem: DatasetFit, coupling: ClassWeights, of_classes: ContrastiveOfClasses) -> None:
        super().__init__(problem, coupling)
        self.of_classes = of_classes
        self._columns: list[tuple[Any, HessianPart]] = []

    def of_batch(self, context: Any, part: HessianPoints) -> tuple[Blocks, dict[str, Tensor], Structure | None]:
        self._columns = self._columns or list(self._sampled())
        blocks, sums, total = super().of_batch(context, part)
        for rows in chunks(len(part.u), self.structure.tile(self.pullback, part.u.shape[1])):
            u, n, mine = part.u[rows], part.n[rows], self.pullback.slice_context(context, rows)
            for column, other in self._columns:
                y = self.of_classes.repelling(u, part.targets[rows], LabelledPoints(other.u, other.targets))
                cross = CrossBlocks(u, n, other.u, other.n, y, None)
                total = added(total, self.structure.cross(self.pullback, mine, column, cross))
        return blocks, sums, total

    def _sampled(self) -> Iterator[tuple[Any, HessianPart]]:
        inputs, targets = self.problem.sampled_inputs()
        for rows in chunks(len(targets), self.structure.tile(self.pullback, self.problem.dim)):
            z, context = self.pullback.forward(slice_inputs(inputs, rows))
            yield context, HessianPart(*normalize(check_outputs(z, "model(x)")), targets[rows])


class _Streamed(CrossTerms):
    """Block by block: a block of points i stays in memory during a pass over all points j."""

    _order: Tensor | None = None

    def remaining(self, reader: Reader) -> Structure | None:
        """Return all cross terms, without pairs of a point with itself."""
        batches, progress = self.problem.again(reader.in_fixed_order()), self.problem.progress
        total: Structure | None = None
        with progress.bar("[cross terms]", total=self.problem.n**2) as bar:
            for block in _grouped(self._parts(batches)):
                for context, columns, others in self._parts(batches):
                    for row_context, rows, numbers in block:
                        cross = self.problem.data_hessian.cross(rows, columns, numbers.unsqueeze(1) == others)
                        total = added(total, self.structure.cross(self.pullback, row_context, context, cross))
                        bar.update(cross.y.numel())
        return total

    def _parts(self, batches: Iterable[Batch]) -> Iterator[_Placed]:
        """Give one pass over the data, which must be the data of the first pass."""
        record, n, hessian = PassRecord(), self.problem.n, self.problem.data_hessian
        found: list[Tensor] = []
        seen = torch.zeros(n, dtype=torch.int64, device=hessian.derivatives.u.device)
        for batch in batches:
            y: Any = batch.labels
            z, context = self.problem.outputs(batch)
            record.add(z, y)
            for rows in chunks(len(z), self.structure.tile(self.pullback, z.shape[1])):
                part = hessian.place(z[rows], y[rows])
                places = hessian.derivatives.places(part.u, part.targets)
                # Equal points have one place, and take turns.
                turn = (places.unsqueeze(1) == places).tril(-1).sum(1) + seen[places]
                seen.index_add_(0, places, torch.ones_like(places))
                found.append(places + n * turn)
                yield self.pullback.slice_context(context, rows), part, found[-1]
        self.problem.check_same(record)
        numbers = torch.cat(found).sort().values
        if self._order is not None and not torch.equal(self._order, numbers):
            wanted, came = "the same order in every pass, as some points are nearly equal", "another one"
            raise InputError(expected("train_loader", wanted, came, "Turn shuffling off."))
        self._order = numbers


def _grouped(points: Iterator[_Placed]) -> Iterator[list[_Placed]]:
    """Group batches into blocks whose contexts have at least ``_FEATURE_ELEMENTS`` numbers."""
    block: list[_Placed] = []
    numbers = 0
    for item in points:
        block.append(item)
        context = item[0]
        tensors = context.values() if isinstance(context, Mapping) else [context]
        numbers += sum(t.numel() for t in tensors if isinstance(t, Tensor))
        if numbers >= _FEATURE_ELEMENTS:
            yield block
            block, numbers = [], 0
    if block:
        yield block

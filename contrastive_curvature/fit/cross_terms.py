"""The cross terms ``sum_ij J_i^T H_ij J_j`` of coupled fixes over a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.readers import Batch, Reader
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.dataset import HessianPart, HessianPoints
from contrastive_curvature.hessian.derivatives import ClassWeights
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import slice_inputs
from contrastive_curvature.pairs.relation import chunks
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.base import added

if TYPE_CHECKING:
    from contrastive_curvature.fit.dataset import DatasetFit
    from contrastive_curvature.pairs.rows import Rows

_CLASS_SUM_ELEMENTS = 2**28
_FEATURE_ELEMENTS = 2**27

_Placed = tuple[Any, HessianPart]
"""Context and points of a part of a batch."""

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
    coupling = hessian.derivatives.class_weights()
    if coupling is not None:
        numbers = coupling.classes.numel() * problem.dim * problem.pullback.n_params
        if numbers <= _CLASS_SUM_ELEMENTS:
            return (_ByClass if problem.loss.pd_fix.attracting_only or problem.sampled is None else _WithBank)(
                problem, coupling
            )
        if problem.points is None or problem.sampled is not None:
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


class _WithBank(_ByClass):
    """The positives by class; the negatives of a point among those of the bank, which stand for all."""

    _bank: Sequence[tuple[Any, HessianPart]] = ()

    def of_batch(self, context: Any, part: HessianPoints) -> tuple[Blocks, dict[str, Tensor], Structure | None]:
        self._bank = self._bank or list(self._columns())
        blocks, sums, total = super().of_batch(context, part)
        for rows in chunks(len(part.u), self.structure.tile(self.pullback, part.u.shape[1])):
            some = self.pullback.slice_context(context, rows)
            for column, other in self._bank:
                cross = self.problem.data_hessian.cross(part[rows], other)
                total = added(total, self.structure.cross(self.pullback, some, column, cross))
        return blocks, sums, total

    def _columns(self) -> Iterator[tuple[Any, HessianPart]]:
        (inputs, targets), bank = self.problem.sampled_inputs(), cast("Rows", self.problem.sampled)
        for rows in chunks(len(targets), self.structure.tile(self.pullback, self.problem.dim)):
            z, context = self.pullback.forward(slice_inputs(inputs, rows))
            check_outputs(z, "model(x)")
            yield context, self.problem.data_hessian.place(z, targets[rows], bank.numbers[rows])


class _Streamed(CrossTerms):
    """Block by block: a block of points i stays in memory during a pass over all points j."""

    def remaining(self, reader: Reader) -> Structure | None:
        """Return all cross terms, without pairs of a point with itself."""
        batches, progress = self.problem.again(reader), self.problem.progress
        total: Structure | None = None
        with progress.bar("[cross terms]", total=self.problem.n**2) as bar:
            for block in _grouped(self._parts(batches)):
                for context, columns in self._parts(batches):
                    for row_context, rows in block:
                        cross = self.problem.data_hessian.cross(rows, columns)
                        total = added(total, self.structure.cross(self.pullback, row_context, context, cross))
                        bar.update(cross.y.numel())
        return total

    def _parts(self, batches: Iterable[Batch]) -> Iterator[_Placed]:
        """Give one pass over the data, which must be the data of the first pass."""
        record = PassRecord()
        for batch in batches:
            y: Any = batch.labels
            z, context = self.problem.outputs(batch)
            record.add(z, y)
            part = self.problem.data_hessian.place(z, y, batch.numbers)
            for rows in chunks(len(z), self.structure.tile(self.pullback, z.shape[1])):
                yield self.pullback.slice_context(context, rows), part[rows]
        self.problem.check_same(record)


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

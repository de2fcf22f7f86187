"""The cross terms ``sum_ij J_i^T H_ij J_j`` of coupled fixes over a data set."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.statistics import BatchReader, check_targets
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.dataset import ClassCoupling, DatasetHessian, HessianPart, HessianPoints
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.contrastive_classes import LabelledPoints, SampledContrastive
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.progress import Progress

if TYPE_CHECKING:
    from contrastive_curvature.fit.dataset import DatasetPoints

__all__ = ["CrossSums", "finished_cross", "make_cross", "refuse_in_parts"]

_CLASS_SUM_ELEMENTS = 2**28
_FEATURE_ELEMENTS = 2**27

_Placed = tuple[Any, HessianPart, Tensor]
"""Context and points of a part of a batch, and the number of each point."""

_BY_CLASS, _BY_SAMPLE = "cross/classes", "cross/sample"
"""Names of sums over points: of the rows of ``J`` of every class, and of terms with sampled points."""


class CrossSums(Protocol):
    """Sums over points that the cross terms follow from."""

    def add(self, context: Any, part: HessianPoints) -> Blocks:
        """Take a batch into account.

        Returns:
            Its diagonal blocks, minus what the sums have where its points meet themselves.
        """

    def sums(self, loader: Iterable[Any], read: BatchReader | None, progress: Progress) -> dict[str, Tensor]:
        """All sums of these points; what the loader gives again is the same as what was added."""


def make_cross(pullback: Pullback, points: DatasetPoints, structure: Structure, parts: int) -> CrossSums:
    """What computes the cross terms of some points with all others.

    Args:
        pullback: Pullback to the parameters.
        points: Result of the first pass.
        structure: ``diag`` or ``full``.
        parts: In how many parts the points come.

    Raises:
        UnsupportedError: The other points of a pair may be in another part, or are too many.
    """
    coupling = _coupling(points)
    sampled = isinstance(points.hessian.derivatives, SampledContrastive)
    if coupling is not None:
        numbers = coupling.classes.numel() * points.dim * pullback.n_params
        if numbers <= _CLASS_SUM_ELEMENTS:
            by_class = _ByClass(pullback, coupling)
            return _WithSample(pullback, points, structure, by_class) if derivatives_sample(points) else by_class
        if sampled:
            msg = (
                f"pd_fix={str(points.hessian.pd_fix)!r}: sums over {coupling.classes.numel()} classes of "
                f"{points.dim} rows of {pullback.n_params} parameters have {numbers:.2g} numbers. Use pd_fix='psd' or "
                "'fixed', which couple no points, or negative_samples=None."
            )
            raise UnsupportedError(msg)
    if parts > 1:
        refuse_in_parts(points.hessian)
    return _Streamed(pullback, points, structure)


def refuse_in_parts(fixed: CosineLoss | DatasetHessian) -> NoReturn:
    """Say that the cross terms of a loss, or of its Hessian, do not add up over parts of the data.

    Raises:
        UnsupportedError: Always.
    """
    msg = (
        f"pd_fix={str(fixed.pd_fix)!r}: every point is coupled with every other one, and they are in several parts. "
        "Use pd_fix='psd' or 'fixed', which couple no points; ContrastiveLoss with "
        "backend_kwargs=dict(negative_samples=2000), whose cross terms add up; or one process."
    )
    raise UnsupportedError(msg)


def derivatives_sample(points: DatasetPoints) -> LabelledPoints | None:
    """The points that stand for all negatives; ``None`` where all have been counted."""
    derivatives = points.hessian.derivatives
    if not isinstance(derivatives, SampledContrastive) or derivatives.of_classes.pairs_by_class:
        return None
    return derivatives.sample


def finished_cross(sums: Mapping[str, Tensor], points: DatasetPoints, structure: Structure) -> Tensor | int:
    """The cross terms, from sums over all points.

    Args:
        sums: Of all parts.
        points: Result of the first pass.
        structure: ``diag`` or ``full``.
    """
    total: Tensor | int = 0
    if _BY_CLASS in sums:
        coupling = _coupling(points)
        if coupling is None:
            msg = "sums over classes without weights between classes"
            raise RuntimeError(msg)
        total = _of_classes(sums[_BY_CLASS], coupling, structure)
    if _BY_SAMPLE in sums:
        part = sums[_BY_SAMPLE]
        # Every pair has both ends among the sampled points as often as not.
        total = total + (part if structure is Structure.DIAG else (part + part.T) / 2)
    return total


def _coupling(points: DatasetPoints) -> ClassCoupling | None:
    """Pair weights between classes; of a sample those of the positive pairs, whose weights no margin decides."""
    coupling, derivatives = points.hessian.class_coupling(), points.hessian.derivatives
    if coupling is None and isinstance(derivatives, SampledContrastive):
        return ClassCoupling(*_attracting(derivatives))
    return coupling


def _attracting(derivatives: SampledContrastive) -> tuple[Tensor, Tensor]:
    found = derivatives.of_classes.class_weights(attracting=True)
    if found is None:
        msg = "positive pairs have weights between classes"
        raise RuntimeError(msg)
    return found


def _of_classes(sums: Tensor, coupling: ClassCoupling, structure: Structure) -> Tensor:
    with torch.autocast(sums.device.type, enabled=False):
        y = coupling.y.to(sums)
        weighted = -(y.view(-1, 1, 1) * sums if y.ndim == 1 else (y @ sums.flatten(1)).view_as(sums))
        if structure is Structure.DIAG:
            return (sums * weighted).sum((0, 1))
        return sums.flatten(0, 1).T @ weighted.flatten(0, 1)


class _ByClass:
    """For pair weights that depend on the classes only: one sum of rows per class."""

    def __init__(self, pullback: Pullback, coupling: ClassCoupling) -> None:
        self.pullback, self.coupling = pullback, coupling
        self._sums: Tensor | None = None

    def add(self, context: Any, part: HessianPoints) -> Blocks:
        index = torch.searchsorted(self.coupling.classes, part.targets)
        sums = self.pullback.class_sums(context, part.tangent_axes(), index, self.coupling.classes.numel())
        self._sums = sums if self._sums is None else self._sums + sums
        y = self.coupling.y if self.coupling.y.ndim == 1 else self.coupling.y.diagonal()
        return part.blocks.add_projector(y[index] / part.n / part.n)

    def sums(self, loader: Iterable[Any], read: BatchReader | None, progress: Progress) -> dict[str, Tensor]:
        del loader, read, progress
        return {} if self._sums is None else {_BY_CLASS: self._sums}


class _WithSample:
    """The positives by class; the negatives of a point among the sampled ones, which stand for all."""

    def __init__(self, pullback: Pullback, points: DatasetPoints, structure: Structure, by_class: _ByClass) -> None:
        self.pullback, self.points, self.structure, self.by_class = pullback, points, structure, by_class
        self._columns = list(self._sampled())
        self._sum: Tensor | None = None

    def add(self, context: Any, part: HessianPoints) -> Blocks:
        blocks = self.by_class.add(context, part)
        derivatives = self.points.hessian.derivatives
        if not isinstance(derivatives, SampledContrastive):
            msg = "a sample of other derivatives"
            raise TypeError(msg)
        step = self.pullback.tile_size(self.structure, part.u.shape[1])
        for start in range(0, len(part.u), step):
            rows = slice(start, start + step)
            u, n, mine = part.u[rows], part.n[rows], self.pullback.slice_context(context, rows)
            for column, other in self._columns:
                y = derivatives.of_classes.repelling(u, part.targets[rows], LabelledPoints(other.u, other.targets))
                cross = CrossBlocks(u, n, other.u, other.n, y, None)
                term = self.pullback.cross_term(mine, column, cross, self.structure)
                self._sum = term if self._sum is None else self._sum + term
        return blocks

    def sums(self, loader: Iterable[Any], read: BatchReader | None, progress: Progress) -> dict[str, Tensor]:
        found = self.by_class.sums(loader, read, progress)
        return found if self._sum is None else {**found, _BY_SAMPLE: self._sum}

    def _sampled(self) -> Iterator[tuple[Any, HessianPart]]:
        inputs, targets = self.points.sampled_inputs, self.points.sampled_targets
        if inputs is None or targets is None:
            msg = "the inputs of the sampled points were not kept"
            raise RuntimeError(msg)
        step = self.pullback.tile_size(self.structure, self.points.dim)
        for start in range(0, len(targets), step):
            rows = slice(start, start + step)
            some: Inputs = slice_inputs(inputs, rows)
            z, context = self.pullback.forward(some)
            yield context, HessianPart(*normalize(check_outputs(z, "model(x)")), targets[rows])


class _Streamed:
    """Block by block: a block of points i stays in memory during a pass over all points j."""

    def __init__(self, pullback: Pullback, points: DatasetPoints, structure: Structure) -> None:
        self.pullback, self.points, self.structure = pullback, points, structure
        self._order: Tensor | None = None

    def add(self, context: Any, part: HessianPoints) -> Blocks:
        """Do nothing: :meth:`sums` computes all cross terms, without pairs of a point with itself."""
        del context
        return part.blocks

    def sums(self, loader: Iterable[Any], read: BatchReader | None, progress: Progress) -> dict[str, Tensor]:
        if read is None:
            msg = "blocks of points are computed for one part only"
            raise RuntimeError(msg)
        total: Any = 0
        entries = self.points.n**2
        started, done = time.monotonic(), 0
        with progress.bar("[cross terms]", total=entries) as bar:
            for block in _grouped(self._parts(loader, read)):
                for context, columns, others in self._parts(loader, read):
                    for row_context, rows, numbers in block:
                        cross = self.points.hessian.cross(rows, columns, numbers.unsqueeze(1) == others)
                        total = total + self.pullback.cross_term(row_context, context, cross, self.structure)
                        bar.update(cross.y.numel())
                        done += cross.y.numel()
                        progress.extrapolate(started, done, entries, "The cross terms between all points")
        return {"curvature": torch.as_tensor(total)}

    def _parts(self, loader: Iterable[Any], read: BatchReader) -> Iterator[_Placed]:
        """One pass over the data, which must be the data of the first pass."""
        record, n, hessian = PassRecord(), self.points.n, self.points.hessian
        found: list[Tensor] = []
        seen = torch.zeros(n, dtype=torch.int64, device=hessian.derivatives.u.device)
        for batch in loader:
            x, y = read(batch)
            y = check_targets(y, input_length(x), self.points.function)
            z, context = self.pullback.forward(x)
            z = check_outputs(z, "model(x)")
            record.add(z, y)
            step = self.pullback.tile_size(self.structure, z.shape[1])
            for start in range(0, len(z), step):
                rows = slice(start, start + step)
                part = hessian.place(z[rows], y[rows])
                places = hessian.derivatives.places(part.u, part.targets)
                # Equal points have one place, and take turns.
                turn = (places.unsqueeze(1) == places).tril(-1).sum(1) + seen[places]
                seen.index_add_(0, places, torch.ones_like(places))
                found.append(places + n * turn)
                yield self.pullback.slice_context(context, rows), part, found[-1]
        self.points.check_same(record)
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

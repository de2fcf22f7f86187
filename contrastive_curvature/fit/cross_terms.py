"""The cross terms ``sum_ij J_i^T H_ij J_j`` of coupled fixes over a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import tangent_axes
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.over_dataset import ClassWeights, HessianPart, HessianPoints
from contrastive_curvature.network.inputs import slice_inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.relation import chunks
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.structure import added

if TYPE_CHECKING:
    from contrastive_curvature.fit.dataset import AllPairs
    from contrastive_curvature.fit.loop import Fit

_CLASS_SUM_ELEMENTS = 2**28
_FEATURE_ELEMENTS = 2**27

_Placed = tuple[Any, HessianPart]
"""Context and points of a part of a batch."""

BY_CLASS = "cross/classes"
"""Name of the sums over points of the rows of ``J`` of every class."""


def class_coupling(f: Fit, pairs: AllPairs) -> ClassWeights | None:
    """Return the pair weights if they depend only on classes; ``None`` if all cross terms must be streamed."""
    coupling = pairs.class_weights
    if coupling is not None:
        n_params = f.pullbacks[0].n_params
        numbers = coupling.classes.numel() * pairs.dim * n_params
        if numbers <= _CLASS_SUM_ELEMENTS:
            return coupling
        if pairs.points is None or pairs.sampled is not None:
            raise UnsupportedError(
                f"pd_fix={str(pairs.hessian.loss.pd_fix)!r}: sums over {coupling.classes.numel()} classes of "
                f"{pairs.dim} rows of {n_params} parameters have {numbers:.2g} numbers. Use "
                "pd_fix='psd' or 'fixed', which couple no points, or negative_samples=None."
            )
    if not f.alone:
        refuse_in_parts(f.options.loss)
    return None


def refuse_in_parts(loss: CosineLoss) -> NoReturn:
    """Raise the error that the cross terms of a loss cannot be added over parts of the data."""
    raise UnsupportedError(
        f"pd_fix={str(loss.pd_fix)!r}: every point is coupled with every other one, and they are in several parts. "
        "Use pd_fix='psd' or 'fixed', which couple no points; ContrastiveLoss with "
        "backend_kwargs=dict(negative_samples=2000), whose cross terms add up; or one process."
    )


def of_classes(pullback: Pullback, coupling: ClassWeights, context: Any, part: HessianPoints) -> tuple[Blocks, Tensor]:
    """Return the blocks of a batch and the sums of its rows of ``J`` by class.

    The blocks cancel the term of each point with itself, which :func:`products_of_classes` adds.
    """
    index = torch.searchsorted(coupling.classes, part.targets.to(part.u.device))
    sums = pullback.class_sums(context, tangent_axes(part.u, part.n), index, coupling.classes.numel())
    y = coupling.y if coupling.y.ndim == 1 else coupling.y.diagonal()
    return part.blocks.add_projector(y[index] / part.n / part.n), sums


def products_of_classes(structure: type[Structure], coupling: ClassWeights, rows: Tensor) -> Structure:
    """Return the cross terms of all points from their rows of ``J``, summed by class, shape (C, D, P)."""
    with torch.autocast(rows.device.type, enabled=False):
        y = coupling.y.to(rows)
        weighted = -(y.view(-1, 1, 1) * rows if y.ndim == 1 else (y @ rows.flatten(1)).view_as(rows))
        return structure.products(rows.flatten(0, 1), weighted.flatten(0, 1))


def sampled_columns(f: Fit, pairs: AllPairs) -> list[_Placed]:
    """Run the encoder on the points that replace all negatives; empty if no sample is used or only positives couple."""
    if pairs.sampled is None or pairs.hessian.loss.pd_fix.attracting_only:
        return []
    pullback, columns = f.pullbacks[0], []
    inputs, targets = pairs.sampled_inputs()
    for rows in chunks(len(targets), f.structure.tile(pullback, pairs.dim)):
        z, context = pullback.forward(slice_inputs(inputs, rows))
        check_outputs(z, "model(x)")
        columns.append((context, pairs.hessian.place(z, targets[rows], pairs.sampled.numbers[rows])))
    return columns


def with_sample(f: Fit, pairs: AllPairs, columns: list[_Placed], context: Any, part: HessianPoints) -> Structure | None:
    """Return the cross terms of a batch with the points that replace all negatives."""
    total: Structure | None = None
    pullback = f.pullbacks[0]
    for rows in chunks(len(part.u), f.structure.tile(pullback, pairs.dim)) if columns else ():
        some = pullback.slice_context(context, rows)
        for column, other in columns:
            cross = pairs.hessian.cross(part[rows], other)
            total = added(total, f.structure.cross(pullback, some, column, cross))
    return total


def streamed(f: Fit, pairs: AllPairs, passes: Passes) -> Structure | None:
    """Return all cross terms; a block of points i stays in memory during each pass over all points j."""
    total: Structure | None = None
    with f.progress.bar("[cross terms]", total=pairs.n**2) as advance:
        for block in _grouped(_tiles(f, pairs, passes)):
            for context, columns in _tiles(f, pairs, passes):
                for row_context, rows in block:
                    cross = pairs.hessian.cross(rows, columns)
                    total = added(total, f.structure.cross(f.pullbacks[0], row_context, context, cross))
                    advance(cross.y.numel())
    return total


def _tiles(f: Fit, pairs: AllPairs, passes: Passes) -> Iterator[_Placed]:
    """Yield one pass over the data, cut into tiles."""
    pullback = f.pullbacks[0]
    for batch, z, context in passes.again(Progress(False), ""):
        targets: Any = batch.labels
        part = pairs.hessian.place(z, targets, batch.numbers)
        for rows in chunks(len(z), f.structure.tile(pullback, z.shape[1])):
            yield pullback.slice_context(context, rows), part[rows]


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

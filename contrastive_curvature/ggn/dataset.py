"""The exact parameter curvature of a whole data set, over all its pairs and not only those inside batches.

It needs two passes over the loader, which may shuffle between them. The first collects raw outputs and targets, O(N D).
The second computes ``J_i^T H_ii J_i`` for every point i, batch by batch. Coupled fixes add the cross terms ``J_i^T H_ij
J_j``: from sums per class if the pair weight depends on the classes only, else from all pairs of blocks of points.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.class_centres import ClassCentres
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import add_factors
from contrastive_curvature.ggn.dominance import Dominance
from contrastive_curvature.ggn.feature_sample import FeatureSample
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.passes import PassRecord
from contrastive_curvature.ggn.sampling import BlockSampler
from contrastive_curvature.hessian.dataset import ClassCoupling, DatasetHessian, HessianPart
from contrastive_curvature.hessian.derivatives import Totals
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.dataset import dataset_hessian
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.pairs import RelationFunction, make_relation
from contrastive_curvature.pairs.relation import LabelRelation, check_labels
from contrastive_curvature.progress import Progress

__all__ = [
    "BatchReader",
    "DatasetCurvature",
    "DatasetPoints",
    "collect_points",
    "dataset_curvature",
    "mean_norm",
]

_CLASS_SUM_ELEMENTS = 2**28
_FEATURE_ELEMENTS = 2**27

BatchReader = Callable[[Any], tuple[Inputs, Tensor]]
"""Converts what the loader yields into a batch on the model's device, and its targets."""


@dataclass(frozen=True)
class DatasetPoints:
    """The result of the first pass: the output Hessian over all pairs of the data set.

    Args:
        hessian: Output Hessian of all N points, in the order of the first pass.
        function: The callable that relates targets; ``None`` for class labels.
        record: Summary of the data, to check that later passes see the same data.
        classes: Centres of the classes; ``None`` where targets are no class labels.
    """

    hessian: DatasetHessian
    function: RelationFunction | None
    record: PassRecord
    classes: ClassCentres | None = None

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.hessian)


@dataclass(frozen=True)
class DatasetCurvature:
    """Unclamped curvature of a data set.

    Args:
        curvature: (P,), (P, P), Kronecker factors, or eigenvectors and eigenvalues.
        loss: Value of the loss.
        cost: Value of the non-negative loss, see :meth:`DatasetHessian.loss_and_cost`.
        n: Number of points.
        features: A sample of the features of a last layer, where the second pass saw them.
        typical_norm: Mean norm of the raw outputs, one number.
        classes: Centres of the classes, where targets are class labels.
    """

    curvature: Any
    loss: Tensor
    cost: Tensor
    n: int
    features: FeatureSample | None = None
    typical_norm: Tensor | None = None
    classes: ClassCentres | None = None


def collect_points(
    encoder: Encoder,
    loader: Iterable[Any],
    read: BatchReader,
    loss: PairLoss,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
) -> DatasetPoints:
    """First pass: raw outputs and targets of every point.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: Batches.
        read: Converts what the loader yields into inputs and targets.
        loss: The loss, with the distance and the fix of its curvature.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Progress of the whole fit, or whether to show progress.

    Returns:
        The output Hessian, stored in O(N D) numbers.

    Raises:
        InputError: The loader is empty, has one point only, or has no positive pair; or outputs or targets are
            malformed.
    """
    progress = Progress.of(progress)
    outputs, targets, record = [], [], PassRecord()
    for batch in progress.over(loader, "[embedding]"):
        x, y = read(batch)
        with torch.no_grad():
            outputs.append(check_outputs(encoder(x), "model(x)"))
        targets.append(check_targets(y, input_length(x), relation))
        record.add(outputs[-1], targets[-1])
        if len(outputs) == 1 and relation is None:
            # The first outputs are needed for the estimate, which should precede the rest of the pass.
            loss.announce_labelled(_expected_points(loader), outputs[0], progress)
    if not outputs:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    z = torch.cat(outputs)
    related = make_relation(z.shape[0], z.device, torch.cat(targets), relation)
    loss.announce(related, normalize(z)[0], progress)
    check_fittable(z.shape[0], float(related.counts()[0].sum()))
    classes = ClassCentres.of(z, related.targets) if isinstance(related, LabelRelation) else None
    return DatasetPoints(dataset_hessian(loss, z, related), relation, record, classes)


def mean_norm(z: Tensor) -> Tensor:
    """Mean norm of raw outputs (N, D), float64 and without a graph; in it no sum of float32 norms overflows."""
    return normalize(z.detach())[1].double().mean()


def _expected_points(loader: Iterable[Any]) -> int:
    """Number of points of a loader's data set, or 0 if it is unknown."""
    try:
        return len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # a list of batches; a data set without a length
        return 0


def check_targets(y: object, n: int, relation: RelationFunction | None) -> Tensor:
    """Check the targets of one batch.

    Returns:
        The targets, class labels as int64.

    Raises:
        InputError: There is no relation and the targets are not class labels, or there is not one target per point.
    """
    if relation is None:
        return check_labels(y, n)
    if not isinstance(y, Tensor) or y.ndim == 0 or y.shape[0] != n:
        received = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise InputError(expected("train_loader", f"one target for each of the {n} points of a batch", received))
    return y


def check_fittable(n: int, positives: float) -> None:
    """Refuse data whose curvature has no positive part.

    Raises:
        InputError: There is one point only, or no positive pair.
    """
    if n < 2:
        raise InputError(
            expected("train_loader", "at least two points, because the loss is a sum over pairs", f"{n} point")
        )
    if not positives:
        hint = "The positive part of the curvature is a sum over positive pairs. Check the labels."
        raise InputError(expected("train_loader", "at least one positive pair", "none", hint))


def dataset_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: BatchReader,
    points: DatasetPoints,
    structure: Structure,
    progress: Progress | bool | None = None,
    sampler: BlockSampler | None = None,
) -> DatasetCurvature:
    """Second pass: the curvature of all pairs of the data set, unclamped.

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
    hessian, progress = points.hessian, Progress.of(progress)
    total: Any = None
    cross = _make_cross(pullback, points, structure) if hessian.coupled and structure is not Structure.KRON else None
    totals: Totals | None = None
    record, dominance, sample = PassRecord(), Dominance(pullback, structure, points.n), FeatureSample.of(pullback)
    for number, batch in enumerate(progress.over(loader, "[curvature]")):
        x, y = read(batch)
        y = check_targets(y, input_length(x), points.function)
        z, context = pullback.forward(x)
        z = check_outputs(z, "model(x)")
        record.add(z, y)
        if sample is not None:
            sample.add(context)
        part = hessian.at(z, y)
        totals = part.totals if totals is None else totals + part.totals
        sampled = part.blocks if sampler is None else sampler(part.blocks, pullback)
        if structure is Structure.KRON:
            factors = pullback.kron_factors(context, sampled, points.n)
            check_finite(factors, pullback, f"batch {number} (counted from 0)")
            dominance.add(context, len(z), part.blocks, factors)
            total = add_factors(total, factors)
            continue
        blocks = sampled
        if cross is not None:
            blocks = hessian.without_itself(part)
            cross.add(context, part)
        term = pullback.block_term(context, blocks, structure)
        check_finite(term, pullback, f"batch {number} (counted from 0)")
        dominance.add(context, len(z), blocks, term)
        total = term if total is None else total + term
    points.record.check_same(record)
    if cross is not None:
        total = total + cross.finish(loader, read, progress)
    check_finite(total, pullback, "the sum over all batches")
    dominance.warn()
    # The sums over all pairs, the expensive part of the loss, were computed above.
    return DatasetCurvature(
        total, *hessian.loss_and_cost(totals), points.n, sample, mean_norm(hessian.z), points.classes
    )


def _make_cross(pullback: Pullback, points: DatasetPoints, structure: Structure) -> _ClassCross | _StreamedCross:
    coupling = points.hessian.class_coupling()
    if coupling is not None:
        numbers = coupling.classes.numel() * points.hessian.z.shape[1] * pullback.n_params
        if numbers <= _CLASS_SUM_ELEMENTS:
            return _ClassCross(pullback, coupling, structure)
    return _StreamedCross(pullback, points, structure)


class _ClassCross:
    """``sum_ij J_i^T H_ij J_j`` for pair weights that depend on the classes only, from one sum of rows per class."""

    def __init__(self, pullback: Pullback, coupling: ClassCoupling, structure: Structure) -> None:
        self.pullback, self.coupling, self.structure = pullback, coupling, structure
        self.sums: Tensor | None = None

    def add(self, context: Any, part: HessianPart) -> None:
        index = torch.searchsorted(self.coupling.classes, part.targets)
        sums = self.pullback.class_sums(context, part.tangent_axes(), index, self.coupling.classes.numel())
        self.sums = sums if self.sums is None else self.sums + sums

    def finish(self, loader: Iterable[Any], read: BatchReader, progress: Progress) -> Tensor:
        del loader, read, progress
        if self.sums is None:
            msg = "no points were added"
            raise RuntimeError(msg)
        with torch.autocast(self.sums.device.type, enabled=False):
            weighted = -(self.coupling.y @ self.sums.flatten(1)).view_as(self.sums)
            if self.structure is Structure.DIAG:
                return (self.sums * weighted).sum((0, 1))
            return self.sums.flatten(0, 1).T @ weighted.flatten(0, 1)


class _StreamedCross:
    """``sum_ij J_i^T H_ij J_j`` block by block: a block of points i stays in memory during a pass over all points j."""

    def __init__(self, pullback: Pullback, points: DatasetPoints, structure: Structure) -> None:
        self.pullback, self.points, self.structure = pullback, points, structure

    def add(self, context: Any, part: HessianPart) -> None:
        """Do nothing: :meth:`finish` computes all blocks."""

    def finish(self, loader: Iterable[Any], read: BatchReader, progress: Progress) -> Tensor:
        total: Any = 0
        entries = self.points.n**2
        started, done = time.monotonic(), 0
        with progress.bar("[cross terms]", total=entries) as bar:
            for block in _grouped(self._parts(loader, read)):
                for context, columns in self._parts(loader, read):
                    for row_context, rows in block:
                        cross = self.points.hessian.cross(rows, columns)
                        total = total + self.pullback.cross_term(row_context, context, cross, self.structure)
                        bar.update(cross.y.numel())
                        done += cross.y.numel()
                        progress.extrapolate(started, done, entries, "The cross terms between all points")
        return torch.as_tensor(total)

    def _parts(self, loader: Iterable[Any], read: BatchReader) -> Iterator[tuple[Any, HessianPart]]:
        """One pass over the data, which must be the data of the first pass."""
        record = PassRecord()
        for batch in loader:
            x, y = read(batch)
            y = check_targets(y, input_length(x), self.points.function)
            z, context = self.pullback.forward(x)
            z = check_outputs(z, "model(x)")
            record.add(z, y)
            step = self.pullback.tile_size(self.structure, z.shape[1])
            for start in range(0, len(z), step):
                rows = slice(start, start + step)
                yield self.pullback.slice_context(context, rows), self.points.hessian.place(z[rows], y[rows])
        self.points.record.check_same(record)


def _grouped(points: Iterator[tuple[Any, HessianPart]]) -> Iterator[list[tuple[Any, HessianPart]]]:
    """Group batches into blocks whose contexts have at least ``_FEATURE_ELEMENTS`` numbers."""
    block: list[tuple[Any, HessianPart]] = []
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

"""The parameter curvature of a whole data set, exactly, over all its pairs and not only those inside a batch.

Two passes over the loader, which may shuffle between them: the first collects raw outputs and targets, O(N D); the
second pulls every point's block back as it arrives. Coupled fixes add cross terms, from sums per class where the pair
weight depends on the classes only, else from blocks of points streamed against each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import make_blocks
from contrastive_curvature.ggn.dominance import Dominance
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.kron import add_factors
from contrastive_curvature.ggn.passes import PassRecord
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.effort import announce_labelled, announce_pairs
from contrastive_curvature.losses.weights import PairWeights, total_sums
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.pullback import Points, Pullback
from contrastive_curvature.options import CurvatureOptions, PDFix, Structure
from contrastive_curvature.pairs import RelationFunction, make_relation
from contrastive_curvature.pairs.relation import CallableRelation, LabelRelation, check_labels
from contrastive_curvature.progress import Progress

__all__ = [
    "BatchReader",
    "DatasetCurvature",
    "DatasetPairs",
    "collect_pairs",
    "dataset_curvature",
]

_CLASS_SUM_ELEMENTS = 2**28
_FEATURE_ELEMENTS = 2**27

BatchReader = Callable[[Any], tuple[Inputs, Tensor]]
"""Turns what the loader yields into a batch on the model's device and its targets."""


@dataclass(frozen=True)
class DatasetPairs:
    """What the first pass leaves: the pair weights of the whole data set.

    Args:
        z: Raw outputs of all N points, in the order of the first pass, shape (N, D).
        weights: Over the same points.
        options: The curvature options.
        record: To recognise the data in later passes.
    """

    z: Tensor
    weights: PairWeights
    options: CurvatureOptions
    record: PassRecord

    @property
    def n(self) -> int:
        """Number of points."""
        return self.weights.n

    @property
    def function(self) -> RelationFunction | None:
        """The callable that relates targets; ``None`` for class labels."""
        made = self.weights.relation
        return made.function if isinstance(made, CallableRelation) else None


@dataclass(frozen=True)
class DatasetCurvature:
    """Unclamped curvature of a data set.

    Args:
        curvature: (P,), (P, P), Kronecker factors, or eigenvectors and eigenvalues.
        loss: Value of the contrastive loss.
        cost: The same with every repelling pair counted from the margin, see :meth:`PairWeights.loss_and_cost`.
        n: Number of points.
    """

    curvature: Any
    loss: Tensor
    cost: Tensor
    n: int


def collect_pairs(
    encoder: Encoder,
    loader: Iterable[Any],
    read: BatchReader,
    options: CurvatureOptions,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
) -> DatasetPairs:
    """First pass: raw outputs and targets of every point.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: Batches.
        read: Takes a batch apart.
        options: The curvature options.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Of the fit that this is part of.

    Returns:
        The pair weights, O(N D) numbers.

    Raises:
        InputError: No data, fewer than two points, no positive pair, or malformed outputs or targets.
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
            # With the first outputs at hand, and before the others take their time.
            announce_labelled(_points_to_come(loader), outputs[0], options, progress)
    if not outputs:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    z = torch.cat(outputs)
    u, _ = normalize(z)
    made = make_relation(z.shape[0], z.device, torch.cat(targets), relation)
    announce_pairs(made, u, options, progress)
    weights = PairWeights(made, u, options)
    check_fittable(z.shape[0], weights.totals[0])
    return DatasetPairs(z, weights, options, record)


def _points_to_come(loader: Iterable[Any]) -> int:
    """Number of points of a loader's data set, or 0 where it does not say."""
    try:
        return len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # a list of batches; a data set without a length
        return 0


def check_targets(y: object, n: int, relation: RelationFunction | None) -> Tensor:
    """Check the targets of one batch.

    Returns:
        The targets, class labels as int64.

    Raises:
        InputError: They are not class labels (without a relation), or disagree with the batch in length.
    """
    if relation is None:
        return check_labels(y, n)
    if not isinstance(y, Tensor) or y.ndim == 0 or y.shape[0] != n:
        came = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise InputError(expected("train_loader", f"one target for each of the {n} points of a batch", came))
    return y


def check_fittable(n: int, positives: float) -> None:
    """Refuse data that say nothing about an embedding.

    Raises:
        InputError: One point, or no positive pair.
    """
    if n < 2:
        raise InputError(expected("train_loader", "at least two points, since the loss is one of pairs", f"{n} point"))
    if not positives:
        hint = "Without attraction the curvature has nothing positive; check the labels."
        raise InputError(expected("train_loader", "at least one positive pair", "none", hint))


def dataset_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: BatchReader,
    pairs: DatasetPairs,
    structure: Structure,
    progress: Progress | bool | None = None,
) -> DatasetCurvature:
    """Second pass: the curvature of all pairs of the data set, unclamped.

    Args:
        pullback: The parameters.
        loader: The same data as in the first pass, in any order.
        read: Takes a batch apart.
        pairs: What the first pass left.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Of the fit that this is part of.

    Returns:
        The curvature. Warns where a single point carries most of it.

    Raises:
        InputError: The loader gave other data than in the first pass, or the curvature of a batch is not finite.
        UnsupportedError: ``kron`` for a layer that has no factors.
    """
    options, progress = pairs.options, Progress.of(progress)
    total: Any = None
    cross = (
        _make_cross(pullback, pairs, structure) if options.pd_fix.coupled and structure is not Structure.KRON else None
    )
    degree, pull = pairs.z.new_zeros(2, dtype=torch.float64)
    record, dominance = PassRecord(), Dominance(pullback, structure, pairs.n)
    for number, batch in enumerate(progress.over(loader, "[curvature]")):
        x, y = read(batch)
        y = check_targets(y, input_length(x), pairs.function)
        z, context = pullback.forward(x)
        z = check_outputs(z, "model(x)")
        record.add(z, y)
        u, n = normalize(z)
        points = Points(context, u, n)
        d, s = pairs.weights.sums_for(u, y)
        sums = total_sums(u, d, s)
        degree, pull = degree + sums[0], pull + sums[1]
        blocks = make_blocks(u, n, d, s, options)
        if structure is Structure.KRON:
            factors = pullback.kron_factors(points, blocks, pairs.n)
            check_finite(factors, pullback, f"batch {number} (counted from 0)")
            dominance.add(points, blocks, factors)
            total = add_factors(total, factors)
            continue
        if cross is not None:
            # The cross terms below run over all pairs, a point with itself among them; this takes those out again.
            blocks = blocks.add_projector(pairs.weights.self_weights(y) / n / n)
            cross.add(points, y)
        term = pullback.block_term(points, blocks, structure)
        check_finite(term, pullback, f"batch {number} (counted from 0)")
        dominance.add(points, blocks, term)
        total = term if total is None else total + term
    pairs.record.check_same(record)
    if cross is not None:
        total = total - cross.finish(loader, read, progress)
    check_finite(total, pullback, "the sum over all batches")
    dominance.warn()
    if options.pd_fix is PDFix.POSITIVE:
        value = pairs.weights.loss_and_cost()
    else:
        # The sums over all pairs are the expensive part, and were made above.
        value = pairs.weights.loss_and_cost_of(degree, pull)
    return DatasetCurvature(total, *value, pairs.n)


def _make_cross(pullback: Pullback, pairs: DatasetPairs, structure: Structure) -> _ClassCross | _StreamedCross:
    relation, factors = pairs.weights.relation, pairs.weights.factors
    by_class = isinstance(relation, LabelRelation) and (factors.cosine is None or not factors.negative)
    if by_class and isinstance(relation, LabelRelation):
        classes = relation.targets.unique()
        if classes.numel() * pairs.weights.u.shape[1] * pullback.n_params <= _CLASS_SUM_ELEMENTS:
            return _ClassCross(pullback, pairs.weights, classes, structure)
    return _StreamedCross(pullback, pairs, structure)


class _ClassCross:
    """``sum_ij y_ij A_i^T A_j`` where ``y`` depends on the two classes only: from ``sum_{i in class} A_i``."""

    def __init__(self, pullback: Pullback, weights: PairWeights, classes: Tensor, structure: Structure) -> None:
        self.pullback, self.weights, self.classes, self.structure = pullback, weights, classes, structure
        self.sums: Tensor | None = None

    def add(self, points: Points, targets: Tensor) -> None:
        index = torch.searchsorted(self.classes, targets)
        sums = self.pullback.class_sums(points, index, self.classes.numel())
        self.sums = sums if self.sums is None else self.sums + sums

    def finish(self, loader: Iterable[Any], read: BatchReader, progress: Progress) -> Tensor:
        del loader, read, progress
        if self.sums is None:
            msg = "no points were added"
            raise RuntimeError(msg)
        same = self.classes.unsqueeze(1) == self.classes
        shares = self.weights.shares_for(self.classes)
        anything = torch.ones_like(same, dtype=self.sums.dtype)
        y = self.weights.factors.weigh(same, ~same, 2 * anything, shares, shares)
        weighted = torch.einsum("cd,dkp->ckp", y, self.sums)
        if self.structure is Structure.DIAG:
            return torch.einsum("ckp,ckp->p", self.sums, weighted)
        return self.sums.flatten(0, 1).T @ weighted.flatten(0, 1)


class _StreamedCross:
    """``sum_ij y_ij A_i^T A_j`` from blocks of points, each held while the whole loader runs past it."""

    def __init__(self, pullback: Pullback, pairs: DatasetPairs, structure: Structure) -> None:
        self.pullback, self.pairs, self.structure = pullback, pairs, structure

    def add(self, points: Points, targets: Tensor) -> None:
        """Nothing: the blocks are formed in :meth:`finish`."""

    def finish(self, loader: Iterable[Any], read: BatchReader, progress: Progress) -> Tensor:
        total: Any = 0
        entries = self.pairs.n**2
        started, done = time.monotonic(), 0
        with progress.bar("[cross terms]", total=entries) as bar:
            for held in _grouped(self._points(loader, read)):
                for points, targets in self._points(loader, read):
                    for rows, row_targets in held:
                        y = self.pairs.weights.between(rows.u, row_targets, points.u, targets)
                        total = total + self.pullback.cross_term(rows, points, y, self.structure)
                        bar.update(y.numel())
                        done += y.numel()
                        progress.extrapolate(started, done, entries, "The cross terms between all points")
        return torch.as_tensor(total)

    def _points(self, loader: Iterable[Any], read: BatchReader) -> Iterator[tuple[Points, Tensor]]:
        """One pass over the data, which must be that of the first one: its outputs are joined with others' targets."""
        record = PassRecord()
        for batch in loader:
            x, y = read(batch)
            y = check_targets(y, input_length(x), self.pairs.function)
            z, context = self.pullback.forward(x)
            z = check_outputs(z, "model(x)")
            record.add(z, y)
            points = Points(context, *normalize(z))
            step = self.pullback.tile_size(Structure.DIAG)
            for start in range(0, len(points), step):
                rows = slice(start, start + step)
                yield self.pullback.part(points, rows), y[rows]
        self.pairs.record.check_same(record)


def _grouped(points: Iterator[tuple[Points, Tensor]]) -> Iterator[list[tuple[Points, Tensor]]]:
    """Group batches until their contexts fill the memory that may be held."""
    held: list[tuple[Points, Tensor]] = []
    numbers = 0
    for item in points:
        held.append(item)
        context = item[0].context
        tensors = context.values() if isinstance(context, Mapping) else [context]
        numbers += sum(t.numel() for t in tensors if isinstance(t, Tensor))
        if numbers >= _FEATURE_ELEMENTS:
            yield held
            held, numbers = [], 0
    if held:
        yield held

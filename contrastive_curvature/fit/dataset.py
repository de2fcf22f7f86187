"""The exact parameter curvature of a whole data set, over all its pairs and not only those inside batches.

It needs two passes over the data, in any order. The first (:mod:`contrastive_curvature.fit.statistics`) finds what a
point has to know of all others: all outputs, or sums over classes and a sample that stands for all. The second
(:mod:`contrastive_curvature.fit.second_pass`) computes ``J_i^T H_ii J_i`` for every point i, batch by batch, and the
cross terms ``J_i^T H_ij J_j`` of coupled fixes. Both give states that merge, so the data may come in parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.fit.class_sums import TYPICAL, centres_of
from contrastive_curvature.fit.feature_sample import FeatureSample
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.statistics import (
    POINTS,
    SAMPLE,
    BatchReader,
    Collected,
    Plan,
    check_targets,
    collect_statistics,
    numbered,
    sampled_inputs,
)
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sampled_data import sampled_hessian
from contrastive_curvature.losses.weighting import class_pairs
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.pairs import RelationFunction, make_relation
from contrastive_curvature.parts.rows import Rows
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import Origin, State
from contrastive_curvature.progress import Progress

__all__ = [
    "BatchReader",
    "DatasetCurvature",
    "DatasetPoints",
    "check_fittable",
    "check_targets",
    "collect_points",
    "mean_norm",
    "points_of",
]


@dataclass(frozen=True)
class DatasetPoints:
    """The result of the first pass: the output Hessian over all pairs of the data set.

    Args:
        hessian: Output Hessian of all N points.
        function: The callable that relates targets; ``None`` for class labels.
        record: Summary of the points of this part, to check that later passes see the same data; ``None`` where another
            process ran the first pass.
        state: Of all parts.
        classes: Centres of the classes; ``None`` where targets are no class labels.
        sampled: Points that stand for all negatives; ``None`` where all have been counted.
    """

    hessian: DatasetHessian
    function: RelationFunction | None
    record: PassRecord | None
    state: State
    classes: ClassCentres | None = None
    sampled: Rows | None = None

    @property
    def n(self) -> int:
        """Number of points."""
        return self.state.n

    @property
    def dim(self) -> int:
        """Number D of outputs."""
        return self.hessian.derivatives.u.shape[1]

    @property
    def typical_norm(self) -> Tensor:
        """Mean norm of the raw outputs, one number, float64."""
        norms = sum(origin.norm for origin in self.state.origins.values())
        return torch.tensor(norms / self.n, dtype=torch.float64, device=self.hessian.derivatives.u.device)

    @property
    def sampled_inputs(self) -> Inputs | None:
        """Inputs of the points that stand for all negatives, where they were kept."""
        return None if self.sampled is None else sampled_inputs(self.sampled)

    @property
    def sampled_targets(self) -> Tensor | None:
        """Their targets."""
        return None if self.sampled is None else self.sampled.columns["targets"]

    def check_same(self, record: PassRecord, part: int = 0) -> None:
        """Refuse a later pass over other data.

        Args:
            record: Of the later pass, after its last batch.
            part: Index of the part that it was over.

        Raises:
            InputError: It saw other points than the first pass.
        """
        if self.record is not None:
            self.record.check_same(record)
            return
        self.check_origin(record.origin(), part, "loader")

    def check_origin(self, again: Origin, part: int, argument: str) -> None:
        """Refuse what comes from other points than the first pass.

        Args:
            again: Which points.
            part: Index of the part that they are.
            argument: Name of where they come from, for the message.

        Raises:
            InputError: The first pass saw other points.
        """
        before = self.state.origins.get(part)
        if before is None:
            raise InputError(expected("part", f"one of {sorted(self.state.origins)}", str(part)))
        # Extremes tell samples of one distribution apart, whose sums are nearly equal.
        extremes_differ = before.extremes and not before.same_points(again)
        if not before.same(again) or extremes_differ:
            hint = "Give each part the same points in both passes, and use the same encoder."
            came = f"{again.n} points for {before.n}" if again.n != before.n else "other points, targets or outputs"
            raise InputError(expected(argument, f"the points of part {part} of the statistics", came, hint))


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
        error: Relative standard error of the curvature, where the negatives are a sample.
    """

    curvature: Any
    loss: Tensor
    cost: Tensor
    n: int
    features: FeatureSample | None = None
    typical_norm: Tensor | None = None
    classes: ClassCentres | None = None
    error: float | None = None


def collect_points(
    encoder: Encoder,
    loader: Iterable[Any],
    read: BatchReader,
    loss: PairLoss,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
    samples: int | None = None,
) -> DatasetPoints:
    """First pass of one process over all points, whose raw outputs and targets are kept.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: Batches.
        read: Converts what the loader yields into inputs and targets.
        loss: The loss, with the distance and the fix of its curvature.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Progress of the whole fit, or whether to show progress.
        samples: Number of points that stand for all negatives; ``None`` counts all of them.

    Returns:
        The output Hessian, stored in O(N D) numbers.

    Raises:
        InputError: The loader is empty, has one point only, or has no positive pair; or outputs or targets are
            malformed.
    """
    progress = Progress.of(progress)

    found = collect_statistics(encoder, Share(loader), numbered(read), Plan(), relation, progress)
    return points_of(found.state, loss, relation, samples, found, keeps=True)


def points_of(
    state: State,
    loss: CosineLoss,
    relation: RelationFunction | None,
    samples: int | None,
    found: Collected | None = None,
    *,
    keeps: bool = False,
    negatives_per_anchor: int | None = None,
) -> DatasetPoints:
    """The output Hessian of a data set, from the statistics of all its parts.

    Args:
        state: Of all parts.
        loss: The loss, with the distance and the fix of its curvature.
        relation: ``None`` for class labels, or a callable on targets.
        samples: Number of points that stand for all negatives; ``None`` counts all of them.
        found: Of the part of this process, where it ran the first pass.
        keeps: Whether products with the Hessian of all points will be asked for.
        negatives_per_anchor: See the backend.

    Raises:
        InputError: A part is missing; a point is in two parts; there is no point, one only, or no positive pair.
    """
    state.check_complete()
    if not state.n:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    record = None if found is None else found.record
    classes = centres_of(state.classes, state.kept[TYPICAL])
    rows = state.kept[POINTS].in_order() if POINTS in state.kept else None
    _check_different(rows, state.kept.get(SAMPLE))
    if rows is None and samples is None and len(state.kept[SAMPLE]) == state.n:
        # Of few points the sample has all.
        rows = state.kept[SAMPLE].in_order()
    if state.classes is not None and isinstance(loss, PairLoss):
        check_fittable(state.n, class_pairs(state.classes.counts)[2][0])
    elif state.n < 2:
        check_fittable(state.n, 1.0)
    if rows is None or samples is not None or not isinstance(loss, PairLoss):
        if state.classes is None:
            msg = "a sample of the negatives of points without class labels"
            raise RuntimeError(msg)
        like = (state.kept[TYPICAL] if rows is None else rows).columns["outputs"]
        sampled = None if samples is None else (state.kept[SAMPLE] if rows is None else rows).first(samples)
        hessian = sampled_hessian(loss, state.classes, rows, sampled, keeps, like, negatives_per_anchor)
        return DatasetPoints(hessian, relation, record, state, classes, sampled)
    z, targets = rows.columns["outputs"], rows.columns["targets"]
    related = make_relation(len(z), z.device, targets, relation)
    if relation is not None:
        check_fittable(len(z), float(related.counts()[0].sum()))
    return DatasetPoints(loss.dataset_hessian(z, related), relation, record, state, classes)


def _check_different(*kept: Rows | None) -> None:
    for rows in kept:
        numbers = torch.zeros(0) if rows is None else rows.in_order().numbers
        same = (numbers[1:] == numbers[:-1]).nonzero().flatten()
        if len(same):
            came = f"point {int(numbers[same[0]])} twice"
            hint = "Give every part points of its own; loader.numbers says which points of the data set they are."
            raise InputError(expected("statistics", "every point in one part", came, hint))


def mean_norm(z: Tensor) -> Tensor:
    """Mean norm of raw outputs (N, D), float64 and without a graph; in it no sum of float32 norms overflows."""
    return normalize(z.detach())[1].double().mean()


def expected_points(loader: Iterable[Any]) -> int:
    """Number of points of a loader's data set, or 0 if it is unknown."""
    try:
        return len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # a list of batches; a data set without a length
        return 0


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

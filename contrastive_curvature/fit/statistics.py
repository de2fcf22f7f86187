"""The first pass over a data set: what every point has to know of all others, as a state that merges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.class_sums import TYPICAL, ClassSums
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.pairs.relation import check_labels
from contrastive_curvature.parts.rows import RowCollector, Rows
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import STATISTICS, State
from contrastive_curvature.progress import Progress

__all__ = [
    "POINTS",
    "SAMPLE",
    "BatchReader",
    "Collected",
    "NumberedReader",
    "Plan",
    "check_targets",
    "collect_statistics",
    "numbered",
    "sampled_inputs",
]

BatchReader = Callable[[Any], tuple[Inputs, Tensor]]
"""Converts what the loader yields into a batch on the model's device, and its targets."""

NumberedReader = Callable[[Any, Tensor], tuple[Inputs, Tensor, Tensor]]
"""The same for a batch and the numbers of its inputs; gives the numbers of its points, too."""


def numbered(read: BatchReader) -> NumberedReader:
    """A reader of batches whose points are the inputs."""

    def read_numbered(batch: Any, numbers: Tensor) -> tuple[Inputs, Tensor, Tensor]:
        return (*read(batch), numbers)

    return read_numbered


POINTS, SAMPLE = "points", "sample"
"""Names of what is kept: all points, or those that stand for all negatives."""

_INPUT = "input"


@dataclass(frozen=True)
class Plan:
    """What the first pass keeps of the points.

    Args:
        everything: Whether outputs and targets of all points are kept, N D numbers.
        sample: Otherwise, of how many.
        inputs: Whether the inputs of the sampled points are kept, too, for cross terms with them.
    """

    everything: bool = True
    sample: int = 0
    inputs: bool = False


@dataclass(frozen=True)
class Collected:
    """What the first pass found.

    Args:
        state: Of this part of the data.
        record: Summary of the points, to check that the second pass sees the same ones.
    """

    state: State
    record: PassRecord


def collect_statistics(
    encoder: Encoder,
    share: Share,
    read: NumberedReader,
    plan: Plan,
    relation: RelationFunction | None = None,
    progress: Progress | bool | None = None,
    *,
    identity: Mapping[str, str] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Collected:
    """Raw outputs and targets of every point of a part of the data, and sums over them.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        share: Batches with the numbers of their points.
        read: Converts what the loader yields into inputs and targets.
        plan: What to keep.
        relation: ``None`` for class labels, or a callable on targets.
        progress: Progress of the whole fit, or whether to show progress.
        identity: See :class:`~contrastive_curvature.parts.State`.
        part: Index of the part and number of all parts.

    Raises:
        InputError: Outputs or targets are malformed.
        UnsupportedError: Inputs cannot be kept.
    """
    record, classes = PassRecord(), ClassSums(limited=False)
    points = RowCollector(None if plan.everything else plan.sample)
    for number, (batch, given) in enumerate(Progress.of(progress).over(share, "[embedding]")):
        x, y, numbers = read(batch, given)
        with torch.no_grad():
            z = check_outputs(encoder(x), f"model(x) of batch {number} (counted from 0)")
        y = check_targets(y, input_length(x), relation)
        record.add(z, y)
        if relation is None:
            classes.add(z, y, numbers)
        inputs = _columns(x) if plan.inputs else {}
        points.add(numbers, {"outputs": z, "targets": y, **inputs})
    (index, count), (table, typical) = part, classes.found()
    kept = {POINTS if plan.everything else SAMPLE: points.rows(), TYPICAL: typical}
    state = State(STATISTICS, identity or {}, {index: record.origin()}, count, {}, kept, table)
    return Collected(state, record)


def sampled_inputs(rows: Rows) -> Inputs:
    """The inputs of kept points."""
    found = {name: part for name, part in rows.columns.items() if name.split("/")[0] == _INPUT}
    if set(found) == {_INPUT}:
        return found[_INPUT]
    return {name.removeprefix(f"{_INPUT}/"): part for name, part in found.items()}


def _columns(x: Inputs) -> dict[str, Tensor]:
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

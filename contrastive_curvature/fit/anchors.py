"""The curvature of a loss of anchors over a data set; each anchor is compared within its batch, as in training.

Batches need no data of other batches, so inputs may be augmented again, and one pass is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.fit import loop
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, Source, nothing
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.losses.rows import RowDerivatives
from contrastive_curvature.network.loader import check_not_empty

_log = logging.getLogger("contrastive_curvature")


def parts(f: Fit, pairs: Any, passes: Passes) -> Iterator[Part | Total]:
    """Yield the Hessian of every batch as its part of the data set."""
    del pairs
    loss = f.options.loss
    for batch, z, context in passes.again(f.progress, "[curvature]"):
        hessian = loss.data_hessian(z, loss.relate(z, batch.labels, batch.pairs))
        yield Part.of_batch(hessian, context, batch.classes)


def closed(f: Fit, pairs: Any, totals: list[Total]) -> list[DatasetCurvature]:
    """Return the sum over all batches."""
    (total,) = totals
    check_compared(total)
    if total.curvature is not None and not bool(total.curvature.traces().any()):
        hint = (
            "In a batch of one input nothing has to be told apart; triplets outside their margin, and comparisons "
            "that float32 takes for certain add nothing either. Use larger batches, or the pair loss."
        )
        wanted = "batches in which the loss changes with the embeddings"
        raise InputError("train_loader", wanted, "a curvature that is zero everywhere", hint)
    return loop.closed(f, pairs, totals)


ANCHORS = Source(nothing, nothing, parts, closed)


def check_compared(total: Total) -> None:
    """Report how many anchors had no candidates."""
    check_not_empty(total.n)
    note_skipped(int(total.terms["anchors"]), int(total.terms["skipped"]))


def note_skipped(anchors: int, skipped: int) -> None:
    """Report how many anchors had no candidates."""
    if not anchors:
        hint = "An anchor needs a positive among the candidates of its batch: larger batches, or several of each class."
        wanted = "at least one anchor with positives and candidates as the loss compares them"
        raise InputError("train_loader", wanted, f"none of {skipped}", hint)
    if skipped:
        _log.info(
            "%d of %d anchors had no positive, or nothing to be compared with, and add nothing to the curvature",
            skipped,
            anchors + skipped,
        )


@dataclass(frozen=True)
class WholeHessian:
    """Output Hessian of a data set, in the order of its loader: of all points at once, or of its batches.

    Args:
        z: Raw outputs of all N points, shape (N, D).
        parts: Hessians of consecutive points; points of different parts are not coupled.
        classes: Centres of the classes, if there are labels.
    """

    z: Tensor
    parts: list[OutputHessian]
    classes: ClassCentres | None

    def matvec(self, v: Tensor) -> Tensor:
        """Return ``H v`` for ``v`` of shape (N, D) or (N, D, K)."""
        return torch.cat([part.matvec(v[rows]) for rows, part in self._placed()])

    def loss_and_cost(self) -> tuple[Tensor, Tensor]:
        """Return the value of the loss over the data set, without a graph, and its non-negative version."""
        values = [part.loss_and_cost() for part in self.parts]
        value, cost = (torch.stack([pair[k].double() for pair in values]).sum().to(self.z.dtype) for k in (0, 1))
        return value, cost

    def _placed(self) -> Iterator[tuple[slice, OutputHessian]]:
        start = 0
        for part in self.parts:
            yield slice(start, start + len(part)), part
            start += len(part)


def collect_anchors(f: Fit, passes: Passes) -> WholeHessian:
    """Return raw outputs of all points, and the Hessians of their batches."""
    loss = f.options.loss
    parts: list[OutputHessian] = []
    outputs: list[Tensor] = []
    classes: list[Tensor] | None = []
    for batch, z, _ in passes.embedded(f.progress):
        outputs.append(z)
        classes = None if classes is None or batch.classes is None else [*classes, batch.classes]
        parts.append(loss.data_hessian(z, loss.relate(z, batch.labels, batch.pairs)))
        derivatives = parts[-1].derivatives
        if isinstance(derivatives, RowDerivatives):
            # All batches stay in memory, so large tensors are dropped and computed again when needed.
            derivatives.release()
    check_not_empty(len(outputs))
    z = torch.cat(outputs)
    anchors, skipped = (int(sum(getattr(p.derivatives, name) for p in parts)) for name in ("anchors", "skipped"))
    note_skipped(anchors, skipped)
    return WholeHessian(z, parts, None if classes is None else ClassCentres.of(z, torch.cat(classes)))

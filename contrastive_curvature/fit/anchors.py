"""The curvature of a loss of anchors over a data set, with the candidates of each batch or of all the data.

Where the candidates of an anchor are those of its batch, as in training, nothing has to be known of other batches:
inputs may be augmented anew, and one pass is enough. Where they are all points, the first pass keeps all outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.fit.dataset import expected_points, note_skipped, samples_of, tell_samples
from contrastive_curvature.fit.loop import (
    DatasetCurvature,
    Problem,
    Seen,
    finished,
    fit,
    raw_curvature,
    second_pass,
)
from contrastive_curvature.fit.passes import PassRecord, check_same_outputs
from contrastive_curvature.fit.readers import Batch, Reader, compared_everywhere
from contrastive_curvature.fit.state import Findings
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.losses.row_derivatives import RowDerivatives
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.options import Structure

MOST_COUPLED = 2048
"""Points whose cross terms through all anchors are computed."""

_ANCHORS, _SKIPPED = "anchors", "skipped"


class AnchorFit(Problem):
    """A loss of anchors with the candidates of their batch: the sum over batches as they are."""

    records: ClassVar[bool] = False

    def hessian(self, z: Tensor, context: Any, batch: Batch) -> Seen:
        """Return the Hessian of a batch as its part of the data set's."""
        del context
        return anchors_seen(self.loss.data_hessian(z, self.loss.relate(z, batch.labels, batch.pairs)))

    def finish(self, found: Findings) -> DatasetCurvature:
        """Return the sum over all batches."""
        check_compared(found)
        raw = raw_curvature(found.sums)
        parts = [raw] if isinstance(raw, Tensor) else [factors[0] for factors in raw]
        if not any(bool(part.any()) for part in parts):
            hint = (
                "In a batch of one input nothing has to be told apart; triplets outside their margin, pairs of equal "
                "grades, and comparisons that float32 takes for certain add nothing either. Use larger batches, or the "
                "pair loss."
            )
            wanted = "batches in which the loss changes with the embeddings"
            raise InputError(expected("train_loader", wanted, "a curvature that is zero everywhere", hint))
        return finished(self.pullback, found)


def anchors_seen(hessian: OutputHessian) -> Seen:
    """Return what a batch of anchors adds: its Hessian, and how many anchors it has compared."""
    derivatives = hessian.derivatives
    counts = {_ANCHORS: torch.tensor(derivatives.anchors), _SKIPPED: torch.tensor(derivatives.skipped)}
    return Seen.of(hessian, **counts)


def check_compared(found: Findings) -> None:
    """Say how many anchors had nothing to be compared with."""
    if not found.n:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    note_skipped(int(found.sums[_ANCHORS]), int(found.sums[_SKIPPED]))


@dataclass(frozen=True)
class WholeHessian:
    """Output Hessian of a data set, in the order of its loader: of all points at once, or of its batches.

    Args:
        z: Raw outputs of all N points, shape (N, D).
        parts: Hessians of consecutive points, none of which is coupled with those of another part.
        classes: Centres of the classes, where there are labels.
    """

    z: Tensor
    parts: list[OutputHessian]
    classes: ClassCentres | None

    def matvec(self, v: Tensor) -> Tensor:
        """Return ``H v`` for ``v`` of shape (N, D) or (N, D, K)."""
        return torch.cat([part.matvec(v[rows]) for rows, part in self._placed()])

    def block_products(self, v: Tensor) -> Tensor:
        """Return ``H_ii v_i`` for ``v`` of shape (N, D)."""
        return torch.cat([part.blocks.matmul(v[rows]) for rows, part in self._placed()])

    def loss_and_cost(self) -> tuple[Tensor, Tensor]:
        """Return the value of the loss over the data set, without a graph, and its non-negative version."""
        found = [part.loss_and_cost() for part in self.parts]
        value, cost = (torch.stack([pair[k].double() for pair in found]).sum().to(self.z.dtype) for k in (0, 1))
        return value, cost

    def _placed(self) -> Iterator[tuple[slice, OutputHessian]]:
        start = 0
        for part in self.parts:
            yield slice(start, start + len(part)), part
            start += len(part)


def fit_anchors(sampled: Problem, reader: Reader) -> DatasetCurvature:
    """Return the curvature where anchors are compared with all points: with a sample of many, or with each of few.

    Args:
        sampled: The fit with a sample of the candidates.
        reader: All data, in a fixed order.
    """
    options = sampled.options
    if samples_of(options, expected_points(reader.loader)) is not None:
        statistics = sampled.first_pass(reader)
        if samples_of(options, statistics.n) is not None:
            sampled.begin(statistics)
            return sampled.finish(second_pass(sampled, reader)[0])
    data = collect_anchors(sampled, reader)
    if samples_of(options, len(data.z)) is not None:
        return fit(sampled, reader)
    tell_samples(options, len(data.z))
    problem = AllCandidatesFit(sampled.encoder, sampled.pullback, sampled.structure, options, sampled.progress)
    problem.take(data)
    return fit(problem, reader)


def collect_anchors(problem: Problem, reader: Reader) -> WholeHessian:
    """Return raw outputs of all points, and the Hessian."""
    loss, options = problem.loss, problem.options
    candidates, negatives_per_anchor = options.compared_within, options.negatives_per_anchor
    parts: list[OutputHessian] = []
    outputs: list[Tensor] = []
    labels: list[Any] = []
    classes: list[Tensor] | None = []
    pairs: Any = None
    for batch, z, _ in problem.embedded(reader):
        outputs.append(z)
        classes = None if classes is None or batch.classes is None else [*classes, batch.classes]
        if candidates == "dataset":
            labels.append(compared_everywhere(batch, loss).labels)
            pairs = batch.pairs
            continue
        parts.append(loss.data_hessian(z, loss.relate(z, batch.labels, batch.pairs)))
        derivatives = parts[-1].derivatives
        if isinstance(derivatives, RowDerivatives):
            # All batches stay: what is large is computed again when it is asked for.
            derivatives.release()
    if not outputs:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    z = torch.cat(outputs)
    if candidates == "dataset":
        relation = loss.relate(z, torch.cat(labels), pairs)
        if negatives_per_anchor is None or not isinstance(loss, RowLoss):
            parts = [loss.data_hessian(z, relation)]
        else:
            parts = [loss.data_hessian(z, relation, min(1.0, negatives_per_anchor / max(1, len(z) - 1)))]
    note_skipped(sum(p.derivatives.anchors for p in parts), sum(p.derivatives.skipped for p in parts))
    return WholeHessian(z, parts, None if classes is None else ClassCentres.of(z, torch.cat(classes)))


class AllCandidatesFit(Problem):
    """A loss of anchors that are compared with all points of the data set, in the order of a reader.

    The outputs of all points (:meth:`take`) take the place of a first pass.
    """

    records: ClassVar[bool] = False
    sums_classes: ClassVar[bool] = False

    _data: WholeHessian
    _hessian: OutputHessian
    _at = 0

    def take(self, data: WholeHessian) -> None:
        """Take the outputs of all points."""
        self._data, (self._hessian,) = data, data.parts
        hessian = self._hessian
        rooted = isinstance(hessian.derivatives, RowDerivatives) and len(hessian.derivatives.signs) > 0
        if hessian.coupled and rooted and self.structure is not Structure.KRON and len(data.z) > MOST_COUPLED:
            msg = (
                f"candidates='dataset' with pd_fix={str(hessian.pd_fix)!r}: every anchor couples all pairs of its "
                f"candidates, which takes N^3 steps, and these are {len(data.z)} points (at most {MOST_COUPLED}). Use "
                "pd_fix='psd_parts' or 'ggn_fixed', which couple no points, or candidates='batch'."
            )
            raise UnsupportedError(msg)

    def hessian(self, z: Tensor, context: Any, batch: Batch) -> Seen:
        """Return the blocks of the next points of the data set."""
        del context, batch
        rows = slice(self._at, self._at + len(z))
        _check_place(z, self._data.z[rows])
        self._at = rows.stop
        return Seen(z, self._hessian.blocks[rows])

    def check_same(self, again: PassRecord | None) -> None:
        """See :meth:`Problem.check_same`."""
        del again
        _check_all(self._at, len(self._data.z))

    def remaining(self, reader: Reader) -> dict[str, Tensor]:
        """Return the cross terms, from a pass over the data for every batch."""
        if not self._hessian.coupled or self.structure is Structure.KRON:
            return {}
        total: Any = 0
        with self.progress.bar("[cross terms]", total=len(self._data.z) ** 2) as bar:
            for rows, left in self._placed(reader):
                for columns, right in self._placed(reader):
                    cross = self._hessian.cross(rows, columns)
                    mine = left if rows == columns else right
                    total = total + self.pullback.cross_term(left, mine, cross, self.structure)
                    bar.update(cross.y.numel())
        return {"curvature": total}

    def finish(self, found: Findings) -> DatasetCurvature:
        """Return the curvature of all points."""
        loss, cost = self._hessian.loss_and_cost()
        return replace(finished(self.pullback, found), loss=loss, cost=cost, classes=self._data.classes)

    def _placed(self, reader: Reader) -> Iterator[tuple[slice, Any]]:
        """Give batches as their place among all points and their context; they must be those of before."""
        start = 0
        for batch in reader:
            z, context = self.pullback.forward(batch.x)
            rows = slice(start, start + len(z))
            _check_place(z, self._data.z[rows])
            yield rows, context
            start = rows.stop
        _check_all(start, len(self._data.z))


def _check_place(again: Tensor, known: Tensor) -> None:
    hint = (
        "With candidates='dataset' every pass needs the same points: build the loader with shuffle=False and "
        "without augmentation, or use candidates='batch', which takes each batch once."
    )
    check_same_outputs(again, known, "train_loader", hint)


def _check_all(seen: int, n: int) -> None:
    if seen != n:
        raise InputError(expected("train_loader", f"{n} points in every pass", str(seen)))

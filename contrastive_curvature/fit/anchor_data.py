"""A data set of a loss of anchors whose outputs are all known: for products, and for candidates from all of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.accumulate import add_factors, per_point
from contrastive_curvature.fit.anchors import AnchorBatch, AnchorReader, note_skipped
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.fit.dataset import DatasetCurvature, mean_norm
from contrastive_curvature.fit.dominance import Dominance
from contrastive_curvature.fit.feature_sample import FeatureSample
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.passes import check_same_outputs
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.row_derivatives import RowDerivatives
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.progress import Progress

__all__ = ["MOST_COUPLED", "AnchorData", "collect_anchors", "ordered_curvature"]


MOST_COUPLED = 2048
"""Points whose cross terms through all anchors are computed."""


@dataclass(frozen=True)
class AnchorData:
    """Output Hessian of a data set, in the order of its loader: of one batch with all points, or of its batches.

    Args:
        z: Raw outputs of all N points, shape (N, D).
        parts: Hessians of consecutive points, none of which is coupled with those of another part.
        classes: Centres of the classes, where there are labels.
    """

    z: Tensor
    parts: list[OutputHessian]
    classes: ClassCentres | None

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.z)

    @property
    def hessian(self) -> AnchorData:
        """Itself, as :class:`~contrastive_curvature.fit.dataset.DatasetPoints` has it."""
        return self

    @property
    def blocks(self) -> AnchorData:
        """Itself, for :meth:`matmul`."""
        return self

    def whole(self) -> AnchorData:
        """Itself, as :class:`~contrastive_curvature.hessian.dataset.DatasetHessian` has it."""
        return self

    def matvec(self, v: Tensor) -> Tensor:
        """``H v`` for ``v`` of shape (N, D) or (N, D, K)."""
        return torch.cat([part.matvec(v[rows]) for rows, part in self._placed()])

    def matmul(self, v: Tensor) -> Tensor:
        """``H_ii v_i`` for ``v`` of shape (N, D)."""
        return torch.cat([part.blocks.matmul(v[rows]) for rows, part in self._placed()])

    def loss_and_cost(self) -> tuple[Tensor, Tensor]:
        """Value of the loss over the data set, without a graph, and its non-negative version."""
        found = [part.loss_and_cost() for part in self.parts]
        value, cost = (torch.stack([pair[k].double() for pair in found]).sum().to(self.z.dtype) for k in (0, 1))
        return value, cost

    def _placed(self) -> Iterator[tuple[slice, OutputHessian]]:
        start = 0
        for part in self.parts:
            yield slice(start, start + len(part)), part
            start += len(part)


def collect_anchors(
    encoder: Encoder,
    loader: Iterable[Any],
    read: AnchorReader,
    loss: CosineLoss,
    candidates: str = "batch",
    negatives_per_anchor: int | None = None,
    progress: Progress | bool | None = None,
) -> AnchorData:
    """Raw outputs of all points, and the Hessian.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: Batches, in an order that later passes repeat.
        read: Takes a batch apart.
        loss: The loss, with the distance and the fix of its curvature.
        candidates: Of an anchor: those of its ``"batch"``, or of the whole ``"dataset"``.
        negatives_per_anchor: How many negatives an anchor had in training: of the N - 1 others each counts as much
            less. ``None`` counts all.
        progress: Progress of the whole fit, or whether to show progress.

    Raises:
        InputError: The loader is empty or malformed, or no anchor has a positive.
        UnsupportedError: Listed pairs, which are of a batch, with candidates from the data set.
    """
    parts: list[OutputHessian] = []
    outputs: list[Tensor] = []
    given: list[AnchorBatch] = []
    classes: list[Tensor] | None = []
    views = 0
    for number, batch in enumerate(Progress.of(progress).over(loader, "[embedding]")):
        some = read(batch)
        with torch.no_grad():
            z = check_outputs(encoder(some.x), f"model(x) of batch {number} (counted from 0)")
        outputs.append(z)
        classes = None if classes is None or some.classes is None else [*classes, some.classes]
        if candidates == "batch":
            parts.append(loss.data_hessian(z, loss.relate(z, some.labels, some.pairs)))
            derivatives = parts[-1].derivatives
            if isinstance(derivatives, RowDerivatives):
                # All batches stay: what is large is computed again when it is asked for.
                derivatives.release()
            continue
        labels = some.labels
        if labels is not None and some.classes is None and some.pairs is None:
            # Numbers of inputs, which go on from batch to batch.
            labels, views = labels + views, views + int(labels.max()) + 1
        given.append(some._replace(x=torch.empty(0), labels=labels))
    if not outputs:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    z = torch.cat(outputs)
    if candidates == "dataset":
        parts = [_whole(loss, z, given, negatives_per_anchor)]
    note_skipped(sum(p.derivatives.anchors for p in parts), sum(p.derivatives.skipped for p in parts))
    centres = None if classes is None else ClassCentres.of(z, torch.cat(classes))
    return AnchorData(z, parts, centres)


def _whole(loss: CosineLoss, z: Tensor, given: list[AnchorBatch], negatives_per_anchor: int | None) -> OutputHessian:
    pairs = given[0].pairs
    if pairs is not None and not callable(pairs):
        msg = f"candidates='dataset': {type(loss).__name__} compares listed pairs of a batch. Use candidates='batch'."
        raise UnsupportedError(msg)
    relation = loss.relate(z, torch.cat([batch.labels for batch in given if batch.labels is not None]), pairs)
    if negatives_per_anchor is None or not isinstance(loss, RowLoss):
        return loss.data_hessian(z, relation)
    return loss.data_hessian(z, relation, min(1.0, negatives_per_anchor / max(1, len(z) - 1)))


def ordered_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: AnchorReader,
    data: AnchorData,
    structure: Structure,
    progress: Progress | bool | None = None,
    sampler: BlockSampler | None = None,
) -> DatasetCurvature:
    """The curvature with candidates of the whole data set, unclamped.

    Args:
        pullback: Pullback to the parameters.
        loader: The same batches in the same order as before.
        read: Takes a batch apart.
        data: Of the whole data set.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.

    Raises:
        InputError: The loader gives other points than before, or in another order, or a curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    progress = Progress.of(progress)
    (hessian,) = data.parts
    rooted = isinstance(hessian.derivatives, RowDerivatives) and len(hessian.derivatives.signs) > 0
    if hessian.coupled and rooted and structure is not Structure.KRON and data.n > MOST_COUPLED:
        msg = (
            f"candidates='dataset' with pd_fix={str(hessian.pd_fix)!r}: every anchor couples all pairs of its "
            f"candidates, which takes N^3 steps, and these are {data.n} points (at most {MOST_COUPLED}). Use "
            "pd_fix='psd_parts' or 'ggn_fixed', which couple no points, or candidates='batch'."
        )
        raise UnsupportedError(msg)
    dominance, sample = Dominance(pullback, structure, 1), FeatureSample.of(pullback)
    total: Any = None
    for number, (rows, context) in enumerate(_placed(pullback, progress.over(loader, "[curvature]"), read, data.z)):
        if sample is not None:
            sample.add(context)
        blocks = hessian.blocks[rows]
        chosen = blocks if sampler is None else sampler(blocks, pullback)
        if structure is Structure.KRON:
            term: Any = pullback.kron_factors(context, chosen, 1)
        else:
            term = pullback.block_term(context, chosen, structure)
        check_finite(term, pullback, f"batch {number} (counted from 0)")
        dominance.add(context, rows.stop - rows.start, blocks, term)
        added = add_factors if structure is Structure.KRON else operator.add
        total = term if total is None else added(total, term)
    if structure is Structure.KRON:
        total = per_point(total, data.n)
    elif hessian.coupled:
        with progress.bar("[cross terms]", total=data.n**2) as bar:
            for rows, left in _placed(pullback, loader, read, data.z):
                for columns, right in _placed(pullback, loader, read, data.z):
                    cross = hessian.cross(rows, columns)
                    total = total + pullback.cross_term(left, left if rows == columns else right, cross, structure)
                    bar.update(cross.y.numel())
    check_finite(total, pullback, "the sum over all batches")
    dominance.warn()
    return DatasetCurvature(total, *hessian.loss_and_cost(), data.n, sample, mean_norm(data.z), data.classes)


def _placed(pullback: Pullback, loader: Iterable[Any], read: AnchorReader, z: Tensor) -> Iterator[tuple[slice, Any]]:
    """Batches as their place among all points and their context; they must be those of before."""
    start = 0
    for batch in loader:
        x = read(batch).x
        stop = start + input_length(x)
        again, context = pullback.forward(x)
        hint = (
            "With candidates='dataset' every pass needs the same points: build the loader with shuffle=False and "
            "without augmentation, or use candidates='batch', which takes each batch once."
        )
        check_same_outputs(again, z[start:stop], "train_loader", hint)
        yield slice(start, stop), context
        start = stop
    if start != len(z):
        raise InputError(expected("train_loader", f"{len(z)} points in every pass", str(start)))

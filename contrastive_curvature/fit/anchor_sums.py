"""What the batches of a loss of anchors add up to, for one encoder: of one tower, or of one of two."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.accumulate import per_point
from contrastive_curvature.fit.class_sums import TYPICAL, ClassSums
from contrastive_curvature.fit.dataset import DatasetCurvature, mean_norm
from contrastive_curvature.fit.dominance import Dominance
from contrastive_curvature.fit.feature_sample import FeatureSample
from contrastive_curvature.fit.finished import COST, NORMS, VALUE, finished_sums
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.fit.sharing import structured_curvature
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Structure
from contrastive_curvature.parts.state import CURVATURE, State
from contrastive_curvature.parts.sums import CURVATURE_SUM, FEATURES, added, factors_of, named_factors

__all__ = ["AnchorSums", "check_anchors", "finished_anchors", "note_skipped"]

_log = logging.getLogger("contrastive_curvature")

_ANCHORS, _SKIPPED = "anchors", "skipped"


class AnchorSums:
    """Sums over batches, unclamped.

    Args:
        pullback: Pullback to the parameters.
        structure: ``diag``, ``full`` or ``kron``.
        kfac_approx: How ``kron`` treats points that are coupled.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        part: Index of the part of the data; -1 for all of it.
    """

    def __init__(
        self,
        pullback: Pullback,
        structure: Structure,
        kfac_approx: KFACApprox = KFACApprox.EXPAND,
        sampler: BlockSampler | None = None,
        part: int = -1,
    ) -> None:
        self._pullback, self._structure, self._approx, self._sampler = pullback, structure, kfac_approx, sampler
        self._dominance, self._features = Dominance(pullback, structure, 1, part), FeatureSample.of(pullback)
        self._classes: ClassSums | None = ClassSums()
        self._record = PassRecord()
        self._sums: dict[str, Tensor] = {}
        self._batches = self._n = 0

    def add(self, context: Any, hessian: OutputHessian, classes: Tensor | None, numbers: Tensor | None = None) -> None:
        """Take a batch of n points into account.

        Args:
            context: Of the pullback.
            hessian: At their outputs.
            classes: Their class labels, shape (n,), or ``None``.
            numbers: Of the points, shape (n,); ``None`` counts them.

        Raises:
            InputError: The curvature is not finite.
            UnsupportedError: ``kron`` for a layer that has no Kronecker factors.
        """
        pullback, structure, z = self._pullback, self._structure, hessian.z
        part = structured_curvature(pullback, context, hessian, structure, 1, self._approx, self._sampler)
        check_finite(part, pullback, f"batch {self._batches} (counted from 0)")
        if numbers is None:
            numbers = torch.arange(self._n, self._n + len(z))
        if self._features is not None:
            self._features.add(context, numbers)
        if classes is None:
            self._classes = None
        elif self._classes is not None:
            self._classes.add(z, classes, numbers)
        if self._approx is KFACApprox.EXPAND:
            alone = hessian.coupled and structure is not Structure.KRON
            term = pullback.block_term(context, hessian.blocks, Structure.DIAG) if alone else part
            self._dominance.add(context, len(z), hessian.blocks, term)
        self._record.add(z, torch.zeros(len(z), dtype=torch.int64) if classes is None else classes)
        value, cost = hessian.loss_and_cost()
        counts = {_ANCHORS: hessian.derivatives.anchors, _SKIPPED: hessian.derivatives.skipped}
        terms = named_factors(part) if structure is Structure.KRON else {CURVATURE_SUM: part}
        terms |= {VALUE: value.double(), COST: cost.double(), NORMS: len(z) * mean_norm(z)}
        terms |= {name: torch.tensor(count) for name, count in counts.items()}
        self._sums = added(self._sums, terms)
        self._batches, self._n = self._batches + 1, self._n + len(z)

    def state(self, identity: Mapping[str, str] | None = None, part: tuple[int, int] = (0, 1)) -> State:
        """What the batches add up to, to be merged with other parts of the data.

        Args:
            identity: See :class:`~contrastive_curvature.parts.State`.
            part: Index of the part and number of all parts.
        """
        (index, count), kept = part, {}
        table = None
        if self._classes is not None:
            table, kept[TYPICAL] = self._classes.found()
        if self._features is not None and len(self._features):
            kept[FEATURES] = self._features.kept()
        origins = {index: self._record.origin()}
        found = self._dominance.contributions()
        return State(CURVATURE, identity or {}, origins, count, self._sums, kept, table, found)


def check_anchors(state: State, *, changes: bool = True) -> None:
    """Say how many anchors had nothing to be compared with.

    Args:
        state: Of all batches.
        changes: Whether to refuse data in which nothing is compared.

    Raises:
        InputError: None had, there was no batch, or the curvature is zero everywhere.
    """
    if not state.n:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    note_skipped(int(state.sums[_ANCHORS]), int(state.sums[_SKIPPED]))
    parts = [state.sums[CURVATURE_SUM]] if CURVATURE_SUM in state.sums else [f[0] for f in factors_of(state.sums)]
    if changes and not any(bool(part.any()) for part in parts):
        hint = (
            "In a batch of one input nothing has to be told apart; triplets outside their margin, pairs of equal "
            "grades, and comparisons that float32 takes for certain add nothing either. Use larger batches, or the "
            "pair loss."
        )
        wanted = "batches in which the loss changes with the embeddings"
        raise InputError(expected("train_loader", wanted, "a curvature that is zero everywhere", hint))


def finished_anchors(pullback: Pullback, state: State, structure: Structure, share: float = 1.0) -> DatasetCurvature:
    """The sum over all batches. If a single point contributes most of it, there is a warning.

    Args:
        pullback: Pullback to the parameters.
        state: Of all parts.
        structure: ``diag``, ``full`` or ``kron``.
        share: How much of the loss counts as that of these points.

    Raises:
        InputError: A part is missing, or the sum is not finite.
    """
    found = finished_sums(pullback, state, structure)
    kron = structure is Structure.KRON
    dtype = (found.curvature[0][0] if kron else found.curvature).dtype
    curvature = per_point(found.curvature, state.n) if kron else found.curvature
    loss, cost = ((share * number).to(dtype) for number in (found.loss, found.cost))
    return replace(found, curvature=curvature, loss=loss, cost=cost)


def note_skipped(anchors: int, skipped: int) -> None:
    """Say how many anchors had nothing to be compared with.

    Raises:
        InputError: None had.
    """
    if not anchors:
        hint = "An anchor needs a positive among the candidates of its batch: larger batches, or several of each class."
        wanted = "at least one anchor with positives and candidates as the loss compares them"
        raise InputError(expected("train_loader", wanted, f"none of {skipped}", hint))
    if skipped:
        _log.info(
            "%d of %d anchors had no positive, or nothing to be compared with, and add nothing to the curvature",
            skipped,
            anchors + skipped,
        )

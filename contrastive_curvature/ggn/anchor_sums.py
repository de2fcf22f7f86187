"""What the batches of a loss of anchors add up to, for one encoder: of one tower, or of one of two."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import add_factors, per_point
from contrastive_curvature.ggn.class_sums import ClassSums
from contrastive_curvature.ggn.dataset import DatasetCurvature, mean_norm
from contrastive_curvature.ggn.dominance import Dominance
from contrastive_curvature.ggn.feature_sample import FeatureSample
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.sampling import BlockSampler
from contrastive_curvature.ggn.sharing import structured_curvature
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Structure

__all__ = ["AnchorSums", "note_skipped"]

_log = logging.getLogger("contrastive_curvature")


class AnchorSums:
    """Sums over batches, unclamped.

    Args:
        pullback: Pullback to the parameters.
        structure: ``diag``, ``full`` or ``kron``.
        kfac_approx: How ``kron`` treats points that are coupled.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
    """

    def __init__(
        self,
        pullback: Pullback,
        structure: Structure,
        kfac_approx: KFACApprox = KFACApprox.EXPAND,
        sampler: BlockSampler | None = None,
    ) -> None:
        self._pullback, self._structure, self._approx, self._sampler = pullback, structure, kfac_approx, sampler
        self._dominance, self._features = Dominance(pullback, structure, 1), FeatureSample.of(pullback)
        self._classes: ClassSums | None = ClassSums()
        self._curvature: Any = None
        self._value: Any = 0
        self._cost: Any = 0
        self._norms: Any = 0
        self._n = self._batches = self._anchors = self._skipped = 0

    def add(self, context: Any, hessian: OutputHessian, classes: Tensor | None) -> None:
        """Take a batch of n points into account.

        Args:
            context: Of the pullback.
            hessian: At their outputs.
            classes: Their class labels, shape (n,), or ``None``.

        Raises:
            InputError: The curvature is not finite.
            UnsupportedError: ``kron`` for a layer that has no Kronecker factors.
        """
        pullback, structure, z = self._pullback, self._structure, hessian.z
        part = structured_curvature(pullback, context, hessian, structure, 1, self._approx, self._sampler)
        check_finite(part, pullback, f"batch {self._batches} (counted from 0)")
        if self._features is not None:
            self._features.add(context)
        if classes is None:
            self._classes = None
        elif self._classes is not None:
            self._classes.add(z, classes)
        if self._approx is KFACApprox.EXPAND:
            alone = hessian.coupled and structure is not Structure.KRON
            term = pullback.block_term(context, hessian.blocks, Structure.DIAG) if alone else part
            self._dominance.add(context, len(z), hessian.blocks, term)
        if structure is Structure.KRON:
            self._curvature = add_factors(self._curvature, part)
        else:
            self._curvature = part if self._curvature is None else self._curvature + part
        value, cost = hessian.loss_and_cost()
        self._value, self._cost = self._value + value.double(), self._cost + cost.double()
        self._n, self._norms = self._n + len(z), self._norms + len(z) * mean_norm(z)
        self._anchors += hessian.derivatives.anchors
        self._skipped += hessian.derivatives.skipped
        self._batches += 1
        self._dtype = z.dtype

    def check(self) -> None:
        """Say how many anchors had nothing to be compared with.

        Raises:
            InputError: None had, or there was no batch.
        """
        if not self._batches:
            raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
        note_skipped(self._anchors, self._skipped)

    def check_changes(self) -> None:
        """Refuse data in which nothing is compared.

        Raises:
            InputError: The curvature is zero everywhere.
        """
        parts = [self._curvature] if isinstance(self._curvature, Tensor) else [f[0] for f in self._curvature]
        if not any(bool(part.any()) for part in parts):
            hint = (
                "In a batch of one input nothing has to be told apart; triplets outside their margin, pairs of equal "
                "grades, and comparisons that float32 takes for certain add nothing either. Use larger batches, or the "
                "pair loss."
            )
            wanted = "batches in which the loss changes with the embeddings"
            raise InputError(expected("train_loader", wanted, "a curvature that is zero everywhere", hint))

    def total(self, share: float = 1.0) -> DatasetCurvature:
        """The sum. If a single point contributes most of it, there is a warning.

        Args:
            share: How much of the loss counts as that of these points.

        Raises:
            InputError: The sum is not finite.
        """
        check_finite(self._curvature, self._pullback, "the sum over all batches")
        self._dominance.warn()
        curvature = per_point(self._curvature, self._n) if self._structure is Structure.KRON else self._curvature
        centres = None if self._classes is None else self._classes.centres()
        value, cost = ((share * number).to(self._dtype) for number in (self._value, self._cost))
        return DatasetCurvature(curvature, value, cost, self._n, self._features, self._norms / self._n, centres)


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

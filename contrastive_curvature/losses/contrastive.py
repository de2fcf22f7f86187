"""The contrastive loss of the paper, and its fast path for class labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputTypeError, expected
from contrastive_curvature.losses import effort
from contrastive_curvature.losses.base import PairLoss, Terms
from contrastive_curvature.losses.contrastive_derivatives import ContrastiveDerivatives
from contrastive_curvature.losses.label_sums import TILE_COLUMNS, TILE_ROWS, add_inside
from contrastive_curvature.losses.mining import active_pairs
from contrastive_curvature.losses.weighting import Shares
from contrastive_curvature.options import LARGEST_DISTANCE, Distance, Normalization, PDFix, check_margin
from contrastive_curvature.pairs.relation import LabelRelation, Relation, RelationFunction

__all__ = ["ContrastiveLoss"]


class ContrastiveLoss(PairLoss):
    r"""Contrastive loss on the unit sphere (paper, Eq. 1 and 20-24, in the form that metric-learning libraries use).

    With ``u_i = z_i / |z_i|``, over unordered pairs ``{i, j}``:

    .. math::
        L = \sum_{pos} w^+_{ij} \tfrac12 |u_i - u_j|^2
          + \sum_{neg} w^-_{ij} \tfrac12 \max(0, m^2 - |u_i - u_j|^2)

    ``margin`` is a threshold ``m`` on the distance itself: a negative inside it adds ``(m^2 - |u_i - u_j|^2) / 2``,
    one outside adds nothing. The paper's Eq. 1 writes ``max(0, m' - |u_a - u_n|^2)``, so ``m = sqrt(m')``;
    pytorch-metric-learning's ``ContrastiveLoss(neg_margin=m)`` (LpDistance) has the same threshold with the linear term
    ``m - |u_i - u_j|``.

    Args:
        margin: In (0, 2]; ``None`` lets every negative count, with the term ``-|u_i - u_j|^2 / 2``.
        negative_weight: ``w_n`` of Eq. 10 in [0, 1]: positives are scaled by ``1 - w_n``, negatives by ``w_n``.
        normalization: ``"sum"``, ``"type"`` or ``"anchor"``, see :class:`~contrastive_curvature.losses.PairLoss`.
        distance: Of no effect on the loss; how its curvature is split, see
            :class:`~contrastive_curvature.options.Distance`.
        pd_fix: Of no effect on the loss; how its curvature is made positive definite, see
            :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.
    """

    linear = True
    value_from_sums = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [name for name in ("_value", "_terms") if name in cls.__dict__]
        if own:
            hint = "The sums over class labels are those of the contrastive loss. Subclass PairLoss instead."
            raise InputTypeError(expected(f"{cls.__name__}", "the two rules of ContrastiveLoss", ", ".join(own), hint))

    def __init__(
        self,
        margin: float | None = 0.7,
        negative_weight: float = 0.5,
        normalization: Normalization | str = Normalization.ANCHOR,
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.FIXED,
    ) -> None:
        super().__init__(negative_weight, normalization, distance=distance, pd_fix=pd_fix)
        check_margin(margin)
        self.margin = margin

    @property
    def threshold(self) -> float | None:
        """A negative counts where ``u_i . u_j`` exceeds this; ``None`` lets all count."""
        masks = self.margin is not None and self.margin < LARGEST_DISTANCE
        return 1 - self.margin**2 / 2 if masks else None  # type: ignore[operator]

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        squared = 2 - 2 * cosine
        if self.margin is None:
            repelled = -squared
        elif self.margin < LARGEST_DISTANCE:
            repelled = torch.relu(self.margin**2 - squared)
        else:
            repelled = self.margin**2 - squared
        return (attract * squared + repel * repelled).sum() / 2

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        # The margin mask is constant, as the derivative of the loss has it everywhere but on the margin itself.
        inside = repel if self.threshold is None else repel * (cosine > self.threshold)
        return Terms((inside - attract).expand_as(cosine), None)

    def derivatives(
        self,
        relation: Relation,
        u: Tensor,
        *,
        attracting_only: bool | None = None,
        shares: Shares | None = None,
    ) -> ContrastiveDerivatives:
        """See :meth:`PairLoss.derivatives`."""
        only = self.pd_fix.attracting_only if attracting_only is None else attracting_only
        return ContrastiveDerivatives(self, relation, u, attracting_only=only, shares=shares)

    def mine(
        self, z: Tensor, targets: Tensor, relation: RelationFunction | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`PairLoss.mine`; negatives inside the margin only."""
        return active_pairs(z, targets, self.margin, relation)

    def _pair_seconds(self, relation: Relation, u: Tensor) -> float:
        if isinstance(relation, LabelRelation):
            return self._inside_seconds(relation.n, u[:TILE_COLUMNS])
        return super()._pair_seconds(relation, u)

    def _labelled_seconds(self, n: int, like: Tensor) -> float:
        return self._inside_seconds(n, effort.drawn(TILE_COLUMNS, like))

    def _inside_seconds(self, n: int, columns: Tensor) -> float:
        """Only a margin needs the pairs: without one, sums over classes are enough."""
        # The value of the loss has the repelling pairs, also where the curvature leaves them out.
        if n < effort.FEWEST_POINTS or self.threshold is None or not self.negative_weight:
            return 0.0
        threshold, rows = self.threshold, columns[:TILE_ROWS]
        out = rows.new_zeros(rows.shape[0], columns.shape[1] + 1, dtype=torch.float64)
        values = torch.cat([torch.ones_like(columns[:, :1]), columns], dim=1)
        taken = effort.seconds(lambda: add_inside(out, rows, columns, threshold, values), columns)
        return taken * (n / rows.shape[0]) * (n / columns.shape[0])

"""Losses of pairs of embeddings: the shared part, and the two rules of each loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.derivatives import Totals
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.over_dataset import Columns, DatasetHessian
from contrastive_curvature.losses.pair_derivatives import PairDerivatives
from contrastive_curvature.losses.weighting import (
    Related,
    Shares,
    count_shares,
    lone_shares,
    pair_totals,
    weigh_pairs,
)
from contrastive_curvature.options import Distance, Normalization, PDFix, check_negative_weight, parse_option
from contrastive_curvature.pairs.relation import Relation, RelationFunction, make_target_relation


class Terms(NamedTuple):
    """Derivatives of a loss in a block of cosines.

    Attributes:
        first: ``dL/ds``, of the shape of the cosines.
        second: ``d2L/ds2``, elementwise; ``None`` where the loss is linear in the cosines.
    """

    first: Tensor
    second: Tensor | None


class PairLoss(CosineLoss):
    """A loss that depends on the embeddings only through the cosines of their pairs.

    ``L = sum_{i<j} [ a_ij l+(s_ij) + r_ij l-(s_ij) ]`` with the cosines ``s_ij = u_i . u_j`` of the unit embeddings.
    The arguments below determine the weight of every pair as a positive (``a``) and as a negative (``r``), see
    :mod:`contrastive_curvature.losses.weighting`.

    A subclass writes two rules on a block of pairs, :meth:`_value` and :meth:`_terms`, and inherits the output Hessian,
    every structure of the parameter curvature, the data-set fits and the hosts.

    Args:
        negative_weight: ``w_n`` of the paper's Eq. 10 in [0, 1]: positives are scaled by ``1 - w_n``, negatives by
            ``w_n``.
        normalization: ``"sum"``: every unordered pair counts once. ``"type"``: the mean over all positive pairs plus
            the mean over all negative pairs (Eq. 23). ``"anchor"``: at each point the weights of the positives sum to
            one, and so do the weights of the negatives; a pair gets the mean of its two points' shares (Eq. 119). The
            loss then grows like N.
        distance: How the curvature of the loss is split, without effect on the loss, see
            :class:`~contrastive_curvature.options.Distance`.
        pd_fix: How the curvature is made positive definite, without effect on the loss, see
            :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.
    """

    compares = "pairs"

    _options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        **CosineLoss._options,
        "negative_weight": check_negative_weight,
        "normalization": partial(parse_option, Normalization, "normalization"),
    }

    def __init__(
        self,
        negative_weight: float = 0.5,
        normalization: Normalization | str = Normalization.ANCHOR,
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.FIXED,
    ) -> None:
        super().__init__(distance=distance, pd_fix=pd_fix)
        self.negative_weight = check_negative_weight(negative_weight)
        self.normalization = parse_option(Normalization, "normalization", normalization)

    @abstractmethod
    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        """Compute the value of a block of pairs, differentiable by autograd.

        Args:
            cosine: ``s``, shape (B, M).
            attract: Weight of each pair as a positive, of a shape that broadcasts to the shape of ``cosine``.
            repel: Weight of each pair as a negative.

        Returns:
            The sum over the block, one number.
        """

    @abstractmethod
    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        """Compute the derivatives of :meth:`_value` in the cosines, from the same arguments."""

    def _at(self, u: Tensor, relation: Relation) -> Tensor:
        counts = relation.counts()
        shares = count_shares(*counts, self.normalization, u.dtype, pair_totals(*counts))
        # In float64, since a data set has many pairs.
        total = u.new_zeros((), dtype=torch.float64)
        for rows, positive, negative in relation.row_blocks():
            weights = weigh_pairs(self.negative_weight, positive, negative, shares[rows], shares)
            cosine = u[rows] @ u.T
            # A point's pair with itself has no weight, but its value or slope may be infinite.
            itself = torch.zeros_like(cosine, dtype=torch.bool)
            itself.diagonal(rows.start).fill_(True)
            # The matrix contains every unordered pair twice.
            total = total + self._checked_value(cosine.masked_fill(itself, 0), *weights).double() / 2
        # The zero term keeps a gradient even without points.
        return total.to(u.dtype) + 0 * u.sum()

    def _checked_value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        """Return the value of :meth:`_value`, checked to be one number."""
        value = self._value(cosine, attract, repel)
        if not isinstance(value, Tensor) or value.numel() != 1:
            name, wanted = f"{type(self).__name__}._value", "the sum over the block, a tensor with one number"
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(name, wanted, got)
        return value.reshape(())

    def _checked_terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        """Return the derivatives of :meth:`_terms`, checked to have the shape of the cosines."""
        return self._check_terms(self._terms(cosine, attract, repel), Terms, cosine)

    def derivatives(self, relation: Relation, u: Tensor, *, shares: Shares | None = None) -> PairDerivatives:
        """Return the derivatives of this loss in the cosines of N points.

        Args:
            relation: Which pairs are positive and negative.
            u: Unit embeddings, shape (N, D).
            shares: Shares of the points, for a batch that represents a data set; ``None`` counts the pairs of
                ``relation``.
        """
        return PairDerivatives(self, relation, u, shares)

    def data_hessian(self, z: Tensor, relation: Relation, n_data: int | None = None) -> OutputHessian:
        """See :meth:`CosineLoss.data_hessian`; scales the batch's pairs to all pairs (paper, Proposition B.1)."""
        shares = lone_shares(relation, self.normalization, z.dtype, len(z) if n_data is None else n_data)
        return self.hessian_at(z, relation, shares=shares)

    def data_scale(self, n: int) -> float:
        """See :meth:`CosineLoss.data_scale`; ``n / 2`` for a mean over pairs."""
        return n / 2 if self.normalization is Normalization.TYPE else 1.0

    def hessian_over(
        self, related: Related, table: ClassTable | None, points: Columns | None, bank: Columns | None = None
    ) -> DatasetHessian:
        """Return the Hessian over all pairs of a data set.

        Args:
            related: Relation and shares of the points, by class.
            table: Numbers and sums of all classes; ``None`` with a relation.
            points: All points, if known.
            bank: Sampled points that represent all negatives.
        """
        return DatasetHessian(self, related, points, bank)

    def loss_and_cost(self, totals: Totals, attract: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the value of the loss, and its non-negative version.

        Args:
            totals: Totals of all points.
            attract: Shares of the positives, summed over all positives of all points.
            dtype: Dtype of the result.
        """
        del attract
        value = totals.value.to(dtype)
        return value, value

    def mine(
        self, z: Tensor, targets: Tensor, relation: RelationFunction | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the pairs of a batch to train on: all pairs, each once.

        Args:
            z: Raw outputs, shape (N, D).
            targets: Class labels, shape (N,), or targets for ``relation``, shape (N, ...).
            relation: ``None`` for class labels, or a callable on targets that returns two boolean masks.

        Returns:
            Index tuples ``(a1, p, a2, n)`` as metric-learning miners return them, each int64 of shape (K,).
        """
        z = check_outputs(z)
        positive, negative = make_target_relation(targets, len(z), z.device, relation).rows(0, len(z))
        a1, p = positive.triu(1).nonzero().unbind(1)
        a2, n = negative.triu(1).nonzero().unbind(1)
        return a1, p, a2, n

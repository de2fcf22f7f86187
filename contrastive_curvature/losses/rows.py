"""Losses that compare all candidates of an anchor with each other: the shared part, and the four rules of each."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.derivatives import CosineDerivatives
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.row_derivatives import RowDerivatives
from contrastive_curvature.losses.sides import Sides, joined_towers, one_tower, two_towers
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.relation import Relation
from contrastive_curvature.pairs.targets import make_targets

_SMALLEST_TEMPERATURE = 1e-6
"""Curvatures go with the inverse square of a temperature; at a smaller one float32 has no digits of a cosine left."""


class RowTerms(NamedTuple):
    """Derivatives of the loss of anchors in a block of their cosines (B, M).

    The second derivatives of anchor i are ``diag(second_i) + sum_r sign_r roots_ri roots_ri^T``, with the signs of
    :attr:`RowLoss.root_signs`.

    Attributes:
        first: ``g = dL/ds``, shape (B, M).
        second: ``c``, shape (B, M); ``None`` where the loss is piecewise linear in the cosines.
        roots: ``q``, one tensor of shape (B, M) for every sign.
    """

    first: Tensor
    second: Tensor | None
    roots: tuple[Tensor, ...] = ()


class RowLoss(CosineLoss):
    """A loss of anchors: each compares its positives with its negatives, all at once, through their cosines.

    ``L = sum_i l(s_i)`` over anchors i, with the row ``s_i`` of cosines between the anchor and its candidates. In one
    tower all points are anchors, and the others are their candidates; with two towers (:class:`~contrastive_curvature
    .TwoTowers`) the candidates of a point of one tower are the points of the other.

    A subclass writes four rules on a block of rows: :meth:`_counts`, :meth:`_value`, :meth:`_statistics` and
    :meth:`_terms`. It inherits the output Hessian, every structure of the parameter curvature, and the hosts.

    Args:
        reduction: ``"mean"`` over the terms of :meth:`_counts`, as the libraries that people train with have it, or
            ``"sum"``. A fit of a posterior takes the mean of every batch times its number of anchors, of two towers in
            both directions times their mean.
        directions: With two towers, which one has the anchors: ``"both"`` (each direction counts one half), ``"a"`` or
            ``"b"``. Of no effect in one tower.
        distance: Of no effect on the loss; how its curvature is split, see
            :class:`~contrastive_curvature.options.Distance`.
        pd_fix: Of no effect on the loss; how its curvature is made positive definite, see
            :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.
    """

    compares = "anchors"

    root_signs: ClassVar[tuple[int, ...]] = ()
    """Signs of the roots that :meth:`_terms` gives."""

    shift_invariant: ClassVar[bool] = False
    """Whether the same number added to all cosines of an anchor leaves the loss as it is, as for a softmax."""

    def __init__(
        self,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(distance=distance, pd_fix=pd_fix)
        validate.choice("reduction", reduction, ("mean", "sum"))
        validate.choice("directions", directions, ("both", "a", "b"))
        self.reduction, self.directions = reduction, directions

    @property
    def averages(self) -> bool:
        """Return whether the loss is a mean."""
        return self.reduction == "mean"

    @abstractmethod
    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return how many terms of the loss every anchor has, shape (B,); an anchor with zero is left out.

        Args:
            positive: How often each candidate counts as a positive, shape (B, M); zero for the anchor itself.
            negative: How often it counts as a negative, shape (B, M).
        """

    def _counts_at(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return how many terms a mean is over, (B,), where that depends on the cosines; otherwise :meth:`_counts`."""
        return self._counts(positive, negative)

    @abstractmethod
    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute the loss of every anchor, summed over its terms, differentiable by autograd.

        Args:
            cosine: ``s``, shape (B, M), with all candidates of an anchor in its row.
            positive: See :meth:`_counts`.
            negative: See :meth:`_counts`.

        Returns:
            Shape (B,). Rows with a count of zero are not used, but must not raise.
        """

    def _cost(self, value: Tensor, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return how far the loss of an anchor is above the least at any embeddings, shape (B,); mostly all of it.

        Args:
            value: What :meth:`_value` gives, shape (B,).
            cosine: The other arguments as there.
            positive: See :meth:`_counts`.
            negative: See :meth:`_counts`.
        """
        return value

    @abstractmethod
    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute what :meth:`_terms` needs to know of a whole row; arguments as in :meth:`_value`.

        Returns:
            Shape (B, K), best with a K that does not depend on the number of candidates.
        """

    @abstractmethod
    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        """Compute the derivatives of :meth:`_value` in some of the candidates.

        Args:
            cosine: ``s``, shape (B, C), with C of the M candidates.
            positive: Of the same.
            negative: Of the same.
            statistics: Of the whole rows, shape (B, K).
        """

    @override
    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> Relation:
        if isinstance(pairs, Tensor):
            if labels is not None:
                hint = "Partners and targets need no labels."
                raise InputError("labels, pairs", "one of them", "both", hint)
            return make_targets(pairs, z.shape[0], z.device)
        return super().relate(z, labels, pairs)

    def _at(self, u: Tensor, relation: Relation) -> Tensor:
        return self._value_of(u, relation, one_tower(len(u)))

    def derivatives(
        self, relation: Relation, u: Tensor, *, sides: Sides | None = None, as_data: bool = False
    ) -> CosineDerivatives:
        """Return the derivatives of this loss in the cosines of N points.

        Args:
            relation: Which pairs are positive and negative.
            u: Unit embeddings, shape (N, D).
            sides: Which points are anchors, and of which candidates; by default all points of one tower.
            as_data: Whether a mean is multiplied by its number of anchors, as a fit has it.
        """
        return RowDerivatives(self, relation, u, sides or one_tower(len(u)), as_data=as_data)

    def data_hessian(self, z: Tensor, relation: Relation, n_data: int | None = None) -> OutputHessian:
        """See :meth:`CosineLoss.data_hessian`: a mean over terms counts times its number of anchors."""
        return self.hessian_at(z, relation, as_data=True)

    def between(self, z_a: Tensor, z_b: Tensor, labels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Compute the loss of two towers.

        Args:
            z_a: Raw or normalised embeddings of the first tower, shape (N, D).
            z_b: Of the second tower, shape (M, D).
            labels: Labels of both, (N,) and (M,): points of the same label are positives. ``None`` where ``z_a[i]``
                belongs to ``z_b[i]``.

        Returns:
            A scalar.

        Raises:
            InputError: The towers have another width or, without labels, another number of points.
        """
        z, relation, first = joined_towers(z_a, z_b, labels)
        return self._value_of(normalize(z)[0], relation, two_towers(first, len(z), self.directions))

    def _value_of(self, u: Tensor, relation: Relation, sides: Sides) -> Tensor:
        total, terms = u.new_zeros((), dtype=torch.float64), 0.0
        for side in sides:
            masks = relation.rows(side.anchors.start, side.anchors.stop, side.candidates)
            positive, negative = (mask.to(u) for mask in masks)
            kept = self._checked("_counts", positive, negative) > 0
            if bool(kept.any()):
                cosine = u[side.anchors][kept] @ u[side.candidates].T
                positive, negative = positive[kept], negative[kept]
                total = total + self._checked("_value", cosine, positive, negative).double().sum()
                terms += float(self._counts_at(cosine.detach(), positive, negative).sum())
        scale = self._scale(terms, sides, 0, as_data=False)
        return (scale * total).to(u.dtype) + 0 * u.sum()

    def _checked(self, rule: str, *blocks: Tensor) -> Tensor:
        """Return what a rule gives of blocks (B, M), if it is one number for each anchor, shape (B,)."""
        numbers, rows = getattr(self, rule)(*blocks), len(blocks[0])
        name = f"{type(self).__name__}.{rule}"
        if not isinstance(numbers, Tensor) or tuple(numbers.shape) != (rows,):
            came = f"shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}"
            raise InputError(name, f"one number for each of {rows} anchors, shape ({rows},)", came)
        if bool(numbers.detach().isnan().any()):
            raise InputError(name, "numbers", "NaN")
        return numbers

    def _checked_terms(
        self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor, kept: Tensor
    ) -> RowTerms:
        """Return what :meth:`_terms` gives, each (B, C), with zeros where an anchor has no term (``kept``, (B,))."""
        terms = self._check_terms(self._terms(cosine, positive, negative, statistics), RowTerms, cosine)
        if len(terms.roots) != len(self.root_signs):
            wanted = f"{len(self.root_signs)} roots, as root_signs says"
            raise InputError(f"{type(self).__name__}._terms", wanted, len(terms.roots))
        if bool(kept.all()):
            return terms
        first, second, roots = terms
        row, second = kept.unsqueeze(1), None if second is None else torch.where(kept.unsqueeze(1), second, 0.0)
        return RowTerms(torch.where(row, first, 0.0), second, tuple(torch.where(row, root, 0.0) for root in roots))

    def _scale(self, terms: float, sides: Sides, anchors: int, *, as_data: bool) -> float:
        """Return the factor of the sum over all anchors of all sides.

        Args:
            terms: Number of terms.
            sides: One tower, or both directions of two.
            anchors: Number of anchors that have a term.
            as_data: See :meth:`derivatives`.
        """
        if not self.averages:
            return 1 / len(sides)
        return (anchors / len(sides) if as_data else 1.0) / terms if terms else 0.0


def check_temperature(value: object) -> float:
    """Return ``value`` if it is a temperature that cosines can be divided by."""
    number = validate.number("temperature", value, positive=True)
    if number < _SMALLEST_TEMPERATURE:
        raise InputError("temperature", f"a number of at least {_SMALLEST_TEMPERATURE:g}", number)
    return number


def weighted_logsumexp(logits: Tensor, times: Tensor) -> Tensor:
    """Return ``log sum_j m_j exp(logit_j)``, shape (B,), over candidates that count ``m_j`` times; -inf without any."""
    weighted = torch.where(times > 0, logits + times.log(), -torch.inf)
    some = (times > 0).any(1)
    # Kept out of the sum: the gradient of the logarithm of zero is NaN.
    inside = torch.where(some.unsqueeze(1), weighted, 0.0).logsumexp(1)
    return torch.where(some, inside, -torch.inf)

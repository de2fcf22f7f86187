"""CoSENT: pairs of graded similarity, whose cosines should be in the order of their grades."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.cosent_derivatives import CoSENTDerivatives
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.last_call import LastCall
from contrastive_curvature.losses.towers import joined_towers
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.graded import GradedPairs
from contrastive_curvature.pairs.relation import Relation

__all__ = ["CoSENTLoss"]


class CoSENTLoss(CosineLoss):
    r"""CoSENT: compares the cosines of any two pairs of different grades, all of a batch at once.

    With the cosine ``s_k`` and the grade ``y_k`` of each of K listed pairs, and the scale ``a``:

    .. math::
        L = \log \Big( 1 + \sum_{(k, l) : y_k > y_l} e^{a (s_l - s_k)} \Big)

    Only the order of the grades counts; with fewer than two different ones, the loss is zero. It is one number for a
    batch, not a mean over pairs, and a fit of a posterior takes the sum over batches.

    Its second derivatives couple all pairs with each other, a matrix (K, K) that is held in memory; they are positive
    semidefinite. It is ``CoSENTLoss`` of sentence-transformers.

    Args:
        scale: ``a``, positive: one over the temperature.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`. ``"positive"`` keeps the first-order part of the
            pairs whose cosine should be larger.

    Raises:
        InputError: An option is unknown or out of range.

    Source: Su, CoSENT: a more effective sentence embedding scheme than Sentence-BERT, 2022,
    https://kexue.fm/archives/8847.
    """

    graded = True

    def __init__(
        self, scale: float = 20.0, *, distance: Distance | str = Distance.ARCCOS, pd_fix: PDFix | str = PDFix.PSD_PARTS
    ) -> None:
        super().__init__(distance=distance, pd_fix=pd_fix)
        self.scale = validate.number("scale", scale, positive=True)

    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> GradedPairs:
        """See :meth:`CosineLoss.relate`."""
        wanted = "(a, b, grades): two points and a grade for every pair"
        if labels is not None:
            raise InputError(expected("labels", "None", "labels", f"Pass pairs={wanted}."))
        if not isinstance(pairs, (tuple, list)):
            came = "None" if pairs is None else f"a {type(pairs).__name__}"
            raise InputTypeError(expected("pairs", wanted, came))
        if len(pairs) != 3:
            raise InputError(expected("pairs", wanted, f"a tuple of {len(pairs)}"))
        return GradedPairs(*pairs, len(z), z.device)

    def forward(self, z: Tensor, labels: Tensor | None = None, *, pairs: Pairs | None = None) -> Tensor:
        """Compute the loss of a batch.

        Args:
            z: Raw or normalised embeddings, shape (N, D); half precision is computed in float32.
            labels: Must be ``None``.
            pairs: ``(a, b, grades)``: integer indices into the embeddings, and a finite number for every pair, each of
                shape (K,).

        Returns:
            A scalar; zero, with a zero gradient, where all grades are the same.

        Raises:
            InputError: Embeddings or pairs are malformed.
        """
        if isinstance(z, Tensor) and z.requires_grad and torch.is_grad_enabled():
            self._last_call = LastCall(z, labels, pairs)
        z = check_outputs(z)
        return self._value(normalize(z)[0], self.relate(z, labels, pairs))

    def between(self, z_a: Tensor, z_b: Tensor, grades: Tensor) -> Tensor:
        """The loss of pairs of two towers.

        Its output Hessian is that of ``torch.cat([z_a, z_b])`` with ``pairs=(arange(K), arange(K, 2 * K), grades)``.

        Args:
            z_a: Raw or normalised embeddings of the first points, shape (K, D).
            z_b: Of the second points, in the same order, shape (K, D).
            grades: Shape (K,).

        Returns:
            A scalar.

        Raises:
            InputError: The towers have another shape, or the grades are malformed.
        """
        z, _, count = joined_towers(z_a, z_b)
        index = torch.arange(len(z), device=z.device)
        return self._value(normalize(z)[0], self.relate(z, None, (index[:count], index[count:], grades)))

    def derivatives(self, relation: Relation, u: Tensor) -> CoSENTDerivatives:
        """Derivatives of this loss in the cosines of N points.

        Args:
            relation: Graded pairs, as :meth:`relate` gives them.
            u: Unit embeddings, shape (N, D).

        Raises:
            InputError: The pairs have no grades.
        """
        if not isinstance(relation, GradedPairs):
            raise InputError(expected("relation", "graded pairs", f"a {type(relation).__name__}"))
        return CoSENTDerivatives(self, relation, u)

    def _value(self, u: Tensor, pairs: GradedPairs) -> Tensor:
        cosine = (u[pairs.a] * u[pairs.b]).sum(1)
        gaps = (self.scale * (cosine - cosine.unsqueeze(1)))[_higher(pairs.grades)]
        return torch.cat([gaps.new_zeros(1), gaps]).logsumexp(0) + 0 * u.sum()

    def shares(self, cosine: Tensor, grades: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss as a softmax over comparisons of two pairs.

        Args:
            cosine: ``s``, shape (K,).
            grades: ``y``, shape (K,).

        Returns:
            ``W_kl = e^(a (s_l - s_k)) / e^L`` where ``y_k > y_l``, shape (K, K); ``e^-L``, the share of the 1; and L.
        """
        gaps = (self.scale * (cosine - cosine.unsqueeze(1))).masked_fill(~_higher(grades), -torch.inf)
        value = torch.cat([gaps.new_zeros(1), gaps.flatten()]).logsumexp(0)
        return (gaps - value).exp(), (-value).exp(), value


def _higher(grades: Tensor) -> Tensor:
    """Whether pair k has a higher grade than pair l, shape (K, K)."""
    return grades.unsqueeze(1) > grades

"""The contrastive loss, written plainly: its autograd derivatives are the truth for everything else."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.weighting import Shares, count_shares
from contrastive_curvature.options import LARGEST_DISTANCE, CurvatureOptions, Distance, Normalization, PDFix
from contrastive_curvature.pairs import Pairs, make_relation
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import Relation
from contrastive_curvature.progress import Progress

__all__ = ["ContrastiveLoss"]

_FASTER = "Faster: a batch of the points, or pairs=..., the pairs that a miner lists."


class ContrastiveLoss(_Loss):
    r"""Contrastive loss on the unit sphere (paper, Eq. 1 and 20-24, in the form that metric-learning libraries use).

    With ``u_i = z_i / |z_i|``, over unordered pairs ``{i, j}``:

    .. math::
        L = \sum_{pos} w^+_{ij} \tfrac12 |u_i - u_j|^2
          + \sum_{neg} w^-_{ij} \tfrac12 \max(0, m^2 - |u_i - u_j|^2)

    ``margin`` is a threshold ``m`` on the distance itself: a negative inside it costs ``(m^2 - |u_i - u_j|^2) / 2``,
    one outside costs nothing. The paper's Eq. 1 writes ``max(0, m' - |u_a - u_n|^2)``, so ``m = sqrt(m')``;
    pytorch-metric-learning's ``ContrastiveLoss(neg_margin=m)`` (LpDistance) has the same threshold with the linear cost
    ``m - |u_i - u_j|``.

    Args:
        margin: In (0, 2]; ``None`` lets every negative count, with the cost ``-|u_i - u_j|^2 / 2``.
        negative_weight: ``w_n`` of Eq. 10 in [0, 1]: positives are scaled by ``1 - w_n``, negatives by ``w_n``.
        normalization: ``"sum"``: every unordered pair counts once. ``"type"``: the mean over all positive pairs plus
            the mean over all negative pairs (Eq. 23). ``"anchor"``: each point's positives average to one, its
            negatives too, and a pair takes the mean of its two points' shares (Eq. 119); the loss then grows like N.
        distance: Of no effect on the loss; how a host library that takes the curvature from the loss (BackPACK) splits
            it, see :class:`~contrastive_curvature.options.Distance`.
        pd_fix: The same, see :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.
    """

    def __init__(
        self,
        margin: float | None = 0.7,
        negative_weight: float = 0.5,
        normalization: Normalization | str = Normalization.ANCHOR,
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.FIXED,
    ) -> None:
        # To hosts, a sum over pairs; what it is divided by says `normalization`.
        super().__init__(reduction="sum")
        self.options = CurvatureOptions(distance, pd_fix, margin, negative_weight, normalization)  # type: ignore[arg-type]
        self.margin = margin
        self.negative_weight = float(negative_weight)
        self.normalization = self.options.normalization

    @classmethod
    def from_options(cls, options: CurvatureOptions) -> ContrastiveLoss:
        """The loss whose curvature the options describe."""
        return cls(
            options.margin,
            options.negative_weight,
            options.normalization,
            distance=options.distance,
            pd_fix=options.pd_fix,
        )

    def forward(self, z: Tensor, labels: Tensor | None = None, *, pairs: Pairs | None = None) -> Tensor:
        """Compute the loss of a batch.

        Args:
            z: Raw or normalised embeddings, shape (N, D); half precision is computed in float32.
            labels: Integer class labels, shape (N,), for all pairs of the batch.
            pairs: Instead: index tuples, masks or a callable, see :func:`contrastive_curvature.pairs.make_relation`.

        Returns:
            A scalar; zero, with a zero gradient, when there is no pair.

        Raises:
            InputError: Embeddings, labels or pairs are malformed.
        """
        z = check_outputs(z)
        relation = make_relation(z.shape[0], z.device, labels, pairs)
        positive, negative = relation.counts()
        totals = (positive.sum().item() / 2, negative.sum().item() / 2)
        shares = count_shares(positive, negative, self.normalization, z.dtype, totals)
        u, _ = normalize(z)
        if isinstance(relation, EdgeRelation):
            return self._listed(u, relation, shares)
        return self._all_pairs(u, relation, shares)

    def output_hessian(self, z: Tensor, labels: Tensor | None = None, *, pairs: Pairs | None = None) -> OutputHessian:
        """The Hessian at raw outputs, with this loss's options; see :func:`contrastive_curvature.hessian.output`."""
        return OutputHessian.from_pairs(z, self.options, labels, pairs)

    def extra_repr(self) -> str:
        """The options, as they were given."""
        return (
            f"margin={self.margin}, negative_weight={self.negative_weight}, normalization={str(self.normalization)!r}, "
            f"distance={str(self.options.distance)!r}, pd_fix={str(self.options.pd_fix)!r}"
        )

    def _listed(self, u: Tensor, relation: EdgeRelation, shares: Shares) -> Tensor:
        i, j = relation.i, relation.j
        squared = (u[i] - u[j]).square().sum(1)
        attract = relation.positive * (shares.positive[i] + shares.positive[j]) / 2
        repel = relation.negative * (shares.negative[i] + shares.negative[j]) / 2
        return self._total(squared, attract, repel)

    def _all_pairs(self, u: Tensor, relation: Relation, shares: Shares) -> Tensor:
        if relation.n == 0:
            return u.sum()
        # In float64, since a data set has many pairs.
        total = u.new_zeros((), dtype=torch.float64)
        progress, started = Progress(None, _FASTER), time.monotonic()
        for rows, positive, negative in relation.row_blocks():
            progress.extrapolate(started, rows.start, relation.n, f"The loss over all pairs of {relation.n} points")
            squared = 2 - 2 * u[rows] @ u.T
            attract = positive * (shares.positive[rows].unsqueeze(1) + shares.positive) / 2
            repel = negative * (shares.negative[rows].unsqueeze(1) + shares.negative) / 2
            # Every unordered pair stands in the matrix twice.
            total = total + self._total(squared, attract, repel).double() / 2
        return total.to(u.dtype)

    def _total(self, squared: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        if self.margin is None:
            cost = -squared
        elif self.margin < LARGEST_DISTANCE:
            cost = torch.relu(self.margin**2 - squared)
        else:
            cost = self.margin**2 - squared
        return ((1 - self.negative_weight) * attract * squared + self.negative_weight * repel * cost).sum() / 2

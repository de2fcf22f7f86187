"""A softmax over one weight vector per class, optionally with a margin: normalised softmax, CosFace and ArcFace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature import validate, waiting
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.hessian.moments import MomentPart, Moments
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.relation import LabelRelation, Relation, check_labels, row_ranges


class ProxyLoss(CosineLoss):
    r"""Softmax of the scaled cosines between an embedding and one proxy (weight vector) per class.

    For an embedding with label y, with its cosines ``s_j`` to the C proxies and a margin at its own proxy:

    .. math::
        l = - \log \frac{e^{a \varphi(s_y)}}{e^{a \varphi(s_y)} + \sum_{j \ne y} e^{a s_j}}

    with the scale ``a`` and

    - ``softmax``: ``phi(s) = s``;
    - ``cosface``: ``phi(s) = s - m``;
    - ``arcface``: ``phi(s) = cos(theta + m)`` with the angle ``theta = arccos(s)`` to the own proxy. Beyond
      ``theta = pi - m``, where ``cos(theta + m)`` would rise again, ``phi(s) = s - m sin(m)``, as in
      pytorch-metric-learning.

    The curvature treats the proxies as constants, so ``pd_fix="full"`` and ``"fixed"`` are the same. ``"positive"``
    keeps the first-order part of the own proxy. The second-order part is positive semidefinite for ``softmax`` and
    ``cosface``; for ``arcface`` with a margin it can be indefinite, and the derivatives are infinite for an embedding
    on its own proxy.

    The same losses in pytorch-metric-learning, with its weights ``W`` of shape (D, C):

    - ``NormalizedSoftmaxLoss(temperature=t)``: ``ProxyLoss(W.T, 1 / t)``;
    - ``CosFaceLoss(margin=m, scale=a)``: ``ProxyLoss(W.T, a, m, "cosface")``;
    - ``ArcFaceLoss(margin=degrees, scale=a)``: ``ProxyLoss(W.T, a, math.radians(degrees), "arcface")``.

    Args:
        proxies: Weight vectors of any non-zero norm, shape (C, D), stored without normalisation. A parameter becomes a
            parameter of this module and is trained; any other tensor is copied into a buffer.
        scale: ``a``, positive.
        margin: ``m``: a cosine for ``cosface``; an angle in radians, at most pi, for ``arcface``; zero for ``softmax``.
        kind: ``"softmax"``, ``"arcface"`` or ``"cosface"``.
        reduction: ``"mean"`` over the embeddings, or ``"sum"``. A fit of a posterior multiplies the mean of every batch
            by its number of embeddings.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`. By default ``"psd_parts"``; ``"psd"`` for
            ``arcface`` with a margin.

    Raises:
        InputTypeError: The proxies are not a floating-point tensor.
        InputError: The proxies are malformed or a proxy is zero; an option is unknown or out of range.
        UnsupportedError: ``pd_fix="ggn"``, ``"ggn_fixed"`` or ``"psd_parts"`` for ``arcface`` with a margin.

    Source: Zhai and Wu, Classification is a strong baseline for deep metric learning, 2019 (``softmax``); Wang et al.,
    CosFace, 2018, Eq. 4; Deng et al., ArcFace, 2019, Eq. 3.
    """

    proxies: Tensor

    compares = "proxies"

    def __init__(
        self,
        proxies: Tensor,
        scale: float = 16.0,
        margin: float = 0.0,
        kind: str = "softmax",
        reduction: str = "mean",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str | None = None,
    ) -> None:
        validate.choice("kind", kind, ("softmax", "arcface", "cosface"))
        validate.choice("reduction", reduction, ("mean", "sum"))
        margin = validate.number("margin", margin)
        if kind == "softmax" and margin:
            raise InputError("margin", "0 for kind='softmax'", margin, "Use kind='cosface' or 'arcface'.")
        if kind == "arcface" and margin > math.pi:
            raise InputError("margin", "an angle of at most pi", margin, "Use math.radians for degrees.")
        convex = kind != "arcface" or margin == 0
        chosen = pd_fix if pd_fix is not None else PDFix.PSD_PARTS if convex else PDFix.PSD
        super().__init__(distance=distance, pd_fix=chosen)
        self.scale = validate.number("scale", scale, positive=True)
        self.margin, self.kind, self.convex = margin, kind, convex
        # Not named ``reduction``: hosts read this attribute of torch's losses and need a sum over points.
        self.averages = reduction == "mean"
        check_outputs(proxies, "proxies")
        if isinstance(proxies, nn.Parameter):
            self.proxies = proxies
        else:
            self.register_buffer("proxies", proxies.detach().clone())
        self._check_fix()

    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> LabelRelation:
        """See :meth:`CosineLoss.relate`; the labels are row numbers of the proxies."""
        classes, dim = self.proxies.shape
        if pairs is not None:
            raise InputError("pairs", "None", "pairs", "Points have no pairs here; pass their class labels.")
        if labels is None:
            raise InputError("labels", f"class labels in 0..{classes - 1}", "None")
        if z.shape[1] != dim:
            raise InputError("z", f"embeddings of {dim} numbers, like the proxies", f"{z.shape[1]} numbers")
        labels = check_labels(labels, len(z)).to(z.device)
        wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten()
        if len(wrong):
            got = f"the label {int(labels[wrong[0]])} of point {int(wrong[0])}"
            hint = "Every class has one row of proxies."
            raise InputError("labels", f"class labels in 0..{classes - 1}", got, hint)
        return LabelRelation(labels)

    def _at(self, u: Tensor, relation: LabelRelation) -> Tensor:
        return self.value(u, self.unit_proxies(u), relation.targets, self.weight(len(u)))

    def derivatives(self, relation: LabelRelation, u: Tensor, *, as_data: bool = False) -> ProxyDerivatives:
        """See :meth:`CosineLoss.derivatives`; ``as_data`` multiplies a mean by its number of embeddings, for a fit."""
        return ProxyDerivatives(self, relation.targets, u, 1.0 if as_data else self.weight(len(u)))

    def data_hessian(self, z: Tensor, relation: Relation, n_data: int | None = None) -> OutputHessian:
        """See :meth:`CosineLoss.data_hessian`; multiplies a mean by its number of embeddings."""
        return self.hessian_at(z, relation, as_data=True)

    def weight(self, count: int) -> float:
        """Return the factor of the sum over ``count`` embeddings."""
        return 1 / max(1, count) if self.averages else 1.0

    def unit_proxies(self, like: Tensor) -> Tensor:
        """Return the proxies on the unit sphere, (C, D), with dtype and device of the embeddings ``like``."""
        return normalize(check_outputs(self.proxies, "proxies").to(like))[0]

    def value(self, u: Tensor, proxies: Tensor, labels: Tensor, weight: float) -> Tensor:
        """Compute the loss of unit embeddings (N, D) and unit proxies (C, D), differentiable by autograd."""
        total = u.new_zeros((), dtype=torch.float64)
        for rows in row_ranges(len(u), len(proxies)):
            y = labels[rows]
            each = nn.functional.cross_entropy(self.logits(u[rows], proxies, y), y, reduction="none")
            total = total + each.double().sum()
        return (weight * total).to(u.dtype) + 0 * u.sum()

    def logits(self, u: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
        """Return ``a s_j``, and ``a phi(s_y)`` at the own proxy, shape (B, C); arguments as in :meth:`value`."""
        own = self._own_logit(u, proxies[labels])
        return self.scale * (u @ proxies.T).scatter(1, labels.unsqueeze(1), own.unsqueeze(1))

    def slopes(self, u: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``phi'`` and ``phi''`` in the cosine of unit embeddings and their own unit proxies, each (B,)."""
        cosine = (u * own).sum(1)
        one, zero = torch.ones_like(cosine), torch.zeros_like(cosine)
        if self.convex:
            return one, zero
        sine, near = _sine(u, own), cosine >= -math.cos(self.margin)
        first = math.cos(self.margin) + math.sin(self.margin) * cosine / sine
        return torch.where(near, first, one), torch.where(near, math.sin(self.margin) / sine**3, zero)

    def _own_logit(self, u: Tensor, own: Tensor) -> Tensor:
        """Return ``phi(s_y)``, shape (B,); arguments as in :meth:`slopes`."""
        cosine = (u * own).sum(1)
        if self.kind != "arcface" or self.convex:
            return cosine - self.margin
        rise, turn = math.sin(self.margin), math.cos(self.margin)
        return torch.where(cosine >= -turn, turn * cosine - rise * _sine(u, own), cosine - self.margin * rise)

    def config(self) -> dict[str, Any]:
        """Return the options, with this loss's own ``reduction`` instead of torch's attribute."""
        return {**super().config(), "reduction": "mean" if self.averages else "sum"}


def _sine(u: Tensor, own: Tensor) -> Tensor:
    """Return the sine of the angle between unit vectors (B, D), accurate at small angles, shape (B,)."""
    return (u - own).norm(dim=1) * (u + own).norm(dim=1) / 2


_SIGNS = (-1.0, 1.0, -1.0, 1.0, -1.0)


class ProxyDerivatives(CosineDerivatives):
    """Derivatives of a :class:`~contrastive_curvature.losses.proxy.ProxyLoss` between points and proxies ``w_j``.

    All derivatives between two points are zero. With the proxies, a point has ``y_ij = -dL/ds_ij`` and the second
    derivatives ``a^2 J (diag(p) - p p^T) J + a phi'' (p_y - 1) e_y
    e_y^T``, with the scale ``a`` and the diagonal matrix ``J`` of ``phi'`` at the own proxy and ones at the others. The
    first term makes the moment ``a^2`` times the variance of the vectors ``J_jj w_j`` under the softmax; this variance
    may be computed from any origin.

    Args:
        loss: The loss.
        labels: Numbers of the points' own proxies, shape (N,).
        u: Unit embeddings, shape (N, D).
        weight: Factor of the sum over points.
    """

    couples = False

    def __init__(self, loss: ProxyLoss, labels: Tensor, u: Tensor, weight: float) -> None:
        self.loss, self.labels, self.u, self.weight = loss, labels, u, weight
        self.n = self.anchors = len(u)
        self.fix = loss.pd_fix
        self.proxies = loss.unit_proxies(u).detach()

    @torch.no_grad()
    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`, with the proxies as the neighbours of every point."""
        degree, neighbors = self.u.new_zeros(self.n), torch.zeros_like(self.u)
        vectors = self.u.new_zeros(len(_SIGNS), *self.u.shape)
        bound = self.u.new_zeros(self.n)
        for here in row_ranges(self.n, len(self.proxies)):
            degree[here], neighbors[here], vectors[:, here], bound[here] = self._sums(here)
        bound += vectors.square().sum((0, 2))
        parts = [MomentPart(torch.arange(self.n, device=self.u.device), self._weigh, self.proxies)]
        moments = Moments(
            parts, waiting.sent(torch.tensor(_SIGNS, dtype=self.u.dtype, device="cpu"), self.u.device), vectors, bound
        )
        hint = "" if self.loss.convex else "With a margin on the angle, they are infinite on the own proxy."
        value = self.loss.value(self.u, self.proxies, self.labels, self.weight).double()
        return NodeSums(degree, neighbors, moments, value).checked(type(self.loss).__name__, hint)

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`; all zero."""
        first, last, _ = columns.indices(self.n)
        return self.u.new_zeros(stop - start, max(0, last - first)), None

    def _sums(self, here: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, for B points, sums of ``y`` (B,) and ``y w`` (B, D), vectors (5, B, D) and sums of weights (B,).

        The origin of the moments is the vector with the largest weight, whose share is then zero, so a concentrated
        softmax loses no digits.
        """
        scale, label, own = self.loss.scale, self.labels[here].unsqueeze(1), self.proxies[self.labels[here]]
        p, few, top = self._shares(here.start, here.stop)
        others, p_own = p.scatter(1, label, 0.0), p.gather(1, label)
        rest = others.sum(1, keepdim=True)
        first, second = (slope.unsqueeze(1) for slope in self.loss.slopes(self.u[here], own))
        # If the other proxies have no weight left, the loss is flat at any angle.
        first, second = first.masked_fill(rest == 0, 1.0), second.masked_fill(rest == 0, 0.0)

        kept = 0.0 if self.fix.second_only else self.weight * scale
        repel = 0.0 if self.fix.attracting_only else 1.0
        degree = kept * (first - repel) * rest
        neighbors = kept * (first * rest * own - repel * (others @ self.proxies))

        vector = first * own
        origin = torch.where(top == label, vector, self.proxies[top.squeeze(1)])
        size, mean = few.sum(1, keepdim=True), few @ self.proxies
        root = size.sqrt()
        safe = torch.where(size > 0, root, 1.0)
        vectors = [
            mean - size * origin + p_own * (vector - origin),
            torch.where(size > 0, root * origin - mean / safe, 0.0),
            mean / safe,
            p_own.sqrt() * (vector - origin),
            (second * rest / scale).sqrt() * own,
        ]
        factor = scale**2 * self.weight
        return degree.squeeze(1), neighbors, factor**0.5 * torch.stack(vectors), factor * size.squeeze(1)

    def _shares(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the softmax, the softmax without own and largest share, each (B, C), and the largest share's place."""
        labels = self.labels[start:stop]
        p = self.loss.logits(self.u[start:stop], self.proxies, labels).softmax(1)
        # Shares near the smallest representable number have lost their digits.
        p = p * (p > torch.finfo(p.dtype).tiny ** 0.75)
        top = p.argmax(1, keepdim=True)
        return p, p.scatter(1, labels.unsqueeze(1), 0.0).scatter(1, top, 0.0), top

    @torch.no_grad()
    def _weigh(self, start: int, stop: int) -> tuple[Tensor, None]:
        return self.loss.scale**2 * self.weight * self._shares(start, stop)[1], None

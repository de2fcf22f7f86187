"""The derivatives of a softmax over class proxies: every point sees the proxies, which are constants, and no point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.errors import expected
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS

if TYPE_CHECKING:
    from contrastive_curvature.losses.proxy import ProxyLoss

__all__ = ["ProxyDerivatives"]

_SIGNS = (-1.0, 1.0, -1.0, 1.0, -1.0)


@dataclass(frozen=True)
class _Block:
    """What is known of B points.

    Args:
        p: Softmax over the proxies, shape (B, C).
        own: Their own unit proxies, shape (B, D).
        label: Their labels, shape (B, 1).
        rest: ``1 - p_y``, as the sum of the others, shape (B, 1).
        first: ``phi'`` at the own proxy, shape (B, 1).
        second: ``phi''``, shape (B, 1).
    """

    p: Tensor
    own: Tensor
    label: Tensor
    rest: Tensor
    first: Tensor
    second: Tensor


class ProxyDerivatives(CosineDerivatives):
    """What the points of a :class:`~contrastive_curvature.losses.proxy.ProxyLoss` see of the proxies ``w_j``.

    Between points all is zero. With the proxies, a point has ``y_ij = -dL/ds_ij`` and the second derivatives
    ``a^2 J (diag(p) - p p^T) J + a phi'' (p_y - 1) e_y e_y^T``, with the scale ``a`` and the diagonal matrix ``J`` of
    ``phi'`` at the own proxy and ones at the others. The first term makes the moment ``a^2`` times the variance of the
    vectors ``J_jj w_j`` under the softmax, which may be counted from any origin.

    Args:
        loss: The loss.
        labels: Own proxies, shape (N,).
        u: Unit embeddings, shape (N, D).
        weight: By what the sum over points is multiplied.
    """

    def __init__(self, loss: ProxyLoss, labels: Tensor, u: Tensor, weight: float) -> None:
        self.loss, self.labels, self.u, self.weight = loss, labels, u, weight
        self.n = self.anchors = len(u)
        self.fix = loss.pd_fix
        self.proxies = loss.unit_proxies(u).detach()

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`, with the proxies as the neighbours of every point."""
        degree, neighbors = self.u.new_zeros(self.n), torch.zeros_like(self.u)
        vectors = self.u.new_zeros(len(_SIGNS), *self.u.shape)
        bound = self.u.new_zeros(self.n)
        for start, stop in self._ranges():
            block, here = self._block(start, stop), slice(start, stop)
            if not self.fix.second_only:
                degree[here], neighbors[here] = self._first_order(block)
            vectors[:, here], spread = self._vectors(block)
            bound[here] = spread.squeeze(1)
        bound += vectors.square().sum((0, 2))
        finite = degree.isfinite() & neighbors.isfinite().all(1) & bound.isfinite()
        if not bool(finite.all()):
            came = f"NaN or infinity at the points {(~finite).nonzero().flatten()[:5].tolist()}"
            wanted = f"finite derivatives in {self.u.dtype}"
            hint = "" if self.loss.convex else "With a margin on the angle, they are infinite on the own proxy."
            raise UnrepresentableError(expected(type(self.loss).__name__, wanted, came, hint))
        parts = [MomentPart(0, self.n, self._weigh, self.proxies)]
        moments = PairMoments(parts, self.u.new_tensor(_SIGNS), vectors, bound)
        return NodeSums(degree, neighbors, moments, self._value())

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`; all zero."""
        first, last, _ = columns.indices(self.n)
        return self.u.new_zeros(stop - start, max(0, last - first)), None

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`CosineDerivatives.matmul`; zero."""
        return torch.zeros_like(x)

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """See :meth:`CosineDerivatives.second_matmul`; nothing couples two points."""
        return None

    @torch.no_grad()
    def _value(self) -> Tensor:
        return self.loss.value(self.u, self.proxies, self.labels, self.weight).double()

    def _ranges(self) -> Iterator[tuple[int, int]]:
        step = max(1, BLOCK_ELEMENTS // len(self.proxies))
        for start in range(0, self.n, step):
            yield start, min(start + step, self.n)

    @torch.no_grad()
    def _block(self, start: int, stop: int) -> _Block:
        u, labels = self.u[start:stop], self.labels[start:stop]
        own, label = self.proxies[labels], labels.unsqueeze(1)
        p = self.loss.logits(u, self.proxies, labels).softmax(1)
        # Shares close to the smallest number there is have lost their digits.
        p = p * (p > torch.finfo(p.dtype).tiny ** 0.75)
        rest = p.scatter(1, label, 0.0).sum(1, keepdim=True)
        first, second = (slope.unsqueeze(1) for slope in self.loss.slopes(u, own))
        # Where the others have no weight left, the loss is flat, whatever the angle.
        flat = rest == 0
        return _Block(p, own, label, rest, first.masked_fill(flat, 1.0), second.masked_fill(flat, 0.0))

    def _first_order(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Sums of ``y`` (B,) and of ``y w`` (B, D) over the proxies."""
        size = self.weight * self.loss.scale
        attract = size * block.first * block.rest
        if self.fix.attracting_only:
            return attract.squeeze(1), attract * block.own
        others = block.p.scatter(1, block.label, 0.0) @ self.proxies
        return (size * (block.first - 1) * block.rest).squeeze(1), attract * block.own - size * others

    def _vectors(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Vectors of the moments, shape (5, B, D), and the sum of the weights that go with them, shape (B, 1).

        The origin is the vector of the largest weight, whose share is then zero: a concentrated softmax loses no
        digits.
        """
        few, top = self._others(block)
        mine = block.first * block.own
        origin = torch.where(top == block.label, mine, self.proxies[top.squeeze(1)])
        size, mean = few.sum(1, keepdim=True), few @ self.proxies
        p_own = block.p.gather(1, block.label)
        root = size.sqrt()
        safe = torch.where(size > 0, root, 1.0)
        out = [
            mean - size * origin + p_own * (mine - origin),
            torch.where(size > 0, root * origin - mean / safe, 0.0),
            mean / safe,
            p_own.sqrt() * (mine - origin),
            (block.second * block.rest / self.loss.scale).sqrt() * block.own,
        ]
        factor = self.loss.scale**2 * self.weight
        return factor**0.5 * torch.stack(out), factor * size

    def _others(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Softmax weights without the own and the largest one, (B, C), and where the largest is, (B, 1)."""
        top = block.p.argmax(1, keepdim=True)
        return block.p.scatter(1, block.label, 0.0).scatter(1, top, 0.0), top

    def _weigh(self, start: int, stop: int) -> Tensor:
        return self.loss.scale**2 * self.weight * self._others(self._block(start, stop))[0]

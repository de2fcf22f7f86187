"""The last linear layer ``z = W phi + b``, in closed form: no autodiff, and no Jacobian is ever formed.

Parameters are ordered as ``[W.flatten(), b]``, the order of ``nn.Linear.parameters()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS, KronFactors, Points, Pullback
from contrastive_curvature.options import Structure

__all__ = ["LastLayerPullback"]

_PAIR_OVERHEAD = 40
"""Making the product phi_i phi_j of a pair costs about as much memory traffic as this many multiply-adds."""

_CHUNK_ELEMENTS = 2**21
"""Numbers in a temporary product of features; more would leave the cache, and for a data set fill the memory."""


class LastLayerPullback(Pullback):
    """Weight and bias of the linear layer that makes the raw outputs; the context is its input ``phi`` (N, F).

    Args:
        encoder: The analysed encoder, in evaluation mode.

    Raises:
        UnsupportedError: The encoder has no such layer.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder: Encoder = encoder
        layer = encoder.require_last_layer()
        self.bias = layer.bias is not None
        self.n_params = layer.weight.numel() + (layer.out_features if self.bias else 0)

    def named_sizes(self) -> list[tuple[str, int]]:
        """See :meth:`Pullback.named_sizes`."""
        layer = self.encoder.require_last_layer()
        prefix = f"{self.encoder.last_layer_name}." if self.encoder.last_layer_name else ""
        return [(prefix + name, p.numel()) for name, p in layer.named_parameters()]

    def input_sizes(self, context: Any) -> dict[str, Tensor]:
        """See :meth:`Pullback.input_sizes`; the context is what the layer takes in."""
        return {self.encoder.last_layer_name or "": context.double().square().sum(1)}

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        with torch.no_grad():
            return self.encoder.features(x)

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return context[rows]

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        weight = torch.einsum("nmd,nf->nmdf", cotangents, context).flatten(2)
        return torch.cat([weight, cotangents], dim=2) if self.bias else weight

    def _block_diag(self, points: Points, blocks: NodeBlocks) -> Tensor:
        m, phi = blocks.diagonal(), points.context
        out = m.new_zeros(m.shape[1], phi.shape[1])
        step = max(1, _CHUNK_ELEMENTS // max(1, phi.shape[1]))
        for start in range(0, phi.shape[0], step):
            rows = slice(start, start + step)
            out.addmm_(m[rows].T, phi[rows].square())
        return torch.cat([out.flatten(), m.sum(0)]) if self.bias else out.flatten()

    def _block_full(self, points: Points, blocks: NodeBlocks) -> Tensor:
        phi = self._extended(points.context)
        (n, width), dim = phi.shape, points.u.shape[1]
        out = phi.new_zeros(dim * dim, width * width)
        step = max(1, JACOBIAN_ELEMENTS // max(1, width * width, dim * dim))
        for start in range(0, n, step):
            rows = slice(start, start + step)
            outer = (phi[rows].unsqueeze(2) * phi[rows].unsqueeze(1)).flatten(1)
            out += blocks[rows].dense().flatten(1).T @ outer
        by_layer = out.view(dim, dim, width, width).permute(0, 2, 1, 3).reshape(dim * width, dim * width)
        order = torch.arange(dim * width, device=phi.device).view(dim, width)
        if self.bias:
            order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
        return by_layer[order.flatten()][:, order.flatten()]

    def cross_term(self, rows: Points, columns: Points, y: Tensor, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`.

        The diagonal, for entry (k, f), is the sum over i and j of ``B_ij (1 - u_ik^2 - u_jk^2 + C_ij u_ik u_jk) phi_if
        phi_jf`` with ``B = y / (n_i n_j)`` and ``C = u_i . u_j``; by points for few outputs, by pairs for many.
        """
        if structure is not Structure.DIAG:
            return super().cross_term(rows, columns, y, structure)
        if not len(rows) or not len(columns):
            return self._zeros(rows.u, structure)
        symmetric = rows is columns
        pairs = (y.triu(1) if symmetric else y).nonzero()
        dim = rows.u.shape[1]
        by_points = dim * y.numel() <= pairs.shape[0] * (dim + _PAIR_OVERHEAD)
        b = y / (rows.n.unsqueeze(1) * columns.n)
        left, right = self._extended(rows.context), self._extended(columns.context)
        if by_points:
            out = _cross_by_points(rows.u, columns.u, b, left, right)
        else:
            out = _cross_by_pairs(rows.u, columns.u, b, left, right, pairs)
            if symmetric:
                out = 2 * out + _cross_itself(rows.u, b, left)
        return torch.cat([out[:, :-1].flatten(), out[:, -1]]) if self.bias else out.flatten()

    def tile_size(self, structure: Structure) -> int:
        """See :meth:`Pullback.tile_size`; without Jacobians only the pair weights are held."""
        return 2048 if structure is Structure.DIAG else super().tile_size(structure)

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`: ``[[G (D, D), A (F, F)]]``, and ``[G]`` for the bias."""
        g = blocks.dense().sum(0)
        a = points.context.T @ points.context / n_data
        return [[g, a], [g.clone()]] if self.bias else [[g, a]]

    def class_sums(self, points: Points, index: Tensor, n_classes: int) -> Tensor:
        """See :meth:`Pullback.class_sums`."""
        phi = self._extended(points.context) / points.n.unsqueeze(1)
        dim = points.u.shape[1]
        out = points.u.new_zeros(n_classes, dim, self.n_params)
        for label in index.unique().tolist():
            mine = index == label
            u, f = points.u[mine], phi[mine]
            # sum_i (I - u_i u_i^T) (x) phi_i
            sums = -torch.einsum("nk,nd,nf->kdf", u, u, f)
            sums.diagonal(dim1=0, dim2=1).add_(f.sum(0).unsqueeze(1))
            flat = torch.cat([sums[..., :-1].flatten(1), sums[..., -1]], dim=1) if self.bias else sums.flatten(1)
            out[label] += flat
        return out

    def _extended(self, phi: Tensor) -> Tensor:
        return torch.cat([phi, torch.ones_like(phi[:, :1])], dim=1) if self.bias else phi


def _cross_by_points(u_r: Tensor, u_c: Tensor, b: Tensor, phi_r: Tensor, phi_c: Tensor) -> Tensor:
    """One quadratic form ``phi_f^T M_k phi_f`` an output, O(R C F D), for few outputs. Shape (D, F)."""
    out = phi_r.new_empty(u_r.shape[1], phi_r.shape[1])
    c = u_r @ u_c.T
    for k in range(u_r.shape[1]):
        x, y = u_r[:, k, None], u_c[:, k]
        m = b * (c * (x * y) + (1 - x.square() - y.square()))
        out[k] = (m @ phi_c).mul_(phi_r).sum(0)
    return out


def _cross_by_pairs(u_r: Tensor, u_c: Tensor, b: Tensor, phi_r: Tensor, phi_c: Tensor, pairs: Tensor) -> Tensor:
    """One (D, K) x (K, F) product over the pairs of non-zero weight, in chunks. Shape (D, F)."""
    out = phi_r.new_zeros(u_r.shape[1], phi_r.shape[1])
    step = max(1, _CHUNK_ELEMENTS // max(u_r.shape[1], phi_r.shape[1]))
    for i, j in (chunk.unbind(1) for chunk in pairs.split(step)):
        u_i, u_j = u_r[i], u_c[j]
        product = u_i * u_j
        coefficient = product * product.sum(1, keepdim=True)
        coefficient += 1
        coefficient -= u_i.square_()
        coefficient -= u_j.square_()
        coefficient *= b[i, j].unsqueeze(1)
        out.addmm_(coefficient.T, phi_r[i] * phi_c[j])
    return out


def _cross_itself(u: Tensor, b: Tensor, phi: Tensor) -> Tensor:
    """The pairs of a point with itself, where a tile has them. Shape (D, F)."""
    weight = b.diagonal()
    if not bool(weight.any()):
        return u.new_zeros(())
    return (weight.unsqueeze(1) * (1 - u.square())).T @ phi.square()

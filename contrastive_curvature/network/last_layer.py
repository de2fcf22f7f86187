"""The last linear layer ``z = W phi + b``, in closed form: no autodiff, and no Jacobian is ever formed.

Parameters are ordered as ``[W.flatten(), b]``, the order of ``nn.Linear.parameters()``.

A sketch of the inputs' second moments ``A`` (F, F) is the product of ``A`` with a fixed test matrix, and the trace of
``A``. Both are linear in ``A``, so sketches of batches, data sets and discounted sums add up like the matrices. No (F,
F) matrix is formed if the sketch is smaller. The leading eigenvectors are recovered by
:mod:`contrastive_curvature.structures.nystrom`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS, KronFactors, Pullback, full_precision
from contrastive_curvature.pairs.relation import chunks

MOST_RANK = 64
"""Largest rank that is chosen from the spectrum, above :data:`EXACT_WIDTH` (``docs/defaults.md``)."""

EXACT_WIDTH = 2048
"""Up to so many features all eigenvectors are kept, which takes a few seconds. Small eigenvalues count: on 512 features
of faces and 256 of sentences, rank 64 ranks worse than all (``docs/defaults.md``)."""

_SPARE = 8

_PAIR_OVERHEAD = 40
"""Making the product phi_i phi_j of a pair costs about as much memory traffic as this many multiply-adds."""

_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 2**19, 2**21
"""Numbers in a temporary product of features. More leave a CPU's cache, and the system takes the memory back after
every chunk: listed pairs then take twice as long. On a GPU, starting a small product takes longer than the product."""


class LastLayerPullback(Pullback):
    """Weight and bias of the linear layer that computes the raw outputs; the context is its input ``phi`` (N, F).

    Args:
        encoder: The analysed encoder, in evaluation mode.
        sketch: Number of columns of a sketch (:func:`sketch_moment`) that replaces the input factor in Kronecker pairs;
            ``None`` keeps the factor itself.
    """

    def __init__(self, encoder: Encoder, sketch: int | None = None) -> None:
        self.encoder = encoder
        self.sketch = sketch
        layer = encoder.require_last_layer()
        self.bias = layer.bias is not None
        self.n_params = layer.weight.numel() + (layer.out_features if self.bias else 0)

    @override
    def named_sizes(self) -> list[tuple[str, int]]:
        layer = self.encoder.require_last_layer()
        prefix = f"{self.encoder.last_layer_name}." if self.encoder.last_layer_name else ""
        return [(prefix + name, p.numel()) for name, p in layer.named_parameters()]

    @override
    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        with torch.no_grad():
            return self.encoder.forward_with_features(x)

    @override
    def slice_context(self, context: Any, rows: slice) -> Any:
        return context[rows]

    @override
    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        weight = torch.einsum("nmd,nf->nmdf", cotangents, context).flatten(2)
        return torch.cat([weight, cotangents], dim=2) if self.bias else weight

    @override
    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        z, phi = self.forward(x)
        dim = z.shape[1]
        weight, bias = v[: dim * phi.shape[1]].view(dim, -1), v[dim * phi.shape[1] :]
        moved = phi @ weight.T
        return z, moved + bias if self.bias else moved

    @override
    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        return self._flat(cotangents.T @ self._extended(self.forward(x)[1]))

    @full_precision
    @override
    def diag(self, context: Any, blocks: Blocks) -> Tensor:
        m, width = blocks.diagonal(), context.shape[1]
        out = m.new_zeros(m.shape[1], width)
        for rows in chunks(len(context), _chunk_elements(m) // max(1, width)):
            out.addmm_(m[rows].T, context[rows].square())
        return torch.cat([out.flatten(), m.sum(0)]) if self.bias else out.flatten()

    @full_precision
    @override
    def full(self, context: Any, blocks: Blocks) -> Tensor:
        phi = self._extended(context)
        (n, width), dim = phi.shape, blocks.u.shape[1]
        out = phi.new_zeros(dim * dim, width * width)
        for rows in chunks(n, JACOBIAN_ELEMENTS // max(1, width * width, dim * dim)):
            outer = (phi[rows].unsqueeze(2) * phi[rows].unsqueeze(1)).flatten(1)
            out += blocks[rows].dense().flatten(1).T @ outer
        # Axes: output and input of the column, output and input of the row.
        by_entry = out.view(dim, dim, width, width).permute(1, 3, 0, 2)
        return self._flat(self._flat(by_entry).movedim(-1, 0)).contiguous()

    @full_precision
    def cross_diag(self, rows: Any, columns: Any, cross: CrossBlocks) -> Tensor:
        """See :meth:`Pullback.cross_diag`.

        Entry (k, f) is ``sum_ij H_ij[k, k] phi_if phi_jf``; computed by points for few outputs, by pairs for many.
        """
        dim = cross.u_rows.shape[1]
        if not cross.y.numel():
            return cross.u_rows.new_zeros(self.n_params)
        pairs = cross.pairs()
        if dim * cross.y.numel() <= pairs.shape[0] * (dim + _PAIR_OVERHEAD):
            weight, bias = _cross_by_points(cross, rows, columns)
        else:
            weight, bias = _cross_by_pairs(cross, rows, columns, pairs)
        return torch.cat([weight.flatten(), bias]) if self.bias else weight.flatten()

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """See :meth:`Pullback.output_covariance`; the outputs are independent."""
        return torch.diag_embed(diag_last_layer_variance(context, variance, self.encoder.dim))

    def tile_diag(self, dim: int) -> int:
        """See :meth:`Pullback.tile_diag`; without Jacobians only the pair weights are stored."""
        del dim
        return 2048

    @full_precision
    def kron(self, context: Any, blocks: Blocks) -> KronFactors:
        """See :meth:`Pullback.kron`: ``[[G (D, D), sum phi phi^T (F, F)]]``, and ``[G]`` for the bias.

        A sketch of S columns replaces the sum by its product with the test matrix, (F, S), and its trace, (1,).
        """
        g = blocks.total()
        moment = [context.T @ context] if self.sketch is None else sketch_moment(context, self.sketch)
        return [[g, *moment], [g.clone()]] if self.bias else [[g, *moment]]

    @full_precision
    @override
    def class_sums(self, context: Any, cotangents: Tensor, index: Tensor, n_classes: int) -> Tensor:
        phi = self._extended(context)
        out = phi.new_zeros(n_classes, cotangents.shape[1], self.n_params)
        for label in index.unique().tolist():
            inside = index == label
            out[label] += self._flat(torch.einsum("nrd,nf->rdf", cotangents[inside], phi[inside]))
        return out

    def _extended(self, phi: Tensor) -> Tensor:
        """Append a one for the bias to the features, (N, F + 1)."""
        return torch.cat([phi, torch.ones_like(phi[:, :1])], dim=1) if self.bias else phi

    def _flat(self, by_output: Tensor) -> Tensor:
        """Flatten entries (..., D, F + 1), the bias last, into the order of the parameters (..., P)."""
        if not self.bias:
            return by_output.flatten(-2)
        return torch.cat([by_output[..., :-1].flatten(-2), by_output[..., -1]], dim=-1)


@full_precision
def diag_last_layer_variance(phi: Tensor, variance: Tensor, dim: int) -> Tensor:
    """Return ``v_k = sum_f var(W_kf) phi_f^2 + var(b_k)`` (B, D), for variances (P,) of ``[W.flatten(), b]``."""
    weights = dim * phi.shape[1]
    # An encoder that was converted after the fit has features of another dtype.
    variance = variance.to(phi.dtype)
    out = phi.square() @ variance[:weights].view(dim, -1).T
    return out + variance[weights:] if variance.numel() > weights else out


def _chunk_elements(like: Tensor) -> int:
    return _GPU_CHUNK_ELEMENTS if like.is_cuda else _CHUNK_ELEMENTS


def _cross_by_points(cross: CrossBlocks, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quadratic forms ``phi_f^T M_k phi_f`` (D, F) for every output k, and the sum of ``M_k``, (D,).

    Takes O(R C F D); for few outputs.
    """
    out = left.new_empty(cross.u_rows.shape[1], left.shape[1])
    total = left.new_empty(len(out))
    cosine = cross.cosine()
    for k in range(len(out)):
        entries = cross.axis(k, cosine)
        out[k], total[k] = (entries @ right).mul_(left).sum(0), entries.sum()
    return out, total


def _cross_by_pairs(cross: CrossBlocks, left: Tensor, right: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same sums by a (D, K) x (K, F) product over the pairs with a block, in chunks."""
    out = left.new_zeros(cross.u_rows.shape[1], left.shape[1])
    total = left.new_zeros(len(out))
    step = max(1, _chunk_elements(out) // max(out.shape))
    for i, j in (chunk.unbind(1) for chunk in pairs.split(step)):
        entries = cross.diagonals(i, j)
        out.addmm_(entries.T, left[i].mul_(right[j]))
        total += entries.sum(0)
    if not cross.symmetric:
        return out, total
    itself = cross.itself()
    if itself is None:
        return out.mul_(2), total.mul_(2)
    return out.mul_(2).addmm_(itself.T, left.square()), total.mul_(2).add_(itself.sum(0))


def sketch_size(width: int, rank: int | None) -> int:
    """Return the number of columns of a sketch: twice the rank plus a few, as Tropp et al. (2017) advise.

    The number is F, for the matrix itself, if the sketch would need at least F / 2 columns, or if there is no rank and
    F is at most :data:`EXACT_WIDTH`.
    """
    if rank is None and width <= EXACT_WIDTH:
        return width
    size = 2 * (MOST_RANK if rank is None else rank) + _SPARE
    return width if 2 * size >= width else size


@functools.lru_cache(maxsize=4)
def sketch_matrix(width: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the test matrix (F, size) of a sketch: independent Gaussian entries of variance 1 / F, always the same.

    The entries are drawn in float64 on the CPU and rounded, so that devices agree; do not change the result in place.
    """
    # Cached, because drawing a million numbers takes longer than their product in a training step.
    with torch.inference_mode(mode=False):
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(width, size, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn / width**0.5).to(dtype=dtype, device=device)


@full_precision
def sketch_moment(features: Tensor, size: int) -> list[Tensor]:
    """Sketch ``features^T features`` (F, F) in ``size`` columns.

    Returns:
        The product with the test matrix, (F, size), or the matrix itself if ``size`` is F; and the trace, shape (1,).
    """
    width = features.shape[1]
    trace = features.square().sum().reshape(1)
    if size == width:
        return [features.T @ features, trace]
    return [features.T @ (features @ sketch_matrix(width, size, features.dtype, features.device)), trace]

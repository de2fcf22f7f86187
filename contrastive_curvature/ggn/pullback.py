"""Pull the output Hessian back through a network: ``J^T H J`` with the Jacobian of the RAW outputs.

A pullback knows one thing, the per-point vector-Jacobian product; every structure is written on top of it once. The
last linear layer replaces what has a closed form (:mod:`contrastive_curvature.ggn.last_layer`).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.encoder import Encoder, Inputs, input_length, slice_inputs
from contrastive_curvature.node_blocks import NodeBlocks
from contrastive_curvature.options import Structure
from contrastive_curvature.sphere import project_tangent

__all__ = ["JACOBIAN_ELEMENTS", "ModulePullback", "Points", "Pullback"]

JACOBIAN_ELEMENTS = 2**25
"""Numbers that a chunk of Jacobians may hold: 128 MiB in float32."""


class Points:
    """N points as a pullback sees them.

    Args:
        context: What the pullback's ``forward`` returned beside the outputs.
        u: Unit embeddings, shape (N, D).
        n: Norms of the raw outputs, shape (N,).
    """

    def __init__(self, context: Any, u: Tensor, n: Tensor) -> None:
        self.context = context
        self.u = u
        self.n = n

    def __len__(self) -> int:
        return self.u.shape[0]

    def tangents(self, columns: slice) -> Tensor:
        """Cotangents ``P_i e_k / n_i`` for some output axes k, shape (N, K, D)."""
        dim = self.u.shape[1]
        axes = torch.eye(dim, dtype=self.u.dtype, device=self.u.device)[:, columns]
        return (project_tangent(self.u, axes.expand(len(self), *axes.shape)) / self.n.view(-1, 1, 1)).mT


class Pullback(ABC):
    """Per-point vector-Jacobian products of a network, and the curvatures that follow.

    Attributes:
        n_params: Number P of parameters.
        width: How many numbers one product needs while it is made; at least P.
    """

    n_params: int

    @property
    def width(self) -> int:
        """See the class."""
        return self.n_params

    @abstractmethod
    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """Raw outputs (N, D) without a graph, and the context that the products need."""

    @abstractmethod
    def slice_context(self, context: Any, rows: slice) -> Any:
        """The context of some of the points."""

    @abstractmethod
    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """``J_i^T v_im`` for every point.

        Args:
            context: Of N points.
            cotangents: ``v``, shape (N, M, D).

        Returns:
            Shape (N, M, P).
        """

    def part(self, points: Points, rows: slice) -> Points:
        """Some of the points."""
        return Points(self.slice_context(points.context, rows), points.u[rows], points.n[rows])

    def block_term(self, points: Points, blocks: NodeBlocks, structure: Structure) -> Tensor:
        """``sum_i J_i^T H_ii J_i``: its diagonal (P,) or the whole (P, P)."""
        return self._block_diag(points, blocks) if structure is Structure.DIAG else self._block_full(points, blocks)

    def cross_term(self, rows: Points, columns: Points, y: Tensor, structure: Structure) -> Tensor:
        """``sum_ij y_ij A_i^T A_j`` with ``A_i = P_i J_i / n_i``, for rows i and columns j: its diagonal or the whole.

        Args:
            rows: R points.
            columns: C points; may be the same object.
            y: Pair weights, shape (R, C).
            structure: ``diag`` or ``full``.

        Returns:
            Shape (P,) or (P, P). Only the sum over all tiles of a symmetric ``Y`` has a meaning.
        """
        out = self._zeros(rows.u, structure)
        for axes in self._axis_chunks(max(len(rows), len(columns)), rows.u.shape[1]):
            right = self.vjp(columns.context, columns.tangents(axes))
            left = right if rows is columns else self.vjp(rows.context, rows.tangents(axes))
            weighted = torch.einsum("ij,jkp->ikp", y, right)
            if structure is Structure.DIAG:
                out += torch.einsum("ikp,ikp->p", left, weighted)
            else:
                out += left.flatten(0, 1).T @ weighted.flatten(0, 1)
        return out

    def class_sums(self, points: Points, index: Tensor, n_classes: int) -> Tensor:
        """``sum_{i in class} A_i``, shape (n_classes, D, P)."""
        dim = points.u.shape[1]
        out = points.u.new_zeros(n_classes, dim, self.n_params)
        for rows, axes in self._chunks(len(points), dim):
            part = self.part(points, rows)
            out[:, axes].index_add_(0, index[rows], self.vjp(part.context, part.tangents(axes)))
        return out

    def tile_size(self, structure: Structure) -> int:
        """How many points a tile of the cross term may have on each side."""
        return max(1, JACOBIAN_ELEMENTS // max(1, self.width))

    def _zeros(self, like: Tensor, structure: Structure) -> Tensor:
        shape = (self.n_params,) if structure is Structure.DIAG else (self.n_params, self.n_params)
        return like.new_zeros(shape)

    def _block_diag(self, points: Points, blocks: NodeBlocks) -> Tensor:
        dim = points.u.shape[1]
        out = self._zeros(points.u, Structure.DIAG)
        eye = torch.eye(dim, dtype=points.u.dtype, device=points.u.device)
        for rows, axes in self._chunks(len(points), dim):
            context = self.slice_context(points.context, rows)
            unit = eye[axes].expand(len(points.u[rows]), -1, -1)
            jacobian = self.vjp(context, unit)
            if axes == slice(0, dim):
                curved = blocks[rows].matmul(jacobian)
            else:
                # Not all rows of the Jacobian fit at once: row k of H J is the product with row k of H.
                curved = self.vjp(context, blocks[rows].matmul(unit.mT).mT)
            out += torch.einsum("ikp,ikp->p", jacobian, curved)
        return out

    def _block_full(self, points: Points, blocks: NodeBlocks) -> Tensor:
        dim = points.u.shape[1]
        out = self._zeros(points.u, Structure.FULL)
        eye = torch.eye(dim, dtype=points.u.dtype, device=points.u.device)
        step = max(1, JACOBIAN_ELEMENTS // max(1, self.width * dim))
        for start in range(0, len(points), step):
            rows = slice(start, min(start + step, len(points)))
            unit = eye.expand(rows.stop - start, dim, dim)
            jacobian = self.vjp(self.slice_context(points.context, rows), unit)
            out += jacobian.flatten(0, 1).T @ blocks[rows].matmul(jacobian).flatten(0, 1)
        return out

    def _axis_chunks(self, n: int, dim: int) -> Iterator[slice]:
        step = min(dim, max(1, JACOBIAN_ELEMENTS // max(1, n * self.width)))
        for start in range(0, dim, step):
            yield slice(start, min(start + step, dim))

    def _chunks(self, n: int, dim: int) -> Iterator[tuple[slice, slice]]:
        """Points by output axes, such that a chunk of Jacobian rows stays within bounds."""
        step = max(1, JACOBIAN_ELEMENTS // max(1, self.width * dim))
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            for axes in self._axis_chunks(rows.stop - start, dim):
                yield rows, axes


class ModulePullback(Pullback):
    """All trainable parameters of any module, or some of their entries, by ``torch.func``.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        indices: Entries of the flattened trainable parameters, for a subnetwork; ``None`` takes all.
        only: Names of the parameters to take; ``None`` takes all trainable ones. Not together with ``indices``.
    """

    def __init__(self, encoder: Encoder, indices: Tensor | None = None, only: set[str] | None = None) -> None:
        self.encoder = encoder
        trainable = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        if indices is not None:
            only, indices = _touched(trainable, indices)
        self.params = {name: p.detach() for name, p in trainable.items() if only is None or name in only}
        rest = {name: p.detach() for name, p in encoder.named_parameters() if name not in self.params}
        self.constants = {**rest, **dict(encoder.named_buffers())}
        self.indices = indices
        self._vectorizes = True
        self._width = sum(p.numel() for p in self.params.values())
        self.n_params = self._width if indices is None else indices.numel()

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self._width

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself."""
        with torch.no_grad():
            return self.encoder(x), x

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return slice_inputs(context, rows)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        if not cotangents.shape[0]:
            return cotangents.new_zeros(0, cotangents.shape[1], self.n_params)
        if self._vectorizes:
            try:
                flat = self._vjp_vectorized(context, cotangents)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # torch.func.vmap fails in many words; the loop below either works or raises the encoder's own error.
                flat = self._vjp_one_by_one(context, cotangents)
                self._vectorizes = False
                reason = str(error).splitlines()[0]
                warnings.warn(f"Jacobians are taken point by point, which is slow: {reason}", stacklevel=2)
        else:
            flat = self._vjp_one_by_one(context, cotangents)
        return flat if self.indices is None else flat[..., self.indices]

    def outputs_at(self, x: Inputs, theta: Tensor) -> Tensor:
        """Raw outputs (N, D) at other values (P,) of all trainable parameters."""
        return self._function(x)(self._split(theta))

    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        """Raw outputs (N, D) and ``J v`` (N, D) for a direction ``v`` (P,) in all trainable parameters."""
        z, moved = torch.func.jvp(self._function(x), (self.params,), (self._split(v),), has_aux=False)[:2]
        return z, moved

    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """``sum_i J_i^T v_i`` for cotangents (N, D): one reverse pass, shape (P,)."""
        pull = torch.func.vjp(self._function(x), self.params)[1]
        return torch.cat([g.flatten() for g in pull(cotangents)[0].values()])

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([p.numel() for p in self.params.values()])
        return {name: piece.view_as(p) for (name, p), piece in zip(self.params.items(), pieces, strict=True)}

    def _vjp_vectorized(self, context: Any, cotangents: Tensor) -> Tensor:
        n = input_length(context)
        if isinstance(context, Mapping):
            batched = {k: isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == n for k, v in context.items()}
            tensors = {k: v for k, v in context.items() if batched[k]}
            others = {k: v for k, v in context.items() if not batched[k]}
        else:
            tensors, others = {"x": context}, {}

        def one(point: dict[str, Tensor], v: Tensor) -> Tensor:
            single = {k: t.unsqueeze(0) for k, t in point.items()}
            x = {**single, **others} if isinstance(context, Mapping) else single["x"]
            return self._flat_vjp(x, v.unsqueeze(1))

        return torch.func.vmap(one)(tensors, cotangents)

    def _vjp_one_by_one(self, context: Any, cotangents: Tensor) -> Tensor:
        """For modules that cannot be vectorised over points; as exact, and slower."""
        rows = range(cotangents.shape[0])
        return torch.stack(
            [
                torch.stack([self._flat_vjp_single(slice_inputs(context, slice(i, i + 1)), v) for v in cotangents[i]])
                for i in rows
            ]
        )

    def _function(self, x: Inputs) -> Any:
        return lambda params: torch.func.functional_call(self.encoder, {**params, **self.constants}, (x,))

    def _flat_vjp(self, x: Inputs, v: Tensor) -> Tensor:
        pull = torch.func.vjp(self._function(x), self.params)[1]
        (gradients,) = torch.func.vmap(pull)(v)
        return torch.cat([g.flatten(1) for g in gradients.values()], dim=1)

    def _flat_vjp_single(self, x: Inputs, v: Tensor) -> Tensor:
        params = {k: p.clone().requires_grad_() for k, p in self.params.items()}
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            out = self._function(x)(params)
            gradients = torch.autograd.grad(
                out, list(params.values()), v.unsqueeze(0), allow_unused=True, create_graph=keep_graph
            )
        zipped = zip(gradients, params.values(), strict=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zipped])


def _touched(params: dict[str, nn.Parameter], indices: Tensor) -> tuple[set[str], Tensor]:
    """Names of the parameters that hold some of the flat indices, and the indices within those alone."""
    names, moved, start, kept = set(), torch.empty_like(indices), 0, 0
    for name, p in params.items():
        mine = (indices >= start) & (indices < start + p.numel())
        if bool(mine.any()):
            moved[mine] = indices[mine] - start + kept
            names.add(name)
            kept += p.numel()
        start += p.numel()
    return names, moved

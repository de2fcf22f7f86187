"""Pull the output Hessian back through a network: ``J^T H J`` with the Jacobian of the RAW outputs.

A pullback knows one thing, the per-point vector-Jacobian product; every structure is written on top of it once. The
last linear layer replaces what has a closed form (:mod:`contrastive_curvature.network.last_layer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.threads import watched
from contrastive_curvature.options import Structure

__all__ = ["JACOBIAN_ELEMENTS", "KronFactors", "Points", "Pullback", "own_name"]

JACOBIAN_ELEMENTS = 2**25
"""Numbers that a chunk of Jacobians may hold: 128 MiB in float32."""


def own_name(name: str) -> str:
    """The name that a parameter of an analysed encoder has in the user's model."""
    return name.removeprefix("model.")


KronFactors = list[list[Tensor]]
"""One entry a parameter, in the order of ``model.parameters()``: ``[G, A]`` for a matrix, ``[block]`` for a vector; the
format of laplace-torch's ``Kron``."""


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
        encoder: The analysed encoder, whose names messages use; ``None`` where there is none.
    """

    n_params: int
    encoder: Encoder | None = None

    @property
    def width(self) -> int:
        """See the class."""
        return self.n_params

    def named_sizes(self) -> list[tuple[str, int]]:
        """Name and number of entries of every parameter, in order; those of the user's model."""
        if self.encoder is None:
            return [("parameters", self.n_params)]
        return [(own_name(name), p.numel()) for name, p in self.encoder.named_parameters() if p.requires_grad]

    def parameter_name(self, number: int) -> str:
        """Name of a parameter by its number; of all together, where a pullback of the user's has no names."""
        names = [name for name, _ in self.named_sizes()]
        return names[number] if number < len(names) else names[0]

    def parameter_at(self, position: int) -> str:
        """Name of the parameter that an entry of the flat vector (P,) belongs to."""
        for name, size in self.named_sizes():
            if position < size:
                return name
            position -= size
        msg = f"there is no entry {position}"
        raise IndexError(msg)

    def input_sizes(self, context: Any) -> dict[str, Tensor]:
        """Sums of squares (N,), in float64, of what every layer with a matrix takes in of each point, by its name."""
        if self.encoder is None:
            return {}
        names = {
            id(module): own_name(name)
            for name, module in self.encoder.named_modules()
            if any(p.ndim > 1 and p.requires_grad for p in module.parameters(recurse=False))
        }
        sizes: dict[str, Tensor] = {}
        n = input_length(context)

        def note(module: nn.Module, args: tuple[Any, ...], _: dict[str, Any]) -> None:
            a = args[0] if args else None
            # Whose rows are not the points, as of tokens in a list, cannot be told apart.
            if isinstance(a, Tensor) and a.is_floating_point() and a.ndim and a.shape[0] == n:
                size = a.detach().double().reshape(n, -1).square().sum(1)
                name = names[id(module)]
                sizes[name] = sizes[name] + size if name in sizes else size

        layers = [module for module in self.encoder.modules() if id(module) in names]
        with watched(layers, before=note), torch.no_grad():
            self.encoder(context)
        return sizes

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

    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        """Raw outputs (N, D) and ``J v`` (N, D) for a direction ``v`` (P,); by default from the Jacobians."""
        z, context = self.forward(x)
        moved = torch.empty_like(z)
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        for rows, axes in self._chunks(*z.shape):
            part = self.slice_context(context, rows)
            moved[rows, axes] = self.vjp(part, eye[axes].expand(rows.stop - rows.start, -1, -1)) @ v
        return z, moved

    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """``sum_i J_i^T v_i`` for cotangents (N, D), shape (P,); by default from one product a point."""
        _, context = self.forward(x)
        out = cotangents.new_zeros(self.n_params)
        for rows, _ in self._chunks(cotangents.shape[0], 1):
            out += self.vjp(self.slice_context(context, rows), cotangents[rows].unsqueeze(1)).sum((0, 1))
        return out

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

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """Kronecker factors of a set of points (:mod:`contrastive_curvature.ggn.kron`); those of batches add up.

        Args:
            points: N points.
            blocks: Their Hessian blocks.
            n_data: Number of points over which the input factors are averaged.

        Returns:
            The factors.

        Raises:
            UnsupportedError: These parameters have none.
        """
        msg = "structure 'kron': a subnetwork has no Kronecker factors. Use the structure 'diag' or 'full'."
        raise UnsupportedError(msg)

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

"""From the output Hessian to the curvature of the parameters: ``J^T H J`` with the Jacobian of the RAW outputs.

A pullback only needs the per-point vector-Jacobian product; the methods for the structures
(:mod:`contrastive_curvature.structures`) are built on it here, once. The pullback of the last linear layer overrides
methods by closed forms (:mod:`contrastive_curvature.network.last_layer`); the layerwise pullback overrides methods that
need no Jacobian of a point (:mod:`contrastive_curvature.network.layerwise`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.pairs.relation import chunks

_P = ParamSpec("_P")
_R = TypeVar("_R")

JACOBIAN_ELEMENTS = 2**25
"""Numbers that a chunk of Jacobians may hold: 128 MiB in float32."""


def full_precision(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without autocast, on the device of its first tensor.

    Autocast would compute products in bfloat16, whose differences are all rounding error.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        # Skipped if possible: entering the context takes longer than a small product.
        if not torch.is_autocast_enabled(device.type):
            return function(*args, **kwargs)
        with torch.autocast(device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def own_name(name: str) -> str:
    """Return a parameter's name in the user's model, from its name in the analysed encoder."""
    return name.removeprefix("model.")


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return how far two ways to compute the same products of a network may differ, relative to their size."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    if device.type == "cuda" and dtype == torch.float32:
        # Convolutions and products may be rounded to the ten bits of TF32.
        tolerance = 1e-2
    return max(tolerance, 5e-2) if torch.is_autocast_enabled(device.type) else tolerance


def random_like(z: Tensor, seed: int) -> Tensor:
    """Return normal numbers, the same on every device, without a change to torch's own generators."""
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu").to(z)


KronFactors = list[list[Tensor]]
"""One entry a parameter, in the order of ``model.parameters()``: ``[G, A]`` for a matrix, ``[block]`` for a vector; the
format of laplace-torch's ``Kron``."""


class Pullback(ABC):
    """Per-point vector-Jacobian products of a network, and the curvatures computed from them.

    Attributes:
        n_params: Number P of parameters.
        width: Number of entries in memory during one product; at least P.
        encoder: The analysed encoder.
    """

    n_params: int
    encoder: Encoder

    @property
    def width(self) -> int:
        """Return the class's ``width``."""
        return self.n_params

    def named_sizes(self) -> list[tuple[str, int]]:
        """Return name (in the user's model) and number of entries of every parameter, in order."""
        return [(own_name(name), p.numel()) for name, p in self.encoder.named_parameters() if p.requires_grad]

    def parameter_at(self, position: int) -> str:
        """Return the name of the parameter with the entry ``position`` of the flat vector (P,)."""
        for name, size in self.named_sizes():
            if position < size:
                return name
            position -= size
        raise IndexError(f"there is no entry {position}")

    @abstractmethod
    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """Return raw outputs (N, D) without a graph, and the context that the products need."""

    @abstractmethod
    def slice_context(self, context: Any, rows: slice) -> Any:
        """Return the context of some of the points."""

    @abstractmethod
    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """Return ``J_i^T v_im`` (N, M, P) for every point, for cotangents (N, M, D)."""

    @abstractmethod
    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return raw outputs (N, D) and ``J v`` (N, D) for a direction ``v`` (P,)."""

    @abstractmethod
    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """Return ``sum_i J_i^T v_i`` (P,) for cotangents (N, D)."""

    def coupled_diag(self, context: Any, hessian: OutputHessian) -> Tensor:
        """Return the diagonal (P,) of ``J^T H J``, unclamped, for points that are coupled only with each other."""
        return self._coupled(context, hessian, self.diag, self.cross_diag, self.tile_diag)

    def coupled_full(self, context: Any, hessian: OutputHessian) -> Tensor:
        """Return ``J^T H J`` (P, P), unclamped, for points that are coupled only with each other."""
        if hessian.coupled and hessian.z.numel() * self.width <= JACOBIAN_ELEMENTS:
            # One product of large matrices instead of one for the blocks and one for the cross terms.
            jacobian = self.jacobians(context, hessian.z)
            return jacobian.flatten(0, 1).T @ hessian.matvec(jacobian).flatten(0, 1)
        return self._coupled(context, hessian, self.full, self.cross_full, self.points_at_once)

    def _coupled(
        self,
        context: Any,
        hessian: OutputHessian,
        term: Callable[[Any, Blocks], Tensor],
        cross_term: Callable[[Any, Any, CrossBlocks], Tensor],
        tile: Callable[[int], int],
    ) -> Tensor:
        out = term(context, hessian.blocks)
        if not hessian.coupled:
            return out
        tiles = list(chunks(len(hessian), tile(hessian.z.shape[1])))
        for rows in tiles:
            left = context if len(tiles) == 1 else self.slice_context(context, rows)
            for columns in tiles:
                right = left if columns == rows else self.slice_context(context, columns)
                out = out + cross_term(left, right, hessian.cross(rows, columns))
        return out

    def jacobians(self, context: Any, like: Tensor) -> Tensor:
        """Return Jacobians of N points (N, D, P); ``like`` has the outputs' shape (N, D) and dtype."""
        n, dim = like.shape
        return self.vjp(context, torch.eye(dim, dtype=like.dtype, device=like.device).expand(n, dim, dim))

    def diag(self, context: Any, blocks: Blocks) -> Tensor:
        """Return the diagonal (P,) of ``sum_i J_i^T H_ii J_i``."""
        n, dim = blocks.u.shape
        out = blocks.u.new_zeros(self.n_params)
        eye = torch.eye(dim, dtype=blocks.u.dtype, device=blocks.u.device)
        for rows, axes in self._chunks(n, dim):
            part = self.slice_context(context, rows)
            unit = eye[axes].expand(rows.stop - rows.start, -1, -1)
            jacobian = self.vjp(part, unit)
            if axes == slice(0, dim):
                curved = blocks[rows].matmul(jacobian)
            else:
                # The rows of the Jacobian do not all fit: row k of H J is the vector-Jacobian product with row k of H.
                curved = self.vjp(part, blocks[rows].matmul(unit.mT).mT)
            # An einsum would become one small matrix product per parameter.
            out += (jacobian * curved).sum((0, 1))
        return out

    def full(self, context: Any, blocks: Blocks) -> Tensor:
        """Return ``sum_i J_i^T H_ii J_i`` (P, P)."""
        n, dim = blocks.u.shape
        out = blocks.u.new_zeros(self.n_params, self.n_params)
        for rows in chunks(n, self.points_at_once(dim)):
            jacobian = self.jacobians(self.slice_context(context, rows), blocks.u[rows])
            out += jacobian.flatten(0, 1).T @ blocks[rows].matmul(jacobian).flatten(0, 1)
        return out

    def cross_diag(self, rows: Any, columns: Any, cross: CrossBlocks) -> Tensor:
        """Return the diagonal (P,) of :meth:`cross_full`."""
        left, curved = self._crossed(rows, columns, cross)
        return (left * curved).sum((0, 1))

    def cross_full(self, rows: Any, columns: Any, cross: CrossBlocks) -> Tensor:
        """Return ``sum_ij J_i^T H_ij J_j`` (P, P) for points i and j.

        Only the sum over all tiles of a symmetric Hessian is meaningful.

        Args:
            rows: Context of R points.
            columns: Context of C points.
            cross: The blocks between them; ``cross.symmetric`` if both are the same points.
        """
        left, curved = self._crossed(rows, columns, cross)
        return left.flatten(0, 1).T @ curved.flatten(0, 1)

    def _crossed(self, rows: Any, columns: Any, cross: CrossBlocks) -> tuple[Tensor, Tensor]:
        """Return the Jacobians of the rows (R, D, P), and the blocks times the Jacobians of the columns."""
        right = self.jacobians(columns, cross.u_columns)
        return right if cross.symmetric else self.jacobians(rows, cross.u_rows), cross.matmul(right)

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """Return covariances (N, D, D) of linearised outputs, ``J diag(v) J^T``, for variances (P,) of parameters."""
        dim = self.encoder.dim
        out = variance.new_zeros(input_length(context), dim, dim)
        for rows in chunks(len(out), self.points_at_once(dim)):
            jacobian = self.jacobians(self.slice_context(context, rows), out[rows, 0])
            out[rows] = (jacobian * variance) @ jacobian.mT
        return out

    def kron(self, context: Any, blocks: Blocks) -> KronFactors:
        """Return Kronecker factors of some points (:mod:`contrastive_curvature.network.layerwise`); batches add up.

        Args:
            context: Context of N points.
            blocks: Hessian blocks of these points.

        Returns:
            ``[G, sum_i a_i a_i^T]`` for a matrix and ``[block]`` for a vector, in the order of the parameters.

        Raises:
            UnsupportedError: These parameters have no Kronecker factors.
        """
        raise UnsupportedError(
            "structure 'kron': this pullback has no Kronecker factors (a subnetwork has none). Use the structure "
            "'diag' or 'full', or all parameters with backend=ContrastiveGGN."
        )

    def class_sums(self, context: Any, cotangents: Tensor, index: Tensor, n_classes: int) -> Tensor:
        """Return ``sum_{i in class} J_i^T v_ir`` (n_classes, R, P), for cotangents (N, R, D) and classes (N,)."""
        n, many = cotangents.shape[:2]
        out = cotangents.new_zeros(n_classes, many, self.n_params)
        for rows, axes in self._chunks(n, many):
            products = self.vjp(self.slice_context(context, rows), cotangents[rows, axes])
            out[:, axes].index_add_(0, index[rows], products)
        return out

    def tile_diag(self, dim: int) -> int:
        """Return the largest number of points, with D outputs, per side of a tile of :meth:`cross_diag`."""
        return self.points_at_once(dim)

    def points_at_once(self, dim: int) -> int:
        """Return the largest number of points whose Jacobians of D outputs may be in memory: one side of a tile."""
        return max(1, JACOBIAN_ELEMENTS // max(1, self.width * dim))

    def _chunks(self, n: int, dim: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of points and output axes with a bounded number of Jacobian entries each."""
        for rows in chunks(n, self.points_at_once(dim)):
            for axes in chunks(dim, JACOBIAN_ELEMENTS // max(1, (rows.stop - rows.start) * self.width)):
                yield rows, axes

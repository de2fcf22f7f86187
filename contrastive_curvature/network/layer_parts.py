"""The Jacobian of the outputs with respect to one parameter, from the gradients at the outputs of its layers.

Let ``B_i`` be the Jacobian of point i's raw outputs with respect to a layer's output. A matrix has
``J_i = sum_t B_it a_it^T`` over positions t with inputs ``a``; a bias, a scale or a token has
``J_i = sum_t B_it h_it``; an embedding has the sum of ``B_it`` over the positions of each token. For a matrix with one
position no Jacobian is formed; otherwise a few at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.pairs.relation import chunks

_CACHE_ELEMENTS = 2**18
"""Numbers in a temporary Jacobian that is squared at once; more would leave the cache."""

_CHUNK_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians that is multiplied with a Hessian."""

Entries = slice | Tensor


class BlockJacobian(ABC):
    """The Jacobian of n points with respect to some entries of one parameter.

    Attributes:
        size: Number of entries.
        entries: Places of the entries in the flat parameter; ``None`` for the whole parameter.
        is_vector: Whether the entries are a matrix that multiplies one input vector per point.
    """

    size: int
    entries: Tensor | None = None
    is_vector = False

    @property
    def place(self) -> Entries:
        """Return the entries as an index into the flat parameter."""
        return slice(None) if self.entries is None else self.entries

    @abstractmethod
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        """Return ``sum_ki sign_ki (J_i^T v_ki)^2`` (size,), from gradients ``b`` of K columns and ``signs`` (K, n)."""

    @abstractmethod
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        """Return ``sum_ki J_i^T v_ki``, shape (size,); or the sum of the absolute terms."""

    @abstractmethod
    def jacobians(
        self, b: Tensor, points: int | None = None, other: BlockJacobian | None = None
    ) -> Iterator[tuple[Entries, Tensor]]:
        """Yield ``J_i^T v_ki`` in chunks of entries: their places, and the numbers (n, K, entries).

        Args:
            b: Gradients of K columns.
            points: Number of points that the chunks must be small enough for; by default n.
            other: Jacobian of other points; entries that do not occur in it are left out.
        """

    def cross(self, left: Tensor, right_side: BlockJacobian, right: Tensor, blocks: CrossBlocks) -> Tensor:
        """Return the diagonal of ``sum_ij J_i^T H_ij J_j``, from gradients of the D axes on both sides."""
        return self._bilinear(left, right_side, right, blocks.matmul)

    def weighted(self, left: Tensor, right_side: BlockJacobian, right: Tensor, weight: Tensor) -> Tensor:
        """Return ``sum_kij weight_ij (J_i^T v_ki) (J_j^T v_kj)`` (size,), from gradients of K columns on both sides."""
        # Smaller chunks, because they are read four times.
        return self._bilinear(
            left, right_side, right, lambda b: (weight @ b.flatten(1)).view(-1, *b.shape[1:]), finer=32
        )

    def _bilinear(
        self,
        left: Tensor,
        right_side: BlockJacobian,
        right: Tensor,
        product: Callable[[Tensor], Tensor],
        finer: int = 1,
    ) -> Tensor:
        out = left.new_zeros(self.size)
        points = finer * max(left.shape[1], right.shape[1])
        if right is left:
            for entries, a in self.jacobians(left, points):
                out[entries] += (a * product(a)).sum((0, 1))
            return out
        sides = self.jacobians(left, points, right_side), right_side.jacobians(right, points, self)
        for (entries, a), (_, b) in zip(*sides, strict=True):
            out[entries] += (a * product(b)).sum((0, 1))
        return out

    def covariance(self, b: Tensor, variance: Tensor) -> Tensor:
        """Return ``J_i diag(variance) J_i^T``, shape (n, K, K), for variances (size,)."""
        out = b.new_zeros(b.shape[1], b.shape[0], b.shape[0])
        for entries, jacobian in self.jacobians(b):
            out += (jacobian * variance[entries]) @ jacobian.mT
        return out


class MatrixJacobian(BlockJacobian):
    """A matrix that multiplies the inputs of every position.

    Args:
        inputs: Shape (n, G, T, F): G groups of F inputs at T positions. Gradients have shape (K, n, G, T, C).
        channels: Number C of outputs of a group.
        entries: See :class:`BlockJacobian`.
    """

    def __init__(self, inputs: Tensor, channels: int, entries: Tensor | None = None) -> None:
        self.inputs, self.channels, self.entries = inputs, channels, entries
        _, self.groups, positions, self.width = inputs.shape
        self.size = self.groups * channels * self.width
        self.is_vector = self.groups == 1 and positions == 1

    @override
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        if self.is_vector:
            squares = b[:, :, 0, 0].square().mul_(signs.unsqueeze(2)).sum(0)
            return (squares.T @ self.inputs[:, 0, 0].square()).flatten()
        out = b.new_zeros(self.size)
        step = max(1, min(len(self.inputs), _CACHE_ELEMENTS // self.size))
        # One buffer: new memory for every chunk would take as long as the products.
        buffer = b.new_empty(step * self.groups, self.channels, self.width)
        for column, sign in zip(b.unbind(), signs.unbind(), strict=True):
            for rows in chunks(len(sign), step):
                few = column[rows].flatten(0, 1).mT
                jacobian = torch.bmm(few, self.inputs[rows].flatten(0, 1), out=buffer[: len(few)])
                out.addmv_(jacobian.view(-1, self.size).square_().T, sign[rows])
        return out

    @override
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        b, a = (b.abs(), self.inputs.abs()) if absolute else (b, self.inputs)
        by_group = b.sum(0).transpose(0, 1).flatten(1, 2).mT
        return torch.matmul(by_group, a.transpose(0, 1).flatten(1, 2)).flatten()

    @override
    def jacobians(
        self, b: Tensor, points: int | None = None, other: BlockJacobian | None = None
    ) -> Iterator[tuple[Entries, Tensor]]:
        many, n = b.shape[:2]
        count = max(1, many * (n if points is None else points))
        step = max(1, _CHUNK_ELEMENTS // (count * self.width))
        # This is less than the width only if the step is a single channel.
        width = max(1, min(self.width, _CHUNK_ELEMENTS // count))
        for group in range(self.groups):
            for channels in chunks(self.channels, step):
                gradients = b[:, :, group, :, channels].permute(1, 0, 3, 2).flatten(1, 2)
                for some in chunks(self.width, width):
                    chunk = torch.bmm(gradients, self.inputs[:, group, :, some]).view(n, many, -1)
                    first = (group * self.channels + channels.start) * self.width + some.start
                    yield slice(first, first + chunk.shape[2]), chunk

    @override
    def weighted(self, left: Tensor, right_side: BlockJacobian, right: Tensor, weight: Tensor) -> Tensor:
        if not (self.is_vector and isinstance(right_side, MatrixJacobian) and right_side.is_vector):
            return super().weighted(left, right_side, right, weight)
        # With one position: sum_ij forms_cij a_if a_jf over pairs; if both sides are the same, i < j counts twice.
        same, a, b = right_side is self, self.inputs[:, 0, 0], right_side.inputs[:, 0, 0]
        # Contiguous: a product of many small matrices takes three times as long if their rows are apart in memory.
        first = left[:, :, 0, 0].permute(2, 1, 0).contiguous()
        second = first if same else right[:, :, 0, 0].permute(2, 1, 0).contiguous()
        forms = torch.bmm(first, second.mT).mul_(weight)
        out = left.new_zeros(self.channels, self.width)
        if same:
            out.addmm_(forms.diagonal(dim1=1, dim2=2), a.square())
        pairs = ((weight.triu(1) if same else weight) != 0).nonzero()
        for i, j in (chunk.unbind(1) for chunk in pairs.split(max(1, _CACHE_ELEMENTS // max(1, self.width)))):
            out.addmm_(forms[:, i, j], a[i] * b[j], alpha=2 if same else 1)
        return out.flatten()

    @override
    def covariance(self, b: Tensor, variance: Tensor) -> Tensor:
        if not self.is_vector:
            return super().covariance(b, variance)
        weight = self.inputs[:, 0, 0].square() @ variance.view(self.channels, self.width).T
        axes = b[:, :, 0, 0].transpose(0, 1)
        return (axes * weight.unsqueeze(1)) @ axes.mT


class EntrywiseJacobian(BlockJacobian):
    """Entries that are each multiplied by one number at every position, and summed: biases, scales, tokens.

    Args:
        factors: ``h``, shape (n, T, M), or ``None`` for ones. Gradients have shape (K, n, T, M).
        size: Number of different entries, at most M.
        places: Number of the entry at each of the M places; ``None`` if all entries are different.
        entries: See :class:`BlockJacobian`.
    """

    def __init__(
        self, factors: Tensor | None, size: int, places: Tensor | None = None, entries: Tensor | None = None
    ) -> None:
        self.factors, self.size, self.places, self.entries = factors, size, places, entries

    def gradients(self, b: Tensor, absolute: bool = False) -> Tensor:
        """Return ``J_i^T v_ki``, shape (K, n, size); or the sum of the absolute terms."""
        terms = b if self.factors is None else b * self.factors
        summed = (terms.abs() if absolute else terms).sum(2)
        if self.places is None:
            return summed
        return summed.new_zeros(*summed.shape[:2], self.size).index_add_(2, self.places, summed)

    @override
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        return signs.flatten() @ self.gradients(b).square().flatten(0, 1)

    @override
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        return self.gradients(b, absolute).sum((0, 1))

    @override
    def jacobians(
        self, b: Tensor, points: int | None = None, other: BlockJacobian | None = None
    ) -> Iterator[tuple[Entries, Tensor]]:
        jacobian = self.gradients(b).transpose(0, 1)
        n, many = jacobian.shape[:2]
        for entries in chunks(self.size, _CHUNK_ELEMENTS // max(1, many * (n if points is None else points))):
            yield entries, jacobian[..., entries]


class EmbeddingJacobian(BlockJacobian):
    """Rows of a matrix that tokens select.

    Args:
        tokens: Shape (n, T); negative at a position without a row. Gradients have shape (K, n, T, E).
        shape: (V, E).
        entries: See :class:`BlockJacobian`.
    """

    def __init__(self, tokens: Tensor, shape: tuple[int, int], entries: Tensor | None = None) -> None:
        self.shape, self.entries = shape, entries
        self.size = shape[0] * shape[1]
        self._points = len(tokens)
        keys = torch.arange(len(tokens), device=tokens.device).unsqueeze(1) * shape[0] + tokens
        self._used = (tokens >= 0).flatten().nonzero().flatten()
        distinct, self._place = keys.flatten()[self._used].unique(return_inverse=True)
        # One row per point and token: positions of the same token add up before they are squared.
        self._point, self._token = distinct // shape[0], distinct % shape[0]

    def _rows(self, b: Tensor) -> Tensor:
        """Return one row for each of the U pairs of a point and its token, shape (K, U, E)."""
        flat = b.flatten(1, 2)[:, self._used]
        return flat.new_zeros(flat.shape[0], len(self._token), flat.shape[2]).index_add_(1, self._place, flat)

    @override
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        rows = torch.einsum("kue,ku->ue", self._rows(b).square(), signs[:, self._point])
        return b.new_zeros(self.shape).index_add_(0, self._token, rows).flatten()

    @override
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        rows = self._rows(b.abs() if absolute else b)
        return b.new_zeros(self.shape).index_add_(0, self._token, rows.sum(0)).flatten()

    @override
    def jacobians(
        self, b: Tensor, points: int | None = None, other: BlockJacobian | None = None
    ) -> Iterator[tuple[Entries, Tensor]]:
        tokens = self._token.unique()
        if isinstance(other, EmbeddingJacobian):
            tokens = tokens[torch.isin(tokens, other._token)]
        rows, width = self._rows(b), self.shape[1]
        step = max(1, _CHUNK_ELEMENTS // max(1, b.shape[0] * (self._points if points is None else points) * width))
        for some in tokens.split(step) if len(tokens) else ():
            place = torch.searchsorted(some, self._token).clamp(max=len(some) - 1)
            inside = (some[place] == self._token).nonzero().flatten()
            jacobian = b.new_zeros(self._points, len(some), b.shape[0], width)
            jacobian[self._point[inside], place[inside]] = rows[:, inside].transpose(0, 1)
            entries = (some.unsqueeze(1) * width + torch.arange(width, device=b.device)).flatten()
            yield entries, jacobian.transpose(1, 2).flatten(2)

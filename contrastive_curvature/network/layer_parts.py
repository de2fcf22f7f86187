"""The Jacobian of the outputs with respect to one parameter, from the gradients at the outputs of its layers.

Let ``B_i`` be the Jacobian of point i's raw outputs with respect to a layer's output. A matrix has
``J_i = sum_t B_it a_it^T`` over positions t with inputs ``a``; a bias, a scale or a token has
``J_i = sum_t B_it h_it``; an embedding has the sum of ``B_it`` over the positions of each token. For a matrix with one
position no Jacobian is formed; otherwise a few at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from typing_extensions import override

from contrastive_curvature.network.recorder import Call, ParameterUse, by_point
from contrastive_curvature.pairs.relation import chunks

_CACHE_ELEMENTS = 2**18
"""Numbers in a temporary Jacobian that is squared at once; more would leave the cache."""

_CHUNK_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians that is multiplied with a Hessian."""

Entries = slice | Tensor

Gradients = dict[Call, Tensor]
"""The gradients at the outputs of calls for K cotangents, shape (K, *output), without those that none reaches."""


class ParameterBlock(ABC):
    """Some or all entries of one parameter, and their Jacobian for n points.

    Args:
        uses: Uses of the same entries in the same way; their positions are joined in one axis.
        n: Number of points.

    Attributes:
        number: Number of the parameter.
        entries: Places of the entries in the flat parameter; ``None`` for the whole parameter.
        size: Number of entries.
    """

    size: int

    def __init__(self, uses: Sequence[ParameterUse], n: int) -> None:
        self.uses, self.n = uses, n
        self.number, entries = uses[0].subset
        self.entries = None if entries is None else entries.flatten().to(uses[0].call.device)

    @property
    def place(self) -> Entries:
        """Return the entries as an index into the flat parameter."""
        return slice(None) if self.entries is None else self.entries

    def gradients(self, at_calls: Gradients) -> Tensor | None:
        """Return gradients for K cotangents, positions joined; ``None`` if no gradient arrives."""
        reached = [at_calls[use.call] for use in self.uses if use.call in at_calls]
        if not reached:
            return None
        nothing, parts = reached[0].new_zeros(()), []
        for use in self.uses:
            b = at_calls.get(use.call, nothing.expand(len(reached[0]), *use.call.shape))
            shifted = use.batch_axis._replace(axis=use.batch_axis.axis + 1)
            parts.append(self._arranged(use, by_point(b, shifted, self.n).movedim(2, 0)))
        return _joined(parts, dim=-2)

    @abstractmethod
    def _arranged(self, use: ParameterUse, b: Tensor) -> Tensor:
        """Bring gradients (K, n, m, *rest) of a use into the block's shape."""

    @abstractmethod
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        """Return ``sum_ki sign_ki (J_i^T v_ki)^2`` (size,), from gradients ``b`` of K columns and ``signs`` (K, n)."""

    @abstractmethod
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        """Return ``sum_ki J_i^T v_ki``, shape (size,); or the sum of the absolute terms."""

    @abstractmethod
    def jacobians(self, b: Tensor, step: int, other: ParameterBlock | None = None) -> Iterator[tuple[Entries, Tensor]]:
        """Yield ``J_i^T v_ki`` in chunks of about ``step`` entries: their places, and the numbers (n, K, entries).

        Entries that do not occur in the Jacobian of ``other`` points are left out.
        """

    def cross(
        self,
        left: Tensor,
        other: ParameterBlock,
        right: Tensor,
        product: Callable[[Tensor], Tensor],
        finer: int = 1,
    ) -> Tensor:
        """Return the diagonal of ``sum_ij J_i^T H_ij J_j``, from gradients on both sides and the product with H."""
        out = left.new_zeros(self.size)
        step = chunk_of_entries(left, right) // finer
        if right is left:
            for entries, a in self.jacobians(left, step):
                out[entries] += (a * product(a)).sum((0, 1))
            return out
        sides = self.jacobians(left, step, other), other.jacobians(right, step, self)
        for (entries, a), (_, b) in zip(*sides, strict=True):
            out[entries] += (a * product(b)).sum((0, 1))
        return out

    def weighted(self, left: Tensor, other: ParameterBlock, right: Tensor, weight: Tensor) -> Tensor:
        """Return ``sum_kij weight_ij (J_i^T v_ki) (J_j^T v_kj)`` (size,), from gradients of K columns on both sides."""
        # Smaller chunks, because they are read four times.
        return self.cross(left, other, right, lambda b: (weight @ b.flatten(1)).view(-1, *b.shape[1:]), finer=32)

    def covariance(self, b: Tensor, variance: Tensor) -> Tensor:
        """Return ``J_i diag(variance) J_i^T``, shape (n, K, K), for variances (size,)."""
        out = b.new_zeros(b.shape[1], b.shape[0], b.shape[0])
        for entries, jacobian in self.jacobians(b, chunk_of_entries(b)):
            out += (jacobian * variance[entries]) @ jacobian.mT
        return out


class MatrixBlock(ParameterBlock):
    """A matrix that multiplies the inputs of every position: the weight of a linear layer or a convolution.

    Attributes:
        inputs: Shape (n, G, T, F): G groups of F inputs at T positions. Gradients have shape (K, n, G, T, C).
        channels: Number C of outputs of a group.
        is_vector: Whether there is one group and one position.
    """

    def __init__(self, uses: Sequence[ParameterUse], n: int, dtype: torch.dtype) -> None:
        super().__init__(uses, n)
        self.inputs = _joined([_inputs(use, n, dtype) for use in uses], dim=2)
        _, self.groups, positions, self.width = self.inputs.shape
        self.channels = uses[0].shape[0] // self.groups
        self.size = self.groups * self.channels * self.width
        self.is_vector = self.groups == 1 and positions == 1

    @override
    def _arranged(self, use: ParameterUse, b: Tensor) -> Tensor:
        many, n, m = b.shape[:3]
        if use.kind == "linear":
            return b.reshape(many, n, 1, -1, b.shape[-1])
        split = b.flatten(4).unflatten(3, (self.groups, -1)).permute(0, 1, 3, 2, 5, 4)
        return split[:, :, :, 0] if m == 1 else split.flatten(3, 4)

    @override
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        if self.is_vector:
            squares = b[:, :, 0, 0].square().mul_(signs.unsqueeze(2)).sum(0)
            return (squares.T @ self.inputs[:, 0, 0].square()).flatten()
        out = b.new_zeros(self.size)
        step = max(1, min(self.n, _CACHE_ELEMENTS // self.size))
        # One buffer: new memory for every chunk would take as long as the products. Forward mode, for derivatives in
        # numbers of the loss, cannot write into it.
        buffer = b.new_empty(step * self.groups, self.channels, self.width)
        forward_mode = forward_ad.unpack_dual(b).tangent is not None
        for column, sign in zip(b.unbind(), signs.unbind(), strict=True):
            for rows in chunks(len(sign), step):
                few = column[rows].flatten(0, 1).mT
                into = None if forward_mode else buffer[: len(few)]
                jacobian = torch.bmm(few, self.inputs[rows].flatten(0, 1), out=into)
                out.addmv_(jacobian.view(-1, self.size).square_().T, sign[rows])
        return out

    @override
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        b, a = (b.abs(), self.inputs.abs()) if absolute else (b, self.inputs)
        by_group = b.sum(0).transpose(0, 1).flatten(1, 2).mT
        return torch.matmul(by_group, a.transpose(0, 1).flatten(1, 2)).flatten()

    @override
    def jacobians(self, b: Tensor, step: int, other: ParameterBlock | None = None) -> Iterator[tuple[Entries, Tensor]]:
        many, n = b.shape[:2]
        for group in range(self.groups):
            for channels in chunks(self.channels, step // self.width):
                gradients = b[:, :, group, :, channels].permute(1, 0, 3, 2).flatten(1, 2)
                # Shorter than the width only if the chunk is a single channel.
                for some in chunks(self.width, step):
                    chunk = torch.bmm(gradients, self.inputs[:, group, :, some]).view(n, many, -1)
                    first = (group * self.channels + channels.start) * self.width + some.start
                    yield slice(first, first + chunk.shape[2]), chunk

    @override
    def weighted(self, left: Tensor, other: ParameterBlock, right: Tensor, weight: Tensor) -> Tensor:
        if not (self.is_vector and isinstance(other, MatrixBlock) and other.is_vector):
            return super().weighted(left, other, right, weight)
        # With one position: sum_ij forms_cij a_if a_jf over pairs; if both sides are the same, i < j counts twice.
        same, a, b = other is self, self.inputs[:, 0, 0], other.inputs[:, 0, 0]
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


class EntrywiseBlock(ParameterBlock):
    """Entries that are each multiplied by one number at every position, and summed: biases, scales, tokens.

    Attributes:
        factors: ``h``, shape (n, T, M), or ``None`` for ones. Gradients have shape (K, n, T, M).
        places: Number of the entry at each of the M places; ``None`` if all entries are different.
    """

    def __init__(self, uses: Sequence[ParameterUse], n: int, dtype: torch.dtype) -> None:
        super().__init__(uses, n)
        self.factors = self.places = None
        if any(use.source is not None for use in uses):
            one = torch.ones((), dtype=dtype, device=uses[0].call.device)
            sources = [(one if use.source is None else use.source.to(dtype)).expand(use.call.shape) for use in uses]
            parts = zip(uses, sources, strict=True)
            self.factors = _joined([_entries_last(u, by_point(s, u.batch_axis, n), 2) for u, s in parts], dim=1)
        self.size = uses[0].shape.numel()
        if self.entries is not None:
            distinct, places = self.entries.unique(return_inverse=True)
            if len(distinct) < self.size:
                self.size, self.places, self.entries = len(distinct), places, distinct

    @override
    def _arranged(self, use: ParameterUse, b: Tensor) -> Tensor:
        return _entries_last(use, b, 3)

    def _summed(self, b: Tensor, absolute: bool = False) -> Tensor:
        """Return ``J_i^T v_ki``, shape (K, n, size); or the sum of the absolute terms."""
        terms = b if self.factors is None else b * self.factors
        summed = (terms.abs() if absolute else terms).sum(2)
        if self.places is None:
            return summed
        return summed.new_zeros(*summed.shape[:2], self.size).index_add_(2, self.places, summed)

    @override
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        return signs.flatten() @ self._summed(b).square().flatten(0, 1)

    @override
    def total(self, b: Tensor, absolute: bool = False) -> Tensor:
        return self._summed(b, absolute).sum((0, 1))

    @override
    def jacobians(self, b: Tensor, step: int, other: ParameterBlock | None = None) -> Iterator[tuple[Entries, Tensor]]:
        jacobian = self._summed(b).transpose(0, 1)
        for entries in chunks(self.size, step):
            yield entries, jacobian[..., entries]


class EmbeddingBlock(ParameterBlock):
    """Rows of a matrix that tokens select; gradients have shape (K, n, T, E)."""

    def __init__(self, uses: Sequence[ParameterUse], n: int, dtype: torch.dtype) -> None:
        del dtype
        super().__init__(uses, n)
        tokens = torch.cat([_tokens(use, n) for use in uses], dim=1)
        self.shape = uses[0].shape
        self.size = self.shape.numel()
        keys = torch.arange(n, device=tokens.device).unsqueeze(1) * self.shape[0] + tokens
        self._used = (tokens >= 0).flatten().nonzero().flatten()
        distinct, self._place = keys.flatten()[self._used].unique(return_inverse=True)
        # One row per point and token: positions of the same token add up before they are squared.
        self._point, self._token = distinct // self.shape[0], distinct % self.shape[0]

    @override
    def _arranged(self, use: ParameterUse, b: Tensor) -> Tensor:
        return b.reshape(*b.shape[:2], -1, b.shape[-1])

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
    def jacobians(self, b: Tensor, step: int, other: ParameterBlock | None = None) -> Iterator[tuple[Entries, Tensor]]:
        tokens = self._token.unique()
        if isinstance(other, EmbeddingBlock):
            tokens = tokens[torch.isin(tokens, other._token)]
        rows, width = self._rows(b), self.shape[1]
        for some in tokens.split(max(1, step // width)) if len(tokens) else ():
            place = torch.searchsorted(some, self._token).clamp(max=len(some) - 1)
            inside = (some[place] == self._token).nonzero().flatten()
            jacobian = b.new_zeros(self.n, len(some), b.shape[0], width)
            jacobian[self._point[inside], place[inside]] = rows[:, inside].transpose(0, 1)
            entries = (some.unsqueeze(1) * width + torch.arange(width, device=b.device)).flatten()
            yield entries, jacobian.transpose(1, 2).flatten(2)


_BLOCKS: dict[str, Callable[[Sequence[ParameterUse], int, torch.dtype], ParameterBlock]] = {
    "linear": MatrixBlock,
    "convolution": MatrixBlock,
    "embedding": EmbeddingBlock,
    "entrywise": EntrywiseBlock,
}


def make_block(uses: Sequence[ParameterUse], n: int, dtype: torch.dtype) -> ParameterBlock | None:
    """Make the block of uses of the same entries in the same way; ``None`` if a matrix repeats an entry."""
    kind, entries = uses[0].kind, uses[0].subset.entries
    if kind != "entrywise" and entries is not None and len(entries.unique()) < entries.numel():
        return None
    return _BLOCKS[kind](uses, n, dtype)


def chunk_of_entries(*gradients: Tensor) -> int:
    """Return the number of entries whose Jacobians of K columns and n points may be in memory together."""
    return max(1, _CHUNK_ELEMENTS // max(1, *(b.shape[0] * b.shape[1] for b in gradients)))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join tensors; a single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _entries_last(use: ParameterUse, t: Tensor, start: int) -> Tensor:
    """Reshape (..., m, *rest) to (..., positions, entries); the output's axes begin at ``start``."""
    aligned = list(use.shape)
    del aligned[use.batch_axis.axis]
    kept = [start + j for j, size in enumerate(aligned) if size != 1]
    summed = [j for j in range(start - 1, t.ndim) if j not in kept]
    count = math.prod(t.shape[j] for j in kept)
    return t.permute(*range(start - 1), *summed, *kept).reshape(*t.shape[: start - 1], -1, count)


def _tokens(use: ParameterUse, n: int) -> Tensor:
    """Return tokens (n, T), with -1 for the padding index, whose row has no gradient."""
    tokens = by_point(use.source, use.batch_axis, n).reshape(n, -1)
    padding = use.options.get("padding_idx")
    return tokens if padding is None else tokens.masked_fill(tokens == padding % use.shape[0], -1)


def _inputs(use: ParameterUse, n: int, dtype: torch.dtype) -> Tensor:
    """Return the inputs of a matrix, shape (n, groups, positions, inputs of a group)."""
    a = use.source.to(dtype)
    if use.kind == "linear":
        return by_point(a, use.batch_axis, n).reshape(n, 1, -1, a.shape[-1])
    windows = by_point(_windows(a, use), use.batch_axis, n)
    split = windows.unflatten(2, (use.options.get("groups", 1), -1)).permute(0, 2, 1, 4, 3)
    return split[:, :, 0] if split.shape[2] == 1 else split.flatten(2, 3)


def _windows(a: Tensor, use: ParameterUse) -> Tensor:
    """Return the inputs that a convolution multiplies its weight with, shape (N, inputs, positions)."""
    kernel = tuple(use.shape[2:])
    axes = len(kernel)

    def each(value: int | Sequence[int]) -> tuple[int, ...]:
        several = (value,) if isinstance(value, int) else tuple(value)
        return several * (axes // len(several))

    stride, dilation = (each(use.options.get(name, 1)) for name in ("stride", "dilation"))
    padding = use.options.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = [(p, p) for p in each(0 if padding == "valid" else padding)]
    if any(p for pair in pads for p in pair):
        a = F.pad(a, [p for pair in reversed(pads) for p in pair])
    if kernel == (1,) * axes:
        return a[(slice(None), slice(None), *(slice(None, None, s) for s in stride))].flatten(2)
    if axes == 1:
        a, kernel, stride, dilation = a.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(a, kernel, dilation, 0, stride)

"""The Jacobian of the outputs with respect to one parameter, from the gradients at what its layers put out.

With ``B_i`` the Jacobian of the raw outputs of point i with respect to a layer's output, a matrix has
``J_i = sum_t B_it a_it^T`` over positions t with inputs ``a``, a bias, a scale or a token ``J_i = sum_t B_it h_it``,
and an embedding the sum of ``B_it`` over the positions of each token. No Jacobian of a matrix is formed where it has
one position; elsewhere a few at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross import CrossBlocks

_CACHE_ELEMENTS = 2**18
"""Numbers in a temporary Jacobian that is squared at once; more would leave the cache."""

_CHUNK_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians that is multiplied with a Hessian."""

Entries = slice | Tensor


class Part(ABC):
    """Some entries of one parameter, and how they enter the network; n points.

    Attributes:
        size: How many entries.
        entries: Their places in the flat parameter, or ``None`` where it is the whole parameter.
    """

    size: int
    entries: Tensor | None = None

    @abstractmethod
    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        """Return ``sum_ki sign_ki (J_i^T v_ki)^2`` (size,), from gradients ``b`` of K columns and ``signs`` (K, n)."""

    @abstractmethod
    def total(self, b: Tensor) -> Tensor:
        """Return ``sum_ki J_i^T v_ki``, shape (size,)."""

    @abstractmethod
    def magnitude(self, b: Tensor) -> float:
        """Return the largest sum of absolute terms in an entry of :meth:`total`."""

    @abstractmethod
    def jacobians(self, b: Tensor, points: int | None = None) -> Iterator[tuple[Entries, Tensor]]:
        """Yield ``J_i^T v_ki`` in chunks of entries, as small as for ``points`` points: places, and (n, K, entries)."""

    def cross(self, left: Tensor, right_part: Part, right: Tensor, blocks: CrossBlocks) -> Tensor:
        """Return the diagonal of ``sum_ij J_i^T H_ij J_j``, from gradients of the D axes at both sides."""
        return self._bilinear(left, right_part, right, blocks.matmul)

    def weighted(self, left: Tensor, right_part: Part, right: Tensor, weight: Tensor) -> Tensor:
        """Return ``sum_kij weight_ij (J_i^T v_ki) (J_j^T v_kj)`` (size,), from gradients of K columns at both sides."""

        def product(b: Tensor) -> Tensor:
            return (weight @ b.flatten(1)).view(len(weight), *b.shape[1:])

        # Small chunks: they are read four times.
        return self._bilinear(left, right_part, right, product, finer=_CHUNK_ELEMENTS // _CACHE_ELEMENTS)

    def _bilinear(
        self, left: Tensor, right_part: Part, right: Tensor, product: Callable[[Tensor], Tensor], finer: int = 1
    ) -> Tensor:
        out = left.new_zeros(self.size)
        points = finer * max(left.shape[1], right.shape[1])
        for entries, a, b in self._together(left, right_part, right, points):
            out[entries] += (a * product(b)).sum((0, 1))
        return out

    def _together(
        self, left: Tensor, right_part: Part, right: Tensor, points: int
    ) -> Iterator[tuple[Entries, Tensor, Tensor]]:
        """Yield Jacobians of the same entries at both sides, which may be the same object."""
        if right is left:
            yield from ((entries, a, a) for entries, a in self.jacobians(left, points))
            return
        sides = self.jacobians(left, points), right_part.jacobians(right, points)
        yield from ((entries, a, b) for (entries, a), (_, b) in zip(*sides, strict=True))

    def covariance(self, b: Tensor, variance: Tensor) -> Tensor:
        """Return ``J_i diag(variance) J_i^T``, shape (n, K, K), for variances (size,)."""
        out = b.new_zeros(b.shape[1], b.shape[0], b.shape[0])
        for entries, jacobian in self.jacobians(b):
            out += (jacobian * variance[entries]) @ jacobian.mT
        return out


class MatrixPart(Part):
    """A matrix that multiplies the inputs of every position.

    Args:
        inputs: Shape (n, G, T, F): G groups of F inputs at T positions. Gradients have shape (K, n, G, T, C).
        channels: C, the outputs of a group.
        entries: See :class:`Part`.
    """

    def __init__(self, inputs: Tensor, channels: int, entries: Tensor | None = None) -> None:
        self.inputs, self.channels, self.entries = inputs, channels, entries
        _, self.groups, self.positions, self.width = inputs.shape
        self.size = self.groups * channels * self.width
        self.is_vector = self.groups == 1 and self.positions == 1
        self._squares: Tensor | None = None

    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        """See :meth:`Part.diagonal`."""
        if self.is_vector:
            if self._squares is None:
                self._squares = self.inputs[:, 0, 0].square()
            spread = b[:, :, 0, 0].square().mul_(signs.unsqueeze(2)).sum(0)
            return (spread.T @ self._squares).flatten()
        out = b.new_zeros(self.size)
        step = max(1, min(len(self.inputs), _CACHE_ELEMENTS // self.size))
        # New memory for every chunk would take as long as the products.
        buffer = b.new_empty(step * self.groups, self.channels, self.width)
        for column, sign in zip(b.unbind(), signs.unbind(), strict=True):
            for start in range(0, len(sign), step):
                rows = slice(start, start + step)
                few = column[rows].flatten(0, 1).mT
                jacobian = torch.bmm(few, self.inputs[rows].flatten(0, 1), out=buffer[: len(few)])
                out.addmv_(jacobian.view(-1, self.size).square_().T, sign[rows])
        return out

    def total(self, b: Tensor) -> Tensor:
        """See :meth:`Part.total`."""
        return _sum_of_outer(b.sum(0), self.inputs)

    def magnitude(self, b: Tensor) -> float:
        """See :meth:`Part.magnitude`."""
        return _largest(_sum_of_outer(b.abs().sum(0), self.inputs.abs()))

    def jacobians(self, b: Tensor, points: int | None = None) -> Iterator[tuple[Entries, Tensor]]:
        """See :meth:`Part.jacobians`."""
        many, n = b.shape[:2]
        count = max(1, many * (n if points is None else points))
        step = max(1, _CHUNK_ELEMENTS // (count * self.width))
        width = max(1, min(self.width, _CHUNK_ELEMENTS // count))
        for group in range(self.groups):
            a = self.inputs[:, group]
            for start in range(0, self.channels, step):
                stop = min(start + step, self.channels)
                first = (group * self.channels + start) * self.width
                chosen = b[:, :, group, :, start:stop].permute(1, 0, 3, 2).flatten(1, 2)
                # Only a single channel is cut along its inputs.
                for begin in range(0, self.width, width) if stop - start == 1 else (0,):
                    end = min(begin + width, self.width) if stop - start == 1 else self.width
                    chunk = torch.bmm(chosen, a[:, :, begin:end]).view(n, many, -1)
                    yield slice(first + begin, first + begin + chunk.shape[2]), chunk

    def cross(self, left: Tensor, right_part: Part, right: Tensor, blocks: CrossBlocks) -> Tensor:
        """See :meth:`Part.cross`; with one position, ``sum_ij (B_i^T H_ij B_j)_cc a_if a_jf`` over the pairs."""
        if not self.is_vector or not isinstance(right_part, MatrixPart):
            return super().cross(left, right_part, right, blocks)
        a, b = self.inputs[:, 0, 0], right_part.inputs[:, 0, 0]
        pairs = blocks.pairs()
        factor = 2 if blocks.symmetric else 1
        out = left.new_zeros(self.channels, self.width)
        products = None
        step = max(1, _CACHE_ELEMENTS // max(1, self.width))
        if 0 < len(pairs) <= step:
            products = a[pairs[:, 0]] * b[pairs[:, 1]]
        at_once = max(1, _CHUNK_ELEMENTS // max(1, len(a) * len(b)))
        for start in range(0, self.channels, at_once):
            channels = slice(start, start + at_once)
            forms = blocks.forms(_axes_second(left[..., channels]), _axes_second(right[..., channels]))
            if blocks.symmetric and blocks.itself() is not None:
                out[channels] += forms.diagonal(dim1=1, dim2=2) @ a.square()
            for chunk in pairs.split(step):
                i, j = chunk.unbind(1)
                both = a[i] * b[j] if products is None else products
                out[channels].addmm_(forms[:, i, j], both, alpha=factor)
        return out.flatten()

    def weighted(self, left: Tensor, right_part: Part, right: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Part.weighted`; with one position without a Jacobian."""
        if self.groups == 1 and self.positions > 1 and right is left:
            return self._weighted_by_channels(left[:, :, 0], weight)
        if not self.is_vector or not isinstance(right_part, MatrixPart):
            return super().weighted(left, right_part, right, weight)
        a, b = self.inputs[:, 0, 0], right_part.inputs[:, 0, 0]
        forms = torch.bmm(left[:, :, 0, 0].permute(2, 1, 0), right[:, :, 0, 0].permute(2, 0, 1)).mul_(weight)
        out = left.new_zeros(self.channels, self.width)
        if right is left:
            out.addmm_(forms.diagonal(dim1=1, dim2=2), a.square())
        pairs = ((weight.triu(1) if right is left else weight) != 0).nonzero()
        for i, j in (chunk.unbind(1) for chunk in pairs.split(max(1, _CACHE_ELEMENTS // max(1, self.width)))):
            out.addmm_(forms[:, i, j], a[i] * b[j], alpha=2 if right is left else 1)
        return out.flatten()

    def _weighted_by_channels(self, b: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Part.weighted`, for gradients (K, n, T, C) of one side."""
        out = b.new_zeros(self.channels, self.width)
        a, n = self.inputs[:, 0], b.shape[1]
        step = max(1, min(self.channels, _CACHE_ELEMENTS // (n * self.width)))
        buffers = b.new_empty(2, n * step * self.width)
        for column in b.unbind():
            for start in range(0, self.channels, step):
                some = column[..., start : start + step].mT
                one, other = (
                    buffer[: n * some.shape[1] * self.width].view(n, some.shape[1], self.width) for buffer in buffers
                )
                torch.bmm(some, a, out=one)
                torch.mm(weight, one.flatten(1), out=other.flatten(1))
                out[start : start + step] += one.mul_(other).sum(0)
        return out.flatten()

    def covariance(self, b: Tensor, variance: Tensor) -> Tensor:
        """See :meth:`Part.covariance`."""
        if not self.is_vector:
            return super().covariance(b, variance)
        weight = self.inputs[:, 0, 0].square() @ variance.view(self.channels, self.width).T
        axes = b[:, :, 0, 0].transpose(0, 1)
        return (axes * weight.unsqueeze(1)) @ axes.mT


class EntryPart(Part):
    """Entries that are multiplied with one number each at every position, and summed: biases, scales, tokens.

    Args:
        factors: ``h``, shape (n, T, M), or ``None`` for ones. Gradients have shape (K, n, T, M).
        size: M, or the number of different entries.
        places: Which entry each of the M is, where several are the same; ``None`` where each is its own.
        entries: See :class:`Part`.
    """

    def __init__(
        self, factors: Tensor | None, size: int, places: Tensor | None = None, entries: Tensor | None = None
    ) -> None:
        self.factors, self.size, self.places, self.entries = factors, size, places, entries

    def gradients(self, b: Tensor) -> Tensor:
        """Return ``J_i^T v_ki``, shape (K, n, size)."""
        return self._gather(b if self.factors is None else b * self.factors)

    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        """See :meth:`Part.diagonal`."""
        return signs.flatten() @ self.gradients(b).square().flatten(0, 1)

    def total(self, b: Tensor) -> Tensor:
        """See :meth:`Part.total`."""
        return self.gradients(b).sum((0, 1))

    def magnitude(self, b: Tensor) -> float:
        """See :meth:`Part.magnitude`."""
        terms = (b if self.factors is None else b * self.factors).abs()
        return _largest(self._gather(terms).sum((0, 1)))

    def jacobians(self, b: Tensor, points: int | None = None) -> Iterator[tuple[Entries, Tensor]]:
        """See :meth:`Part.jacobians`."""
        jacobian = self.gradients(b).transpose(0, 1)
        n, many = jacobian.shape[:2]
        step = max(1, _CHUNK_ELEMENTS // max(1, many * (n if points is None else points)))
        for start in range(0, self.size, step):
            entries = slice(start, min(start + step, self.size))
            yield entries, jacobian[..., entries]

    def _gather(self, terms: Tensor) -> Tensor:
        summed = terms.squeeze(2) if terms.shape[2] == 1 else terms.sum(2)
        if self.places is None:
            return summed
        return summed.new_zeros(*summed.shape[:2], self.size).index_add_(2, self.places, summed)


class EmbeddingPart(Part):
    """Rows of a matrix that tokens pick.

    Args:
        tokens: Shape (n, T); negative where a position picks none. Gradients have shape (K, n, T, E).
        shape: (V, E).
        entries: See :class:`Part`.
    """

    def __init__(self, tokens: Tensor, shape: tuple[int, int], entries: Tensor | None = None) -> None:
        self.shape, self.entries = shape, entries
        self.size = shape[0] * shape[1]
        self._points = len(tokens)
        keys = torch.arange(len(tokens), device=tokens.device).unsqueeze(1) * shape[0] + tokens
        self._used = (tokens >= 0).flatten().nonzero().flatten()
        distinct, self._place = keys.flatten()[self._used].unique(return_inverse=True)
        # One row a point and token: positions of the same token add up before they are squared.
        self._point, self._token = distinct // shape[0], distinct % shape[0]

    def _rows(self, b: Tensor) -> Tensor:
        """Return a row of every point for each of its tokens, shape (K, U, E)."""
        flat = b.flatten(1, 2)[:, self._used]
        return flat.new_zeros(flat.shape[0], len(self._token), flat.shape[2]).index_add_(1, self._place, flat)

    def diagonal(self, b: Tensor, signs: Tensor) -> Tensor:
        """See :meth:`Part.diagonal`."""
        rows = torch.einsum("kue,ku->ue", self._rows(b).square(), signs[:, self._point])
        return b.new_zeros(self.shape).index_add_(0, self._token, rows).flatten()

    def total(self, b: Tensor) -> Tensor:
        """See :meth:`Part.total`."""
        return b.new_zeros(self.shape).index_add_(0, self._token, self._rows(b).sum(0)).flatten()

    def magnitude(self, b: Tensor) -> float:
        """See :meth:`Part.magnitude`."""
        return _largest(self.total(b.abs()))

    def jacobians(self, b: Tensor, points: int | None = None) -> Iterator[tuple[Entries, Tensor]]:
        """See :meth:`Part.jacobians`; of the tokens that occur."""
        return self._jacobians_of(b, self._token.unique(), self._points if points is None else points)

    def _jacobians_of(self, b: Tensor, tokens: Tensor, points: int) -> Iterator[tuple[Entries, Tensor]]:
        """Yield Jacobians of some tokens, sorted."""
        rows, width = self._rows(b), self.shape[1]
        step = max(1, _CHUNK_ELEMENTS // max(1, b.shape[0] * points * width))
        for chosen in tokens.split(step) if len(tokens) else ():
            place = torch.searchsorted(chosen, self._token).clamp(max=len(chosen) - 1)
            mine = (chosen[place] == self._token).nonzero().flatten()
            jacobian = b.new_zeros(self._points, len(chosen), b.shape[0], width)
            jacobian[self._point[mine], place[mine]] = rows[:, mine].transpose(0, 1)
            entries = (chosen.unsqueeze(1) * width + torch.arange(width, device=b.device)).flatten()
            yield entries, jacobian.transpose(1, 2).flatten(2)

    def _together(
        self, left: Tensor, right_part: Part, right: Tensor, points: int
    ) -> Iterator[tuple[Entries, Tensor, Tensor]]:
        """See :meth:`Part._together`; of the tokens that both sides have."""
        if right is left or not isinstance(right_part, EmbeddingPart):
            yield from super()._together(left, right_part, right, points)
            return
        both = self._token.unique()
        both = both[torch.isin(both, right_part._token)]
        sides = self._jacobians_of(left, both, points), right_part._jacobians_of(right, both, points)
        yield from ((entries, a, b) for (entries, a), (_, b) in zip(*sides, strict=True))


def _sum_of_outer(b: Tensor, a: Tensor) -> Tensor:
    """Return ``sum_nt b_ntc a_ntf`` of every group, flattened."""
    return torch.matmul(b.transpose(0, 1).flatten(1, 2).mT, a.transpose(0, 1).flatten(1, 2)).flatten()


def _axes_second(b: Tensor) -> Tensor:
    """Return gradients (D, n, 1, 1, C) of the axes of a vector layer as (n, D, C)."""
    return b[:, :, 0, 0].transpose(0, 1)


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0

"""Listed pairs: index tuples as a miner returns them, and pairs with a grade each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS, Relation

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class EdgeRelation(Relation):
    """Listed pairs, as the miners of pytorch-metric-learning return them; a pair listed twice counts twice.

    ``(a, p, n)`` lists for every triplet the positive pair ``{a, p}`` and the negative pair ``{a, n}``;
    ``(a1, p, a2, n)`` lists the positive pairs ``{a1, p}`` and the negative pairs ``{a2, n}``.

    Args:
        tuples: Three or four integer index tensors.
        n: Number of points.
        device: Device of the points.

    Attributes:
        i: Smaller index of every distinct pair, shape (K,).
        j: Larger index of every distinct pair, shape (K,).
        positive: How often the pair is listed as positive, shape (K,).
        negative: How often the pair is listed as negative, shape (K,).
    """

    def __init__(self, tuples: tuple[Tensor, ...], n: int, device: torch.device) -> None:
        tensors = [_indices("pairs", tensor, n, device) for tensor in tuples]
        a1, p, a2, neg = (tensors[0], tensors[1], tensors[0], tensors[2]) if len(tensors) == 3 else tensors
        if a1.shape != p.shape or a2.shape != neg.shape:
            lengths = [t.numel() for t in tensors]
            raise InputError(expected("pairs", "index tensors of equal length", f"lengths {lengths}"))
        key_pos, key_neg = _pair_keys(a1, p, n), _pair_keys(a2, neg, n)
        if n * n <= BLOCK_ELEMENTS:
            # For a batch, counting in a table of all possible pairs is faster than sorting the listed ones.
            positive, negative = (torch.bincount(keys, minlength=n * n) for keys in (key_pos, key_neg))
            keys = (positive + negative).nonzero().squeeze(1)
            self.positive, self.negative = positive[keys], negative[keys]
        else:
            keys, inverse = torch.cat([key_pos, key_neg]).unique(return_inverse=True)
            self.positive = torch.bincount(inverse[: key_pos.numel()], minlength=keys.numel())
            self.negative = torch.bincount(inverse[key_pos.numel() :], minlength=keys.numel())
        self.i, self.j = keys // max(1, n), keys % max(1, n)
        self.n = n
        self.device = device

    def counts(self) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.counts`."""
        out = []
        for weight in (self.positive, self.negative):
            count = torch.zeros(self.n, dtype=torch.int64, device=self.device)
            out.append(count.index_add(0, self.i, weight).index_add(0, self.j, weight))
        return out[0], out[1]

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.rows`."""
        first, last, _ = columns.indices(self.n)
        positive = torch.zeros(stop - start, max(0, last - first), dtype=torch.int64, device=self.device)
        negative = torch.zeros_like(positive)
        for inside, place in placed(self.i, self.j, slice(start, stop), slice(first, last)):
            positive[place], negative[place] = self.positive[inside], self.negative[inside]
        return positive, negative


class GradedPairs(Relation):
    """K pairs of points in an order of similarity. None of them is positive or negative by itself.

    Args:
        a: First point of every pair, integers, shape (K,).
        b: Second point, shape (K,). A point may be in several pairs, and a pair may be listed several times.
        grades: How similar they are, finite numbers on any scale, shape (K,); only their order counts.
        n: Number of points.
        device: Device of the points.
    """

    def __init__(self, a: Tensor, b: Tensor, grades: Tensor, n: int, device: torch.device) -> None:
        self.a, self.b = _indices("pairs (a)", a, n, device), _indices("pairs (b)", b, n, device)
        if not isinstance(grades, Tensor) or grades.layout != torch.strided or grades.is_complex():
            came = f"dtype {grades.dtype}, {grades.layout}" if isinstance(grades, Tensor) else type(grades).__name__
            raise InputTypeError(expected("pairs (grades)", "a dense tensor of numbers", came))
        if grades.ndim != 1:
            raise InputError(expected("pairs (grades)", "shape (K,)", f"shape {tuple(grades.shape)}"))
        self.grades, self.n, self.device = grades.to(device), n, device
        if not self.a.shape == self.b.shape == grades.shape:
            lengths = [len(part) for part in (a, b, grades)]
            raise InputError(expected("pairs", "a, b and grades of equal length", f"lengths {lengths}"))
        same = (self.a == self.b).nonzero().flatten()[:5].tolist()
        if same:
            hint = "Its cosine is 1 for every encoder. Leave such pairs out."
            raise InputError(expected("pairs", "two points in every pair", f"one point twice in pairs {same}", hint))
        wrong = (~self.grades.isfinite()).nonzero().flatten()[:5].tolist()
        if wrong:
            raise InputError(expected("pairs (grades)", "finite numbers", f"NaN or infinity in pairs {wrong}"))

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.rows`; all of them are positives."""
        first, last, _ = columns.indices(self.n)
        listed = torch.zeros(stop - start, max(0, last - first), dtype=torch.int64, device=self.device)
        for _, place in placed(self.a, self.b, slice(start, stop), slice(first, last)):
            listed.index_put_(place, torch.ones_like(place[0]), accumulate=True)
        return listed, torch.zeros_like(listed)


def placed(i: Tensor, j: Tensor, rows: slice, columns: slice) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Iterate over both orders of pairs (i, j), each (K,): which lie in a block of pairs, and where they lie."""
    for here, there in ((i, j), (j, i)):
        inside = (here >= rows.start) & (here < rows.stop) & (there >= columns.start) & (there < columns.stop)
        yield inside, (here[inside] - rows.start, there[inside] - columns.start)


def _pair_keys(a: Tensor, b: Tensor, n: int) -> Tensor:
    apart = a != b
    a, b = a[apart], b[apart]
    return torch.minimum(a, b) * n + torch.maximum(a, b)


def _indices(argument: str, tensor: object, n: int, device: torch.device) -> Tensor:
    """Return checked indices of n points, int64, shape (K,)."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS or tensor.layout != torch.strided:
        came = f"dtype {tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise InputTypeError(expected(argument, "integer index tensors", came))
    if tensor.ndim != 1:
        raise InputError(expected(argument, "index tensors of shape (K,)", f"shape {tuple(tensor.shape)}"))
    low, high = (int(end) for end in tensor.aminmax()) if tensor.numel() else (0, -1)
    if low < 0 or high >= n:
        raise InputError(expected(argument, f"indices in 0..{n - 1} for {n} points", f"{low}..{high}"))
    return tensor.to(device=device, dtype=torch.int64)

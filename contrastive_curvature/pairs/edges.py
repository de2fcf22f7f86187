"""Listed pairs: index tuples as a miner returns them."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS, Relation

__all__ = ["EdgeRelation"]


class EdgeRelation(Relation):
    """Listed pairs, as the miners of pytorch-metric-learning return them; a pair listed twice counts twice.

    ``(a, p, n)`` lists for every triplet the positive pair ``{a, p}`` and the negative pair ``{a, n}``;
    ``(a1, p, a2, n)`` lists the positive pairs ``{a1, p}`` and the negative pairs ``{a2, n}``.

    Args:
        tuples: Three or four integer index tensors.
        n: Number of points.
        device: Device of the points.

    Raises:
        InputTypeError: A tensor does not hold integers.
        InputError: The lengths differ, a tensor is not one-dimensional, or an index is outside ``0..n-1``.

    Attributes:
        i: Smaller index of every distinct pair, shape (K,).
        j: Larger index of every distinct pair, shape (K,).
        positive: How often the pair is listed as positive, shape (K,).
        negative: How often the pair is listed as negative, shape (K,).
    """

    def __init__(self, tuples: tuple[Tensor, ...], n: int, device: torch.device) -> None:
        for tensor in tuples:
            _check_indices(tensor, n)
        tensors = [tensor.to(device=device, dtype=torch.int64) for tensor in tuples]
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
        """Number of positive and of negative listings at every point, each (n,) int64."""
        out = []
        for weight in (self.positive, self.negative):
            count = torch.zeros(self.n, dtype=torch.int64, device=self.device)
            out.append(count.index_add(0, self.i, weight).index_add(0, self.j, weight))
        return out[0], out[1]

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """How often pairs of points ``start..stop`` with those of ``columns`` are listed, see :meth:`Relation.rows`."""
        first, last, _ = columns.indices(self.n)
        positive = torch.zeros(stop - start, max(0, last - first), dtype=torch.int64, device=self.device)
        negative = torch.zeros_like(positive)
        for here, there in ((self.i, self.j), (self.j, self.i)):
            inside = (here >= start) & (here < stop) & (there >= first) & (there < last)
            place = here[inside] - start, there[inside] - first
            positive[place], negative[place] = self.positive[inside], self.negative[inside]
        return positive, negative


def _pair_keys(a: Tensor, b: Tensor, n: int) -> Tensor:
    apart = a != b
    a, b = a[apart], b[apart]
    return torch.minimum(a, b) * n + torch.maximum(a, b)


def _check_indices(tensor: object, n: int) -> None:
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not isinstance(tensor, Tensor) or tensor.dtype not in kinds or tensor.layout != torch.strided:
        received = f"a {type(tensor).__name__}"
        if isinstance(tensor, Tensor):
            received = f"dtype {tensor.dtype}, {tensor.layout}"
        raise InputTypeError(expected("pairs", "integer index tensors", received))
    if tensor.ndim != 1:
        raise InputError(expected("pairs", "index tensors of shape (K,)", f"shape {tuple(tensor.shape)}"))
    low, high = (int(end) for end in tensor.aminmax()) if tensor.numel() else (0, -1)
    if low < 0 or high >= n:
        received = f"{low}..{high}"
        raise InputError(expected("pairs", f"indices in 0..{n - 1} for {n} points", received))

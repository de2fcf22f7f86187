"""Listed pairs with a grade each: how similar the two points are, on any scale."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.pairs.relation import Relation

__all__ = ["GradedPairs"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GradedPairs(Relation):
    """K pairs of points in an order of similarity. None of them is positive or negative by itself.

    Args:
        a: First point of every pair, integers, shape (K,).
        b: Second point, shape (K,). A point may be in several pairs, and a pair may be listed several times.
        grades: How similar they are, finite numbers, shape (K,); only their order counts.
        n: Number of points.
        device: Device of the points.

    Raises:
        InputTypeError: The indices are no integers, or the grades no numbers.
        InputError: Lengths differ, an index is outside ``0..n-1``, a point is paired with itself, or a grade is not
            finite.
    """

    def __init__(self, a: Tensor, b: Tensor, grades: Tensor, n: int, device: torch.device) -> None:
        for name, index in (("a", a), ("b", b)):
            _check_vector(f"pairs ({name})", index, "integer indices", _INTEGERS)
        _check_vector("pairs (grades)", grades, "numbers", None)
        if not a.shape == b.shape == grades.shape:
            lengths = [len(part) for part in (a, b, grades)]
            raise InputError(expected("pairs", "a, b and grades of equal length", f"lengths {lengths}"))
        self.a, self.b = (index.to(device=device, dtype=torch.int64) for index in (a, b))
        self.grades = grades.to(device)
        self.n, self.device = n, device
        for index in (self.a, self.b):
            if len(index) and (int(index.min()) < 0 or int(index.max()) >= n):
                came = f"{int(index.min())}..{int(index.max())}"
                raise InputError(expected("pairs", f"indices in 0..{n - 1} for {n} points", came))
        same = (self.a == self.b).nonzero().flatten()[:5].tolist()
        if same:
            hint = "Its cosine is 1 for every encoder. Leave such pairs out."
            raise InputError(expected("pairs", "two points in every pair", f"one point twice in pairs {same}", hint))
        wrong = (~self.grades.isfinite()).nonzero().flatten()[:5].tolist()
        if wrong:
            raise InputError(expected("pairs (grades)", "finite numbers", f"NaN or infinity in pairs {wrong}"))

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """How often pairs are listed, see :meth:`Relation.rows`, with all of them as positives."""
        first, last, _ = columns.indices(self.n)
        listed = torch.zeros(stop - start, max(0, last - first), dtype=torch.int64, device=self.device)
        for here, there in ((self.a, self.b), (self.b, self.a)):
            inside = (here >= start) & (here < stop) & (there >= first) & (there < last)
            one = torch.ones_like(here[inside])
            listed.index_put_((here[inside] - start, there[inside] - first), one, accumulate=True)
        return listed, torch.zeros_like(listed)


def _check_vector(argument: str, value: object, wanted: str, kinds: tuple[torch.dtype, ...] | None) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise InputTypeError(expected(argument, f"a dense tensor of {wanted}", f"a {type(value).__name__}"))
    if value.is_complex() or (kinds is not None and value.dtype not in kinds):
        raise InputTypeError(expected(argument, wanted, f"dtype {value.dtype}"))
    if value.ndim != 1:
        raise InputError(expected(argument, "shape (K,)", f"shape {tuple(value.shape)}"))

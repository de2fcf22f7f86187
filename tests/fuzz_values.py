"""What the fuzz tests put in: values of every kind, in place of arguments of every kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

__all__ = ["anything", "is_checked", "numbers", "outputs", "tensors"]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
FILLS = ["normal", "zeros", "ones", "nan", "inf", "one nan", "one inf", "huge", "tiny", "negative", "outlier"]

PLAIN = [
    # No large counts: they are valid, and take as long as they say.
    *(None, True, False, -1, 0, 1, 2, 3, 7, -(2**70)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "diag", "all", "0.5", "1", b"x"),
    *((), [], {}, [1, 2], (1, 2, 3), {"a": 1}, {"x": torch.ones(3, 2)}),
    # Nothing that can be called: what a function of the user's raises is the user's.
    *(object(), Exception("x"), torch.float32, torch.device("cpu"), torch.Size([2, 2]), 1j),
    *(np.float64(0.5), np.nan, np.int64(3), np.ones(3), np.ones((4, 3), dtype=np.float32)),
    *(torch.Generator(), nn.Parameter(torch.ones(2))),
]


def fill(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    constants = {"zeros": 0.0, "ones": 1.0, "nan": math.nan, "inf": math.inf, "negative": -1.0}
    scales = {"huge": 1e30, "tiny": 1e-30}
    if kind in constants:
        x = torch.full(shape, constants[kind], dtype=torch.float64)
    x = x * scales.get(kind, 1.0)
    if x.numel():
        last = x.view(-1)
        last[-1] = {"one nan": math.nan, "one inf": math.inf, "outlier": 1e15}.get(kind, float(last[-1]))
    if not (dtype.is_floating_point or dtype.is_complex):
        x = x.nan_to_num(7, 7, -7).clamp(-1e9, 1e9)
    return x.to(dtype)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Tensors of any type, shape and content; some sparse, some with a gradient, some not contiguous."""
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 12)), max_size=3)))
    x = fill(shape, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(FILLS)))
    form = draw(st.sampled_from(["plain"] * 6 + ["sparse", "gradient", "transposed", "expanded"]))
    if form == "sparse" and x.ndim:
        return x.to_sparse()
    if form == "gradient" and (x.is_floating_point() or x.is_complex()):
        return x.requires_grad_()
    if form == "transposed" and x.ndim > 1:
        return x.mT
    if form == "expanded" and x.ndim and x.shape[0]:
        return x[:1].expand_as(x)
    return x


def anything() -> st.SearchStrategy[Any]:
    """Plain values, tensors, and lists of tensors."""
    lists = st.lists(tensors(), max_size=4)
    return st.one_of(st.sampled_from(PLAIN), tensors(), lists, lists.map(tuple))


@st.composite
def outputs(draw: Any, widest: int = 5) -> Tensor:
    """Raw outputs (N, D) of finite numbers, from the smallest to the largest of their type, none of them zero."""
    n, dim = draw(st.integers(1, 12)), draw(st.integers(1, widest))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    limit = 37 if dtype is torch.float32 else 300
    exponents = [draw(st.sampled_from([0] * 8 + [-limit, -25, -12, -3, 3, 12, 25, limit])) for _ in range(n)]
    z = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    z = z * 10.0 ** torch.tensor(exponents, dtype=torch.float64)[:, None]
    z = z.to(dtype)
    z[(z == 0).all(1)] = 1
    return z


def numbers(value: Any) -> Iterable[Tensor]:
    """All tensors and numbers in a result, looked for wherever they may be."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, (bool, str, type(None), int)):
        return
    elif isinstance(value, float):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from numbers(getattr(value, field.name))


def is_checked(value: Any) -> bool:
    """Whether everything in a result is finite."""
    return all(bool(tensor.isfinite().all()) for tensor in numbers(value))

"""The layer that an encoder's embeddings are made of, where another one puts out the same numbers or nearly so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from devices import DEVICES
from tables import covering, each
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.network.encoder import Encoder, feeds

pytestmark = pytest.mark.parametrize("device", DEVICES)

WIDTH, HIDDEN, DIM = 4, 5, 3


class Head(nn.Module):
    """A trunk, a head, and what may lie beside it."""

    def __init__(self, forward: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.t, self.h = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.a, self.b = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, DIM, bias=False)
        self.square = nn.Linear(DIM, DIM)
        nn.init.zeros_(self.b.weight)
        self.m = copy.deepcopy(self.h)
        self.alpha, self.centre = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(DIM))
        self.temperature = nn.Parameter(torch.tensor(2.3))
        self.ones = nn.Parameter(torch.ones(DIM))
        self.cache: Tensor | None = None
        self.kept: Tensor | None = None
        self.made = forward

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.t(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self, x)


def with_momentum(s: Head, x: Tensor) -> Tensor:
    out, s.kept = s.h(s.hidden(x)), s.hidden(x)
    s.cache = s.m(s.hidden(x))
    return out


BESIDE: dict[str, Callable[[Head, Tensor], Tensor]] = {
    "adapter": lambda s, x: s.h(s.hidden(x)) + s.b(s.a(s.hidden(x))),
    "rezero": lambda s, x: s.h(s.hidden(x)) + s.alpha * s.square(s.h(s.hidden(x))),
    "centre": lambda s, x: s.h(s.hidden(x)) - s.centre,
    "scale of every dimension": lambda s, x: s.h(s.hidden(x)) * s.ones,
}


def points(device: str, n: int = 6) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


@each("kind", BESIDE)
def test_what_adds_nothing_yet_is_not_overlooked(device: str, kind: str) -> None:
    raw, x = BESIDE[kind], points(device)
    with pytest.raises(cc.UnsupportedError, match="no module at its end does it"):
        Encoder(Head(lambda s, x: F.normalize(raw(s, x), dim=1)).to(device), x)
    # The module L2Norm takes what is behind the addition, so that every parameter has its part.
    model = Head(lambda s, x: s.normalize(raw(s, x)))
    model.normalize = cc.L2Norm()
    torch.testing.assert_close(Encoder(model.to(device), x)(x), raw(model, x))
    plain = Encoder(Head(raw).to(device), x)
    assert plain.last_layer_name is None
    with pytest.raises(cc.UnsupportedError, match="no linear layer computes the raw outputs"):
        plain.require_last_layer()


@covering(1, frozen=[False, True], end=["function", "module", "none"])
def test_a_momentum_copy_is_not_the_head(device: str, end: str, frozen: bool) -> None:
    ends: dict[str, Callable[[Head, Tensor], Tensor]] = {
        "function": lambda s, x: F.normalize(with_momentum(s, x), dim=1),
        "module": lambda s, x: s.normalize(with_momentum(s, x)),
        "none": with_momentum,
    }
    model, x = Head(ends[end]), points(device)
    model.normalize = cc.L2Norm()
    model.to(device).m.requires_grad_(False)
    model.requires_grad_(not frozen)
    modes = [p.requires_grad for p in model.parameters()]
    encoder = Encoder(model, x)
    # What it keeps has no graph, which could not be copied.
    copy.deepcopy(model)
    assert encoder.last_layer_name == "h"
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), model.h(model.hidden(x)))
    assert [p.requires_grad for p in model.parameters()] == modes


def test_a_learned_temperature_may_lie_beside_the_layer(device: str) -> None:
    model = Head(lambda s, x: s.temperature.exp() * F.normalize(s.h(s.hidden(x)), dim=1)).to(device)
    x = points(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        encoder = Encoder(model.to(dtype), x.to(dtype))
        assert encoder.last_layer_name == "h"
        torch.testing.assert_close(encoder(x.to(dtype)), model.h(model.hidden(x.to(dtype))).float())


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_told_from_another_vector(device: str, dtype: torch.dtype) -> None:
    z = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for unit in (F.normalize(z, dim=1), z / z.norm(dim=1, keepdim=True), F.normalize(z.float(), dim=1).to(dtype)):
        assert feeds(z, unit)
        assert feeds(z.float(), unit.float())
        assert feeds(z, 10 * unit)
    moved = F.normalize(z, dim=1)
    moved[3, 5] *= 1 + 8 * torch.finfo(dtype).eps
    assert not feeds(z, moved)


class Scaled(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return 10 * F.normalize(z, dim=1)


@each("kind, rows", [("function", 1), ("function", 3), ("module", 1)])
def test_a_scaled_normalisation_is_seen_in_one_point(device: str, kind: str, rows: int) -> None:
    model = Head(lambda s, x: s.scaled(s.h(s.hidden(x))))
    model.scaled = Scaled() if kind == "module" else Scaled().forward
    x = points(device)
    model.to(device)
    encoder = Encoder(model, x[:1].expand(rows, -1))
    assert encoder.last_layer_name == "h"
    torch.testing.assert_close(encoder(x), model.h(model.hidden(x)))
    # Without a normalisation, one point has raw outputs of some norm.
    plain = Encoder(Head(lambda s, x: s.h(s.hidden(x))).to(device), x[:1])
    assert plain.last_layer_name == "h"
    assert not plain.normalizes_inside
    with pytest.raises(cc.UnsupportedError, match="has norm 10, and no module at its end does it"):
        Encoder(Head(lambda s, x: 10 * F.normalize(s.h(s.hidden(x)).exp(), dim=1)).to(device), x[:1])
    # Of two runs of the head, one only for the norm, neither is all that the embeddings are made of.
    twice = Head(lambda s, x: s.h(s.hidden(x)) / s.h(s.hidden(x)).norm(dim=1, keepdim=True)).to(device)
    for batch in (x[:1], x):
        with pytest.raises(cc.UnsupportedError, match="has norm 1, and no module at its end does it"):
            Encoder(twice, batch)

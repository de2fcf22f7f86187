"""Kronecker factors that keep cross terms, against sums over the pairs one by one, and where they are exact."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from strategies import close, options, pair_kinds
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.options import Structure
from contrastive_curvature.testing import dense_ggn, dense_output_hessian
from contrastive_curvature.testing.cases import Case, truth_and_size

pytestmark = pytest.mark.parametrize("device", DEVICES)

COUPLED = ("positive", "full")


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    seed, n, dim = draw(st.integers(0, 2**16)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, dim)).double()
    generator = torch.Generator().manual_seed(seed)
    labels, pairs = draw(pair_kinds(n, generator))
    chosen = {**draw(options), "pd_fix": draw(st.sampled_from(COUPLED))}
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    return model, x, {"labels": labels, "pairs": pairs, **chosen}


def pair_hessian(z: Tensor, i: int, j: int, y: float, distance: str) -> Tensor:
    """Hessian of one pair of weight ``y``, (2, D, 2, D), by the oracle."""
    one = torch.tensor([0]), torch.tensor([1])
    attract = dense_output_hessian(
        z[[i, j]], pairs=(*one, *(t[:0] for t in one)), distance=distance, pd_fix="full", normalization="sum"
    )
    return (y / 0.5 * attract).view(2, z.shape[1], 2, z.shape[1])


def factors_by_pairs(a: Tensor, b: Tensor, z: Tensor, y: Tensor, distance: str) -> tuple[Tensor, Tensor, float]:
    """``G`` (the bias block too), ``A`` and the size of the terms, from the definitions."""
    g = z.new_zeros(b.shape[2], b.shape[2])
    second, total, size = a.new_zeros(a.shape[1], a.shape[1]), 0.0, 0.0
    for i, j in combinations(range(len(z)), 2):
        if not y[i, j]:
            continue
        h = pair_hessian(z, i, j, float(y[i, j]), distance)
        both = torch.cat([b[i], b[j]])
        summed = both.T @ h.reshape(len(both), -1) @ both
        g += summed
        mean = (a[i] + a[j]) / 2
        second += torch.outer(mean, mean)
        total += 1
        # In one dimension the Hessian itself is a cancellation to zero.
        size += float(y[i, j].abs() / min(z[i].norm(), z[j].norm()) ** 2 * both.square().sum())
    return g, second / total if total else a.T @ a / len(a), size


@given(drawn=networks(), last=st.booleans())
def test_factors_are_those_of_the_pairs_one_by_one(drawn: Any, last: bool, device: str) -> None:
    model, x, case = drawn
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.items()}
    if isinstance(case["pairs"], tuple):
        moved["pairs"] = tuple(t.to(device) for t in case["pairs"])
    part = "last_layer" if last else "all"
    kwargs = {"structure": "kron", "subset_of_weights": part, "kfac_approx": "reduce", "clamp": False}
    found = cc.ggn(model.to(device), x.to(device), **kwargs, **moved)
    model = model.cpu()
    hidden, z = model[1](model[0](x)).detach(), model(x).detach()
    y = cc.output_hessian(z, **case).derivatives.dense()[0]
    through = [torch.autograd.functional.jacobian(model[1:], h) for h in model[0](x).detach()]
    eye = torch.eye(z.shape[1], dtype=torch.float64).expand(len(x), -1, -1)
    layers = [(hidden, eye)] if last else [(x, torch.stack(through)), (hidden, eye)]
    assert len(found) == 2 * len(layers)
    for k, (a, b) in enumerate(layers):
        g, second, size = factors_by_pairs(a, b, z, y, case["distance"])
        assert close(found[2 * k][0].cpu(), g, size)
        assert close(found[2 * k][1].cpu(), second, float(a.square().max()))
        assert close(found[2 * k + 1][0].cpu(), g, size)


class Gate(nn.Module):
    """A layer whose inputs are the same for all points."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.new_tensor([1.0, -2.0, 0.5]).expand(len(x), 3)) * x


@covering(1, pd_fix=COUPLED, distance=["arccos", "euclidean"])
def test_reduce_is_exact_where_all_points_share_the_inputs(pd_fix: str, distance: str, device: str) -> None:
    torch.manual_seed(0)
    model, x, y = Gate().double(), torch.randn(5, 2, dtype=torch.float64) + 2, torch.tensor([0, 0, 1, 1, 1])
    truth = dense_ggn(model, x, y, pd_fix=pd_fix, distance=distance, margin=None)
    kwargs = {"pd_fix": pd_fix, "distance": distance, "margin": None, "structure": "kron", "clamp": False}
    model = model.to(device)
    (g, a), (bias,) = cc.ggn(model, x.to(device), y.to(device), kfac_approx="reduce", **kwargs)
    assert close(torch.kron(g, a).cpu(), truth[:6, :6])
    assert close(bias.cpu(), truth[6:, 6:])
    (g, a), _ = cc.ggn(model, x.to(device), y.to(device), **kwargs)
    assert not torch.allclose(torch.kron(g, a).cpu(), truth[:6, :6], rtol=0.1)


@given(seed=st.integers(0, 99), fix=st.sampled_from(COUPLED))
def test_vectors_of_other_modules_are_exact(seed: int, fix: str, device: str) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.LayerNorm(3), nn.Linear(3, 2)
    ).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1])
    chosen = {"pd_fix": fix, "negative_weight": 0.5, "normalization": "anchor"}
    truth, size = truth_and_size(model, x, Case(model(x).detach(), y, None, chosen))
    model = model.to(device)
    kwargs = {"pd_fix": fix, "structure": "kron", "clamp": False, "kfac_approx": "reduce"}
    found = cc.ggn(model, x.to(device), y.to(device), **kwargs)
    start = 0
    for p, group in zip(model.parameters(), found, strict=True):
        if p.ndim == 1:
            assert close(group[0].cpu(), truth[start : start + len(p)][:, start : start + len(p)], size)
        else:
            assert float(torch.linalg.eigvalsh(group[1])[0]) >= -1e-12 * float(group[1].abs().max())
        start += p.numel()


def test_batches_add_up(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().to(device)
    x, y = torch.randn(8, 4, dtype=torch.float64, device=device), torch.arange(8, device=device) % 2
    backend = ContrastiveGGN(model, pd_fix="full", kfac_approx="reduce", pairs="batch")
    # Of batches that are made up alike, none stands for more than its own points.
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    out = backend.fit(loader, Structure.KRON).curvature
    parts = [cc.ggn(model, *b, structure="kron", pd_fix="full", kfac_approx="reduce", clamp=False) for b in loader]
    for total, first, second in zip(out, *parts, strict=True):
        assert close(total[0], first[0] + second[0])
        if len(total) == 2:
            assert close(total[1], (first[1] + second[1]) / 2)


@pytest.mark.parametrize("pd_fix", COUPLED)
def test_a_data_set_has_the_factors_of_one_batch(pd_fix: str, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().to(device)
    x, y = torch.randn(6, 4, dtype=torch.float64, device=device), torch.tensor([0, 0, 1, 0, 0, 1], device=device)
    out = ContrastiveGGN(model, pd_fix=pd_fix).fit([(x[:4], y[:4]), (x[4:], y[4:])], Structure.KRON).curvature
    truth = cc.ggn(model, x, y, structure="kron", pd_fix=pd_fix, clamp=False)
    assert all(close(f, g) for u, v in zip(out, truth, strict=True) for f, g in zip(u, v, strict=True))


@each(
    "options, kind, words",
    [
        ({"pd_fix": "fixed"}, cc.UnsupportedError, r"drops the cross terms.*expand"),
        ({"structure": "diag"}, cc.InputError, "structure='kron'"),
        ({"subset_of_weights": torch.tensor([0, 2])}, cc.UnsupportedError, "subnetwork"),
        ({"kfac_approx": "eigen"}, cc.InputError, "kfac_approx: expected one of 'expand', 'reduce'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], words: str, device: str) -> None:
    model, x, y = nn.Linear(3, 2).to(device), torch.randn(4, 3, device=device), torch.arange(4, device=device) % 2
    with pytest.raises(kind, match=words):
        cc.ggn(model, x, y, **{"structure": "kron", "kfac_approx": "reduce", "pd_fix": "full", **options})
    with pytest.raises(cc.UnsupportedError, match="pairs='batch'"):
        ContrastiveGGN(model, kfac_approx="reduce", pd_fix="full")

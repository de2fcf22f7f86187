"""Covariances kept as their parts: every figure of an embedding against that of the dense matrices."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.embedding.known import components
from contrastive_curvature.embedding.spread import Axes, Dense


def parts(n: int, dim: int, common: bool, size: float = 1.0, device: str = "cpu") -> Axes:
    like = {"dtype": torch.float64, "device": device}
    axes = torch.linalg.qr(torch.randn(dim, dim, **like))[0]
    root = torch.randn(dim, dim, **like)
    values, shared = size * torch.rand(n, dim, **like), size * root @ root.T if common else None
    return Axes(axes, values, shared, torch.float64)


def by_hand(made: Axes) -> Tensor:
    wide = torch.stack([made.axes @ v.diag() @ made.axes.T for v in made.values.unbind()] or [made.axes[:0, :0]])
    wide = wide if len(made.values) else made.values.new_zeros(0, *made.axes.shape)
    return wide if made.common is None else wide + made.common


@given(n=st.integers(0, 5), dim=st.integers(2, 7), common=st.booleans(), size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_every_figure_is_that_of_the_dense_covariances(device, n, dim, common, size) -> None:
    made = parts(n, dim, common, size, device)
    z = torch.randn(n, dim, dtype=torch.float64, device=device)
    out = cc.EmbeddingDistribution.trusted(z, made).relative_to(2.0)
    truth = cc.EmbeddingDistribution.trusted(z, Dense(by_hand(made))).relative_to(2.0)
    for name in ("variance", "tangential_variance", "uncertainty", "kappa", "mu", "covariance"):
        torch.testing.assert_close(getattr(out, name), getattr(truth, name), rtol=1e-9, atol=1e-12 * size)
    norm = z.norm(dim=1)
    u = z / norm.unsqueeze(1)
    tangential = torch.eye(dim, dtype=z.dtype, device=device) - u.unsqueeze(2) * u.unsqueeze(1)
    across = (tangential @ by_hand(made)).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(out.tangential_variance * norm.square(), across, rtol=1e-9, atol=1e-12 * size)
    torch.testing.assert_close(components(out), components(truth), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(copy.deepcopy(out).covariance, truth.covariance)


def test_no_dense_covariance_is_made_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    out = cc.EmbeddingDistribution.trusted(torch.randn(5, 3).double(), parts(5, 3, True)).relative_to(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Axes, "covariance", property(lambda _: pytest.fail("made")))
        assert out.uncertainty.shape == out.kappa.shape == (5,)
        assert components(out).shape == (5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("common", [False, True])
def test_components_are_finite_at_every_extreme(dtype: torch.dtype, common: bool) -> None:
    most, least = min(torch.finfo(dtype).max, 1e150), max(torch.finfo(dtype).tiny, 1e-150)
    for size in (0.0, least, most / 8):
        values = torch.full((2, 3), size, dtype=dtype)
        made = Axes(torch.eye(3, dtype=dtype), values, values[0].diag() if common else None, dtype)
        for length in (0.0, least, most / 4):
            z = torch.full((2, 3), length, dtype=dtype)
            assert components(cc.EmbeddingDistribution.trusted(z, made)).isfinite().all()


def test_overflow_is_refused_where_an_entry_overflows() -> None:
    most = torch.finfo(torch.float32).max
    z = torch.ones(1, 3)
    fine = Axes(torch.eye(3), torch.full((1, 3), 0.9 * most), None, torch.float32)
    assert cc.EmbeddingDistribution.trusted(z, fine).covariance.isfinite().all()
    for bad in (torch.full((1, 3), torch.inf), torch.tensor([[1.0, torch.nan, 1.0]])):
        with pytest.raises(cc.InputError, match=r"covariance.*finite numbers"):
            cc.EmbeddingDistribution.trusted(z, Axes(torch.eye(3), bad, None, torch.float32))

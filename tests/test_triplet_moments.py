"""Moments of tau: against the exact quadratic form, against samples, and what the documents print."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.triplet import tau_moments

Embedding = tuple[Tensor, Tensor]


def embeddings(
    seed: int, dim: int, batch: tuple[int, ...] = (), *, isotropic: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Embedding, Embedding, Embedding]:
    generator = torch.Generator().manual_seed(seed)
    width = 1 if isotropic else dim

    def one() -> Embedding:
        mean = torch.randn(*batch, dim, generator=generator, dtype=torch.float64)
        return mean.to(dtype), torch.randn(*batch, width, generator=generator, dtype=torch.float64).abs().to(dtype)

    return one(), one(), one()


def quadratic_form(*three: Embedding) -> tuple[float, float]:
    """Mean and variance of tau = x^T Q x with x = (a, p, n), from traces (float64, one triplet)."""
    mu = torch.cat([mean.double() for mean, _ in three])
    sigma = torch.diag(torch.cat([variance.double().expand_as(mean) for mean, variance in three]))
    per_dimension = torch.tensor([[0.0, -1, 1], [-1, 1, 0], [1, 0, -1]], dtype=torch.float64)
    q = torch.kron(per_dimension, torch.eye(len(mu) // 3, dtype=torch.float64))
    spread = q @ sigma
    return (spread.trace() + mu @ q @ mu).item(), (2 * (spread @ spread).trace() + 4 * mu @ q @ sigma @ q @ mu).item()


@given(st.integers(0, 10**6), st.integers(1, 12), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_moments_are_those_of_the_quadratic_form(seed: int, dim: int, isotropic: bool, dtype: torch.dtype) -> None:
    three = embeddings(seed, dim, isotropic=isotropic, dtype=dtype)
    moments = tau_moments(*three)
    mean, variance = quadratic_form(*three)
    precise = 1e-12 if dtype == torch.float64 else 1e-6
    scale = math.sqrt(variance) + abs(mean)
    assert moments.mean.dtype == moments.variance.dtype == dtype
    assert moments.mean.item() == pytest.approx(mean, rel=precise, abs=precise * scale)
    assert moments.variance.item() == pytest.approx(variance, rel=precise)


def test_certain_embeddings_close_to_each_other_lose_nothing() -> None:
    # In float32 the expanded polynomial gives negative variances here.
    generator = torch.Generator().manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(200, 64, generator=generator), dim=-1)
    means = torch.nn.functional.normalize(start + 0.0125 * torch.randn(3, 200, 64, generator=generator), dim=-1)
    three = [(mean, torch.full((200, 1), 1e-8)) for mean in means]
    exact = tau_moments(*[(mean.double(), variance.double()) for mean, variance in three])
    moments = tau_moments(*three)
    torch.testing.assert_close(moments.variance.double(), exact.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(moments.mean.double(), exact.mean, rtol=1e-6, atol=1e-7)


def test_batches_broadcast() -> None:
    a, p, n = embeddings(0, 4, (3, 1))[0], embeddings(1, 4, (3, 1))[0], embeddings(2, 4, (3, 5))[0]
    moments = tau_moments(a, p, n)
    assert moments.mean.shape == (3, 5)
    single = tau_moments((a[0][1, 0], a[1][1, 0]), (p[0][1, 0], p[1][1, 0]), (n[0][1, 2], n[1][1, 2]))
    torch.testing.assert_close((moments.mean[1, 2], moments.variance[1, 2]), tuple(single))


@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_gradients(seed: int, dim: int, isotropic: bool) -> None:
    flat = [t.requires_grad_() for pair in embeddings(seed, dim, (2,), isotropic=isotropic) for t in pair]

    def moments(*t: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(tau_moments(t[0:2], t[2:4], t[4:6]))

    assert torch.autograd.gradcheck(moments, flat)


GOOD = (torch.zeros(2, 3), torch.ones(2, 3))


@each(
    "bad, says",
    [
        ((torch.zeros(2, 3), torch.ones(2, 2)), "variance of positive: expected shape"),
        ((torch.zeros(2, 4), torch.ones(2, 4)), "one dimension D, got anchor 3, positive 4"),
        ((torch.zeros(2, 3), -torch.ones(2, 3)), "variance of positive: expected variances >= 0, got -1.0"),
        ((torch.full((2, 3), math.nan), torch.ones(2, 3)), "mean of positive: expected finite"),
        ((torch.full((2, 3), 1e30), torch.ones(2, 3)), "overflows"),
    ],
)
def test_bad_values(bad: Embedding, says: str) -> None:
    with pytest.raises(InputError, match=says):
        tau_moments(GOOD, bad, GOOD)

"""Moments of tau: against the exact quadratic form, against samples, and what the documents print."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
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


def printed_variance(*three: Embedding, poster: bool) -> Tensor:
    """The printed variances per dimension, summed: listing 2 of the supplement, or step 6 of the poster."""
    (a, va), (p, vp), (n, vn) = three
    if poster:
        half = vp * (vp + 2 * p**2) + vn * (vn + 2 * n**2) - 4 * va * p * n
        half = half - 2 * a * (a * (p**2 + n**2) - 2 * p * vp - 2 * n * vn)
        return (2 * (half + 2 * (va + a**2) * ((vp + p**2) + (vn + n**2)))).sum(-1)
    t1 = vp**2 + 2 * p**2 * vp + 2 * (va + a**2) * (vp + p**2) - 2 * a**2 * p**2 - 4 * a * p * vp
    t2 = vn**2 + 2 * n**2 * vn + 2 * (va + a**2) * (vn + n**2) - 2 * a**2 * n**2 - 4 * a * n * vn
    return (2 * t1 + 2 * t2 - 2 * (4 * p * n * va)).sum(-1)


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


@pytest.mark.parametrize("dim", [1, 3, 32])
@pytest.mark.parametrize("isotropic", [True, False])
def test_moments_are_those_of_samples(dim: int, isotropic: bool) -> None:
    three = embeddings(dim, dim, isotropic=isotropic)
    moments = tau_moments(*three)
    count = 40_000
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(3, count, dim, generator=generator, dtype=torch.float64)
    a, p, n = (mean + variance.sqrt() * e for (mean, variance), e in zip(three, noise, strict=True))
    tau = (a - p).square().sum(1) - (a - n).square().sum(1)
    centred = tau - moments.mean
    # Errors of a sampled mean and of a sampled second moment around the known mean; 4 of them each.
    assert abs(centred.mean()) < 4 * tau.std() / math.sqrt(count)
    assert abs(centred.square().mean() - moments.variance) < 4 * centred.square().std() / math.sqrt(count)


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_the_listing_prints_the_right_variance_and_the_poster_does_not(seed: int, dim: int) -> None:
    three = embeddings(seed, dim)
    (a, _), (p, vp), (n, vn) = three
    right = tau_moments(*three).variance
    torch.testing.assert_close(printed_variance(*three, poster=False), right, rtol=1e-9, atol=1e-9)
    error = 16 * (a * (p * vp + n * vn)).sum()  # two signs on the poster
    torch.testing.assert_close(printed_variance(*three, poster=True) - right, error, rtol=1e-9, atol=1e-9)


def test_the_variance_of_the_poster_moves_with_the_origin() -> None:
    three = embeddings(0, 4)
    moved = tuple((mean + 3, variance) for mean, variance in three)
    torch.testing.assert_close(tau_moments(*moved), tau_moments(*three), rtol=1e-12, atol=1e-12)
    before, after = printed_variance(*three, poster=True), printed_variance(*moved, poster=True)
    assert after > 2 * before


def test_the_poster_is_far_off_where_the_embeddings_agree() -> None:
    dim = 2048
    one = (torch.full((dim,), dim**-0.5, dtype=torch.float64), torch.tensor([1e-4], dtype=torch.float64))
    right, printed = tau_moments(one, one, one).variance, printed_variance(one, one, one, poster=True)
    assert right.item() == pytest.approx(12 * dim * 1e-8)
    assert printed.item() == pytest.approx(right.item() + 32 * 1e-4)  # 14 times too large


def test_certain_embeddings_close_to_each_other_lose_nothing() -> None:
    # In float32 the printed polynomial gives negative variances here.
    generator = torch.Generator().manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(200, 64, generator=generator), dim=-1)
    means = torch.nn.functional.normalize(start + 0.0125 * torch.randn(3, 200, 64, generator=generator), dim=-1)
    three = [(mean, torch.full((200, 1), 1e-8)) for mean in means]
    exact = tau_moments(*[(mean.double(), variance.double()) for mean, variance in three])
    moments = tau_moments(*three)
    assert (printed_variance(*three, poster=False) < 0).float().mean() > 0.2
    torch.testing.assert_close(moments.variance.double(), exact.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(moments.mean.double(), exact.mean, rtol=1e-6, atol=1e-7)


@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([(), (0,), (1,), (3,), (2, 1)]))
def test_isotropic_is_diagonal_with_equal_entries(seed: int, dim: int, batch: tuple[int, ...]) -> None:
    three = embeddings(seed, dim, batch, isotropic=True)
    moments = tau_moments(*three)
    spread = tau_moments(*[(mean, variance.expand_as(mean)) for mean, variance in three])
    assert moments.mean.shape == moments.variance.shape == batch
    torch.testing.assert_close(moments, spread, rtol=1e-12, atol=1e-12)


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


def test_half_precision_is_returned_as_float32() -> None:
    three = embeddings(0, 4, dtype=torch.float16)
    assert tau_moments(*three).variance.dtype == torch.float32


GOOD = (torch.zeros(2, 3), torch.ones(2, 3))


@each(
    "bad, says",
    [
        ((torch.zeros(2, 3), torch.ones(2, 2)), "variance of positive: expected shape"),
        ((torch.zeros(2, 3), torch.ones(2)), "variance of positive: expected shape"),
        ((torch.zeros(2, 0), torch.ones(2, 0)), "mean of positive: expected shape"),
        ((torch.zeros(2, 4), torch.ones(2, 4)), "one dimension D, got anchor 3, positive 4"),
        ((torch.zeros(4, 3), torch.ones(4, 3)), "shapes that broadcast"),
        ((torch.zeros(2, 3), -torch.ones(2, 3)), "variance of positive: expected variances >= 0, got -1.0"),
        ((torch.full((2, 3), math.nan), torch.ones(2, 3)), "mean of positive: expected finite"),
        ((torch.zeros(2, 3), torch.full((2, 3), math.inf)), "variance of positive: expected finite"),
        ((torch.full((2, 3), 1e30), torch.ones(2, 3)), "overflows"),
    ],
)
def test_bad_values(bad: Embedding, says: str) -> None:
    with pytest.raises(InputError, match=says):
        tau_moments(GOOD, bad, GOOD)


@each("bad", [torch.zeros(2, 3), GOOD[:1], (GOOD[0], None), (GOOD[0].long(),) * 2])
def test_bad_types(bad: object) -> None:
    with pytest.raises(InputTypeError, match="positive"):
        tau_moments(GOOD, bad, GOOD)

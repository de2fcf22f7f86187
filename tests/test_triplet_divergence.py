"""Divergences to the prior: Gaussian to Gaussian, von Mises-Fisher to uniform."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from tables import each
from torch import Tensor

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.triplet import kl_to_normal, kl_to_uniform


def f64(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normals(seed: int, *shape: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return mean, torch.randn(*shape[:-1], width, generator=generator, dtype=torch.float64).exp()


@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.sampled_from([(), (0,), (1,), (2, 3)]),
    st.booleans(),
    st.floats(0.01, 100),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_gaussian_is_the_divergence_of_torch(
    seed: int, dim: int, batch: tuple[int, ...], isotropic: bool, prior: float, dtype: torch.dtype
) -> None:
    mean, variance = (t.to(dtype) for t in normals(seed, *batch, dim, width=1 if isotropic else dim))
    result = kl_to_normal(mean, variance, prior)
    assert result.shape == batch
    assert result.dtype == dtype
    p = torch.distributions.Normal(mean.double(), variance.double().sqrt().expand_as(mean))
    q = torch.distributions.Normal(torch.zeros_like(p.mean), math.sqrt(prior))
    right = torch.distributions.kl_divergence(p, q).sum(-1)
    precise = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(result.double(), right, rtol=precise, atol=precise)


@pytest.mark.parametrize("x", [1e-12, -1e-9, 1e-5, -1e-3, 0.3, 0.4999999, 0.5000001, -0.4999999, -0.5000001, -1 + 1e-9])
def test_gaussian_close_to_the_prior_keeps_its_digits(x: float) -> None:
    variance = f64([1 + x]).requires_grad_()
    exact = variance.item() - 1  # what 1 + x became
    result = kl_to_normal(torch.zeros(1, dtype=torch.float64), variance)
    (gradient,) = torch.autograd.grad(result, variance)
    with mpmath.workdps(50):
        right = float((mpmath.mpf(exact) - mpmath.log1p(mpmath.mpf(exact))) / 2)
    assert result.item() == pytest.approx(right, rel=1e-13, abs=0)
    assert gradient.item() == pytest.approx(exact / (1 + exact) / 2, rel=1e-13, abs=0)


def test_gaussian_agrees_with_samples() -> None:
    mean, variance = normals(0, 5, width=5)
    prior, count = 2.0, 20_000
    noise = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, other = torch.distributions.Normal(mean, variance.sqrt()), torch.distributions.Normal(0.0, math.sqrt(prior))
    samples = mean + variance.sqrt() * noise
    terms = (own.log_prob(samples) - other.log_prob(samples)).sum(1)
    assert abs(terms.mean() - kl_to_normal(mean, variance, prior)) < 4 * terms.std() / math.sqrt(count)


@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_gaussian_gradients(seed: int, dim: int, isotropic: bool) -> None:
    inputs = [t.requires_grad_() for t in normals(seed, 2, dim, width=1 if isotropic else dim)]
    assert torch.autograd.gradcheck(kl_to_normal, inputs)
    assert torch.autograd.gradgradcheck(kl_to_normal, inputs)


@each(
    "variance, prior, says",
    [
        (torch.zeros(2, 3), 1.0, "variance: expected variances > 0, got 6 zeros"),
        (-torch.ones(2, 3), 1.0, "variance: expected variances >= 0"),
        (torch.ones(2), 1.0, "variance: expected shape"),
        (torch.ones(2, 3), 0.0, "prior_variance: expected a finite number > 0"),
        (torch.ones(2, 3), -1.0, "prior_variance"),
        (torch.ones(2, 3), math.inf, "prior_variance"),
        (torch.ones(2, 3), torch.tensor(1.0), "prior_variance"),
    ],
)
def test_gaussian_refuses(variance: Tensor, prior: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        kl_to_normal(torch.zeros(2, 3), variance, prior)


def reference(kappa: float, dim: int) -> float:
    """``kappa A - log 0F1(; D/2; kappa^2 / 4)`` to 50 digits."""
    with mpmath.workdps(50):
        k, order = mpmath.mpf(kappa), mpmath.mpf(dim) / 2 - 1
        if k == 0:
            return 0.0
        bessel = mpmath.besseli(order, k)
        growth = mpmath.log(bessel) + mpmath.loggamma(order + 1) - order * mpmath.log(k / 2)
        return float(k * mpmath.besseli(order + 1, k) / bessel - growth)


@pytest.mark.parametrize("dim", [2, 3, 5, 64, 513, 4096])
@pytest.mark.parametrize("kappa", [0.0, 1e-9, 1e-3, 1.0, 1.999999, 2.000001, 30.0, 90.4, 90.6, 1e3, 1e5])
def test_uniform_against_mpmath(dim: int, kappa: float) -> None:
    assert kl_to_uniform(f64(kappa), dim).item() == pytest.approx(reference(kappa, dim), rel=1e-12, abs=0)


@given(st.integers(2, 4096), st.floats(0, 5), st.sampled_from([torch.float32, torch.float64]))
def test_uniform_is_the_divergence_to_concentration_zero(dim: int, exponent: float, dtype: torch.dtype) -> None:
    kappa = torch.tensor([0.0, 10**exponent - 1], dtype=dtype)
    mu = torch.ones(dim, dtype=torch.float64)
    other = vmf.kl_divergence(mu, kappa.double(), mu, f64(0.0))
    result = kl_to_uniform(kappa, dim)
    assert result.dtype == dtype
    precise = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(result.double(), other, rtol=precise, atol=1e-9)
    assert result[0] == 0
    assert result[1] >= 0


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("kappa", [0.0, 0.3, 7.0, 80.0])
def test_uniform_agrees_with_quadrature(dim: int, kappa: float) -> None:
    def height(angle: float) -> float:
        return math.exp(kappa * (math.cos(angle) - 1)) * math.sin(angle) ** (dim - 2)

    total = quad(height, 0, math.pi, epsabs=1e-13, epsrel=1e-12)[0]
    area = quad(lambda angle: math.sin(angle) ** (dim - 2), 0, math.pi)[0]

    def term(angle: float) -> float:  # density times the logarithm of density over uniform density
        return height(angle) / total * (kappa * (math.cos(angle) - 1) - math.log(total / area))

    right = quad(term, 0, math.pi, epsabs=1e-13, epsrel=1e-12)[0]
    assert kl_to_uniform(f64(kappa), dim).item() == pytest.approx(right, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("dim", "kappa"), [(16, 4.0), (16, 200.0), (512, 100.0), (512, 5000.0)])
def test_uniform_agrees_with_samples(dim: int, kappa: float) -> None:
    count, mu = 2000, torch.nn.functional.one_hot(torch.tensor(1), dim).double()
    draws = vmf.sample(mu, f64(kappa), count, generator=torch.Generator().manual_seed(0))
    terms = vmf.log_prob(draws, mu, f64(kappa)) - vmf.log_normalizer(f64(0.0), dim)
    assert abs(terms.mean() - kl_to_uniform(f64(kappa), dim)) < 4 * terms.std() / math.sqrt(count)


@given(st.integers(2, 4096), st.floats(0, 4))
def test_uniform_gradients(dim: int, exponent: float) -> None:
    kappa = f64([10**exponent - 0.9]).requires_grad_()

    def function(k: Tensor) -> Tensor:
        return kl_to_uniform(k, dim)

    eps = 1e-5 * (1 + kappa.item())
    assert torch.autograd.gradcheck(function, kappa, eps=eps, rtol=1e-4, atol=1e-7, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, kappa, eps=eps, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dim", [2, 3, 4096])
def test_uniform_at_zero_has_the_limit_of_its_derivatives(dim: int) -> None:
    kappa = f64(0.0).requires_grad_()
    (first,) = torch.autograd.grad(kl_to_uniform(kappa, dim), kappa, create_graph=True)
    (second,) = torch.autograd.grad(first, kappa)
    assert first.item() == 0
    assert second.item() == pytest.approx(1 / dim, rel=1e-12)


def test_uniform_is_not_what_the_listing_prints() -> None:
    for dim in (2, 3, 128):
        kappa = torch.logspace(-2, 5, 50, dtype=torch.float64)
        right, printed = kl_to_uniform(kappa, dim), kappa - dim * math.log(2)
        assert (right >= 0).all()
        assert printed[0] < -1.3  # a divergence is not negative
        assert printed[-1] > 100 * right[-1]  # (D - 1)/2 log kappa against kappa
    doubled = kl_to_uniform(f64([1e5, 2e5]), 128)
    assert (doubled[1] - doubled[0]).item() == pytest.approx(127 / 2 * math.log(2), rel=1e-3)


@each(
    "kappa, dim, error",
    [
        (f64(-1.0), 3, InputError),
        (f64(math.nan), 3, InputError),
        (f64(1.0), 1, InputError),
        (f64(1.0), 3.0, InputTypeError),
        (1.0, 3, InputTypeError),
    ],
)
def test_uniform_refuses(kappa: Tensor, dim: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"kappa|dim"):
        kl_to_uniform(kappa, dim)

"""Divergences to the prior: Gaussian to Gaussian, von Mises-Fisher to uniform."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import each
from torch import Tensor

from contrastive_curvature.errors import InputError
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


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_gaussian_gradients(seed: int, dim: int, isotropic: bool) -> None:
    inputs = [t.requires_grad_() for t in normals(seed, 2, dim, width=1 if isotropic else dim)]
    assert torch.autograd.gradcheck(kl_to_normal, inputs)
    assert torch.autograd.gradgradcheck(kl_to_normal, inputs)


@each(
    "variance, prior, says",
    [
        (torch.zeros(2, 3), 1.0, "variance: expected variances > 0, got 6 zeros"),
        (torch.ones(2), 1.0, "variance: expected shape"),
        (torch.ones(2, 3), 0.0, "prior_variance: expected a finite number > 0"),
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


@each("kappa, dim, names", [(f64(-1.0), 3, "kappa"), (f64(1.0), 1, "dim")])
def test_uniform_refuses(kappa: Tensor, dim: int, names: str) -> None:
    with pytest.raises(InputError, match=names):
        kl_to_uniform(kappa, dim)

"""Pathwise gradients of von Mises-Fisher samples: against quantiles, moments and closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from tables import covering
from vmf_points import f64, random

from contrastive_curvature import vmf
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.vmf.bessel import bessel_derivatives
from contrastive_curvature.vmf.sampling import angle_slope, rsample


@covering(1, dim__kappa=[(2, 0.5), (2, 30.0), (4, 2.0), (10, 0.05), (10, 40.0)], angle=[0.1, 0.7, 1.5, 2.5])
def test_slope_is_that_of_the_quantile(dim: int, kappa: float, angle: float) -> None:
    def distribution(theta: float, k: float) -> float:
        def density(phi: float) -> float:
            return math.exp(k * (math.cos(phi) - math.cos(angle))) * math.sin(phi) ** (dim - 2)

        low, high = quad(density, 0, theta, epsabs=0, epsrel=1e-13)[0], quad(density, theta, math.pi, epsrel=1e-13)[0]
        return math.log(low / high)

    step = 1e-4 * kappa
    level = distribution(angle, kappa)
    moved = [
        brentq(lambda t, k=k: distribution(t, k) - level, 0.8 * angle, min(1.2 * angle, 3.14), xtol=1e-14)
        for k in (kappa - step, kappa + step)
    ]
    found = angle_slope(f64([angle]), f64([kappa]), dim).item()
    assert found == pytest.approx((moved[1] - moved[0]) / (2 * step), rel=2e-5)


@given(st.integers(2, 4096), st.floats(-4, 6))
def test_slope_moves_the_mean_cosine_by_its_derivative(dim: int, log_kappa: float) -> None:
    kappa = f64(10.0**log_kappa)
    # quadrature over the angles within 12 standard deviations (12 exponential lengths, squared, at the left end) of A
    mean = math.acos(vmf.mean_resultant_length(kappa, dim).item())
    width = 14 / math.sqrt(kappa.item() + dim)
    theta = torch.linspace(max(mean - width, 0), min(mean + width, math.pi), 3001, dtype=torch.float64)[1:-1]
    log_density = -2 * kappa * torch.sin(theta / 2).square() + (dim - 2) * torch.sin(theta).log()
    density = (log_density - log_density.max()).exp()
    slope = angle_slope(theta, kappa.expand(theta.shape), dim)
    assert bool((slope <= 0).all())
    found = (-torch.sin(theta) * slope * density).sum() / density.sum()
    # the trapezoidal rule with 3000 points, whose ends at D = 2 and 3 are not zero
    assert found.item() == pytest.approx(bessel_derivatives(kappa, dim).slope.item(), rel=2e-3 if dim < 4 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_sample(dtype: torch.dtype, device: str) -> None:
    mu = random(3, 2, 5, device=device).to(dtype).requires_grad_()
    kappa = torch.tensor([0.0, 1e7], dtype=dtype, device=device).requires_grad_()
    found = rsample(mu, kappa, 4, torch.Generator(device).manual_seed(1))
    assert torch.equal(found, vmf.sample(mu.detach(), kappa.detach(), 4, torch.Generator(device).manual_seed(1)))
    gradients = torch.autograd.grad(found.square().sum() + found[..., 0].sum(), (mu, kappa))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.7), (2, 15.0), (3, 4.0), (30, 1.0), (30, 200.0)])
def test_gradients_are_unbiased(dim: int, kappa: float) -> None:
    n = 20_000
    direction, matrix = random(dim, seed=1), random(dim, dim, seed=2)
    matrix = matrix + matrix.T
    # a copy for each sample, so that each has a gradient of its own
    mu = random(dim).expand(n, dim).clone().requires_grad_()
    k = f64(kappa).expand(n).clone().requires_grad_()
    x = rsample(mu, k, 1, torch.Generator().manual_seed(3))[0]
    value = x @ direction + ((x @ matrix) * x).sum(1)
    by_mu, by_kappa = torch.autograd.grad(value.sum(), (mu, k))
    # E[x] = A m, and E[x x^T] = (1 - A/kappa D ...) in the basis of m: A/kappa I + (1 - A D/kappa) m m^T
    m, c = random(dim).requires_grad_(), f64(kappa).requires_grad_()
    unit, a = m / m.norm(), vmf.mean_resultant_length(c, dim)
    truth = a * (unit @ direction) + a / c * matrix.trace() + (1 - a * dim / c) * (unit @ matrix @ unit)
    for drawn, right in zip((by_mu, by_kappa[:, None]), torch.autograd.grad(truth, (m, c)), strict=True):
        error = drawn.std(0) / math.sqrt(n)
        # 4.5 sigma for each of up to 31 numbers in five cases
        assert ((drawn.mean(0) - right).abs() <= 4.5 * error + 1e-12).all()
        assert (error < 0.2 * (1 + drawn.std(0))).all()
    assert value.mean().item() == pytest.approx(truth.item(), abs=4.5 * value.std().item() / math.sqrt(n))


def test_second_derivative_by_kappa_is_refused() -> None:
    kappa = f64(2.0).requires_grad_()
    x = rsample(random(3), kappa, 1)
    (first,) = torch.autograd.grad(x.square()[..., 0].sum(), kappa, create_graph=True)
    with pytest.raises(UnsupportedError, match="only once with respect to kappa"):
        torch.autograd.grad(first, kappa)

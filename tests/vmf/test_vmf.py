"""The distribution itself: density, sampling, and pathwise gradients of samples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from tables import covering, refused, refuses
from vmf_points import f64, random

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.vmf.bessel import bessel_derivatives, bessel_values
from contrastive_curvature.vmf.sampling import angle_slope, rsample


def test_log_prob_does_not_cancel_for_huge_kappa() -> None:
    # near the mode the density is that of a Gaussian with variance 1 / kappa in the D - 1 tangent directions
    kappa, step = 1e12, 3e-7
    z, mu = f64([math.cos(step), math.sin(step), 0.0]), f64([1.0, 0.0, 0.0])
    gaussian = math.log(kappa / (2 * math.pi)) - kappa * step**2 / 2
    assert vmf.log_prob(z, mu, f64(kappa)).item() == pytest.approx(gaussian, rel=1e-12)


def test_log_prob_broadcasts_and_has_right_gradients(device: str) -> None:
    z, mu = random(2, 3, 4, device=device).requires_grad_(), random(3, 4, seed=1, device=device).requires_grad_()
    kappa = f64([0.5, 2.0, 9.0], device).requires_grad_()
    assert vmf.log_prob(z, mu, kappa).shape == (2, 3)
    assert torch.autograd.gradcheck(vmf.log_prob, (z, mu, kappa))
    assert torch.autograd.gradgradcheck(vmf.log_prob, (z, mu, kappa))


@covering(1, kappa=[0.0, 1.0, 50.0, 1e4, 1e8], dim=[2, 3, 10, 512])
def test_samples_have_the_right_moments(dim: int, kappa: float, device: str) -> None:
    n = 20_000 if dim < 100 else 4_000
    mu = random(dim, seed=dim, device=device)
    drawn = vmf.sample(mu, f64(kappa, device), n, torch.Generator(device).manual_seed(7))
    assert drawn.shape == (n, dim)
    # 1 - cos as half a squared distance, exact for huge kappa; its mean is 1 - A, its variance A'
    versine = (drawn - mu / mu.norm()).square().sum(1) / 2
    complement = bessel_values(f64(kappa, device), dim).complement
    slope = bessel_derivatives(f64(kappa, device), dim).slope
    deviation = (versine.mean() - complement) / (slope / n).sqrt()
    assert abs(deviation.item()) < 4.5  # 40 fixed-seed cases: a chance of 3e-4 when the seeds were chosen
    # The variance of a sample variance is (kurtosis - 1) / n; the kurtosis of 1 - cos is at most 15 (D = 2, large
    # kappa, where it is chi-squared with 1 degree of freedom), so 4.5 sigma are 4.5 sqrt(14 / n).
    assert versine.var().item() == pytest.approx(slope.item(), rel=4.5 * math.sqrt(14 / n))


@covering(1, dim=[2, 3, 10], kappa=[0.0, 2.0, 300.0])
def test_cosines_follow_the_exact_distribution(dim: int, kappa: float) -> None:
    n = 4_000
    mu = torch.eye(dim, dtype=torch.float64)[0]
    cosine = vmf.sample(mu, f64(kappa), n, torch.Generator().manual_seed(3))[:, 0]
    # density of the angle: exp(kappa cos) sin^(D-2), tabulated and summed
    angle = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    density = torch.exp(kappa * (angle.cos() - 1)) * angle.sin() ** (dim - 2)
    cdf = torch.cumulative_trapezoid(density, angle)
    cdf = torch.cat([cdf.new_zeros(1), cdf / cdf[-1]])
    at = cdf[torch.searchsorted(angle, torch.acos(cosine.clamp(-1, 1)).sort().values).clamp(max=20_000)]
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    # Kolmogorov-Smirnov: 2.2 / sqrt(n) is exceeded with a chance of 2 exp(-2 * 2.2^2) = 1.2e-4
    assert torch.maximum((at - ranks).abs(), (at - ranks + 1 / n).abs()).max().item() < 2.2 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampling_is_batched_repeatable_and_on_the_sphere(dtype: torch.dtype, device: str) -> None:
    mu = random(3, 2, 5, device=device).to(dtype)
    kappa = torch.tensor([0.0, 1e15], dtype=dtype, device=device)
    draw = [vmf.sample(mu, kappa, 11, torch.Generator(device).manual_seed(1)) for _ in range(2)]
    assert torch.equal(draw[0], draw[1])
    assert draw[0].shape == (11, 3, 2, 5)
    assert draw[0].dtype == dtype
    assert (draw[0].norm(dim=-1) - 1).abs().max().item() < 8 * torch.finfo(dtype).eps
    assert not draw[0].requires_grad
    unit = mu / mu.norm(dim=-1, keepdim=True)
    # kappa = 1e15: the angle is of the order of sqrt(D / kappa) = 7e-8
    assert (draw[0] - unit)[:, :, 1].norm(dim=-1).max().item() < 1e-6


POINT, ONE = torch.ones(3), torch.tensor(1.0)


test_refusals = refuses(
    InputError,
    (lambda: vmf.sample(torch.zeros(3), ONE, 2), "mu: expected non-zero"),
    (lambda: vmf.sample(POINT, -ONE, 2), "kappa: expected >= 0"),
    (lambda: vmf.sample(POINT, ONE, 0), "n_samples: expected a positive"),
    (lambda: vmf.sample(torch.ones(1), ONE, 2), "D >= 2"),
    (lambda: vmf.sample(torch.ones(2, 3), torch.ones(4), 2), r"mu \(2,\), kappa \(4,\)"),
    (lambda: vmf.log_prob(POINT, torch.ones(4), ONE), "z 3, mu 4"),
    (lambda: vmf.log_prob(torch.ones(2, 3), POINT, torch.ones(5)), "broadcast"),
    (lambda: vmf.log_prob(POINT, POINT, 1.0), "kappa: expected a torch.Tensor", InputTypeError),
    (lambda: vmf.kl_divergence(POINT, ONE, torch.ones(2), ONE), "mu 3, other_mu 2"),
)


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
    refused(lambda: torch.autograd.grad(first, kappa), "only once with respect to kappa", kind=UnsupportedError)

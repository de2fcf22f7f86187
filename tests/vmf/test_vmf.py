"""The distribution itself: density and sampling; divergences are in test_vmf_distances.py."""

import math
from typing import Any

import pytest
import torch
from tables import covering, each
from vmf_points import f64, random

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.vmf.bessel import bessel_derivatives, bessel_values


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


@each(
    "function, arguments, kind, message",
    [
        (vmf.sample, (torch.zeros(3), ONE, 2), InputError, "mu: expected non-zero"),
        (vmf.sample, (POINT, -ONE, 2), InputError, "kappa: expected >= 0"),
        (vmf.sample, (POINT, ONE, 0), InputError, "n_samples: expected a positive"),
        (vmf.sample, (torch.ones(1), ONE, 2), InputError, "D >= 2"),
        (vmf.sample, (torch.ones(2, 3), torch.ones(4), 2), InputError, r"mu \(2,\), kappa \(4,\)"),
        (vmf.log_prob, (POINT, torch.ones(4), ONE), InputError, "z 3, mu 4"),
        (vmf.log_prob, (torch.ones(2, 3), POINT, torch.ones(5)), InputError, "broadcast"),
        (vmf.log_prob, (POINT, POINT, 1.0), InputTypeError, "kappa: expected a torch.Tensor"),
        (vmf.kl_divergence, (POINT, ONE, torch.ones(2), ONE), InputError, "mu 3, other_mu 2"),
    ],
)
def test_refusals(function: Any, arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        function(*arguments)

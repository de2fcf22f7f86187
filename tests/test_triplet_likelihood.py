"""The logarithm of the normal distribution function, and the log-probability of a triplet."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import each
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.triplet import log_normal_cdf, log_probability, tau_moments

POINTS = [-1e8, -1e4, -300.0, -37.5, -8.0, -5.0001, -5.0, -4.9999, -1.0, -1e-9, 0.0, 1e-9, 0.7, 5.0, 8.3, 20.0, 37.0]


def f64(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def reference(z: float) -> tuple[float, float, float]:
    """Log Phi(z) and its first two derivatives, to 60 digits before they are rounded."""
    with mpmath.workdps(60):
        x = mpmath.mpf(z)
        if x < -100:  # erfc is slow so far out, where the asymptotic series has all digits
            mills = mpmath.nsum(lambda k: (-1) ** int(k) * mpmath.fac2(2 * k - 1) / (-x) ** (2 * k + 1), [0, 12])
            log = mpmath.log(mills) - x**2 / 2 - mpmath.log(2 * mpmath.pi) / 2
            hazard = 1 / mills
        else:
            cdf = mpmath.erfc(-x / mpmath.sqrt(2)) / 2
            # Close to one, log Phi would be the logarithm of a rounded number.
            log = mpmath.log1p(-mpmath.erfc(x / mpmath.sqrt(2)) / 2) if x > 0 else mpmath.log(cdf)
            hazard = mpmath.exp(-(x**2) / 2) / mpmath.sqrt(2 * mpmath.pi) / cdf
        return float(log), float(hazard), float(-hazard * (x + hazard))


def with_derivatives(z: float, dtype: torch.dtype = torch.float64) -> tuple[float, float, float]:
    x = torch.tensor(z, dtype=dtype, requires_grad=True)
    value = log_normal_cdf(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return value.item(), first.item(), second.item()


@pytest.mark.parametrize("z", POINTS)
def test_value_and_two_derivatives(z: float) -> None:
    assert with_derivatives(z) == pytest.approx(reference(z), rel=2e-13, abs=0)


@pytest.mark.parametrize("z", [-1e4, -300.0, -5.0, 0.5, 8.0])
def test_single_precision_is_the_rounded_result(z: float) -> None:
    assert with_derivatives(z, torch.float32) == pytest.approx(reference(float(torch.tensor(z))), rel=1e-6)


def test_far_out_on_both_sides() -> None:
    assert with_derivatives(40.0) == (0.0, 0.0, 0.0)  # the right value, -4e-350, is below the smallest float64
    value, first, second = with_derivatives(-1e150)
    assert (value, first, second) == pytest.approx((-5e299, 1e150, -1.0), rel=1e-14)


@given(st.floats(-1e4, 10))
def test_gradcheck_of_the_distribution_function(z: float) -> None:
    # Finite differences of a number of size z^2 / 2 need a step in proportion.
    x, eps = f64([z]).requires_grad_(), 1e-5 * max(1.0, abs(z))
    assert torch.autograd.gradcheck(log_normal_cdf, x, eps=eps, rtol=1e-4, atol=1e-6, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(log_normal_cdf, x, eps=eps, rtol=1e-3, atol=1e-4)


def test_a_third_derivative_is_refused() -> None:
    x = f64(-2.0).requires_grad_()
    (first,) = torch.autograd.grad(log_normal_cdf(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, create_graph=True)
    with pytest.raises(UnsupportedError, match="at most twice"):
        torch.autograd.grad(second, x)


def draw(seed: int, dim: int, batch: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(3, 2, *batch, dim, generator=generator, dtype=torch.float64)
    return [(mean, raw.exp()) for mean, raw in numbers]


@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(0, 3), st.sampled_from([(), (0,), (1,), (2, 3)]))
def test_log_probability_is_the_normal_approximation(
    seed: int, dim: int, margin: float, batch: tuple[int, ...]
) -> None:
    three = draw(seed, dim, batch)
    mean, variance = tau_moments(*three)
    normal = torch.distributions.Normal(mean, variance.sqrt(), validate_args=False)
    result = log_probability(*three, margin=margin)
    assert result.shape == batch
    torch.testing.assert_close(result.exp(), normal.cdf(torch.full_like(mean, -margin)), rtol=1e-9, atol=1e-12)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_gradients_of_the_log_probability(seed: int, dim: int) -> None:
    flat = [t.clone().requires_grad_() for pair in draw(seed, dim, (2,)) for t in pair]

    def function(*t: Tensor) -> Tensor:
        return log_probability(t[0:2], t[2:4], t[4:6], margin=0.2)

    assert torch.autograd.gradcheck(function, flat)
    assert torch.autograd.gradgradcheck(function, flat, rtol=1e-2, atol=1e-3)


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="margin: expected a finite number >= 0"):
        log_probability(*draw(0, 2), margin=-0.1)
    with pytest.raises(InputError, match="z: expected"):
        log_normal_cdf(f64(math.nan))


def test_certain_triplets_are_refused() -> None:
    point = (torch.ones(2, 3), torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"Var\[tau\] > 0, got 2 triplets"):
        log_probability(point, point, point)


@each("dtype, z", [(torch.float32, -1e30), (torch.float64, -1e160), (torch.float16, -6e4)])
def test_a_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, z: float) -> None:
    given_z = torch.tensor([1.0, z], dtype=dtype)
    if dtype == torch.float16:  # comes back as float32, which holds it
        assert bool(log_normal_cdf(given_z).isfinite().all())
        return
    with pytest.raises(InputError, match="z: expected entries above"):
        log_normal_cdf(given_z)

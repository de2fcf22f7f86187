"""From samples, or from a Gaussian, to (mu, kappa)."""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import covering, refuses
from vmf_points import random

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError

EPS = torch.finfo(torch.float64).eps


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(2, 30), st.floats(-3, 3))
def test_fit_agrees_with_the_formula_and_turns_with_the_samples(seed: int, dim: int, s: int, log_scale: float) -> None:
    samples = random(s, dim, seed=seed) + 2
    mu, kappa = vmf.fit(samples)
    direct_mu, rbar = vmf.mean_direction(samples)
    # 1 - Rbar^2 by subtraction loses eps / (1 - Rbar^2) of kappa
    tolerance = 64 * EPS / max(1 - rbar.item() ** 2, EPS) + 1e-13
    assert kappa.item() == pytest.approx(vmf.concentration(rbar, dim).item(), rel=tolerance)
    assert kappa.item() == pytest.approx(rbar.item() * (dim - rbar.item() ** 2) / (1 - rbar.item() ** 2), rel=tolerance)
    torch.testing.assert_close(mu, direct_mu, rtol=1e-15, atol=1e-15)
    turn = torch.linalg.qr(random(dim, dim, seed=seed + 1)).Q
    turned_mu, turned_kappa = vmf.fit(10.0**log_scale * samples @ turn.T)
    # rounding of the mean (eps) is magnified by 1 / Rbar in its direction
    torch.testing.assert_close(turned_mu, turn @ mu, rtol=0, atol=1e-13 / max(rbar.item(), 1e-10))
    assert turned_kappa.item() == pytest.approx(kappa.item(), rel=tolerance)


def test_samples_that_almost_agree_keep_their_digits() -> None:
    # two samples at an angle of 2e-7: 1 - Rbar^2 = sin^2(1e-7), of which a subtraction would keep 2 digits
    angle = 1e-7
    samples = torch.tensor([[1.0, angle], [1.0, -angle]], dtype=torch.float64)
    _, kappa = vmf.fit(samples)
    with mpmath.workdps(40):
        square = 1 / (1 + mpmath.mpf(angle) ** 2)
        truth = float(mpmath.sqrt(square) * (2 - square) / (1 - square))
    assert kappa.item() == pytest.approx(truth, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [2, 512])
def test_concentration_is_finite_at_both_ends_and_so_is_its_gradient(dtype: torch.dtype, dim: int) -> None:
    eps = torch.finfo(dtype).eps
    rbar = torch.tensor([0.0, 1e-30, 0.5, 1 - 2 * eps, 1 - eps, 1.0, 1 + 4 * eps], dtype=dtype, requires_grad=True)
    kappa = vmf.concentration(rbar, dim)
    (gradient,) = torch.autograd.grad(kappa.sum(), rbar)
    assert bool(torch.isfinite(kappa).all())
    assert bool(torch.isfinite(gradient).all())
    assert kappa[0].item() == 0
    assert gradient[0].item() == pytest.approx(dim)
    assert bool((kappa.diff() >= 0).all())
    assert kappa[-1].item() == pytest.approx((dim - 1) / (2 * eps), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_and_opposite_samples_are_finite(dtype: torch.dtype) -> None:
    same = torch.ones(5, 3, dtype=dtype, requires_grad=True)
    _, kappa = vmf.fit(same)
    assert kappa.item() == pytest.approx(2 / torch.finfo(dtype).eps ** 2, rel=1e-3)
    opposite = torch.tensor([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0]], dtype=dtype, requires_grad=True)
    mu, none = vmf.fit(opposite)
    assert none.item() == 0
    assert torch.equal(mu, opposite[0])
    for value, given_samples in ((kappa, same), (none + mu.sum(), opposite)):
        (gradient,) = torch.autograd.grad(value, given_samples)
        assert bool(torch.isfinite(gradient).all())


def test_estimates_have_right_gradients() -> None:
    rbar = torch.tensor([0.1, 0.5, 0.95], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: vmf.concentration(r, 7), rbar)
    assert torch.autograd.gradgradcheck(lambda r: vmf.concentration(r, 7), rbar)
    samples = (random(4, 2, 3) + 1).requires_grad_()
    assert torch.autograd.gradcheck(vmf.fit, samples)
    assert torch.autograd.gradgradcheck(vmf.fit, samples)
    mean, root = random(2, 3, seed=1).requires_grad_(), random(2, 3, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, r: vmf.concentration_from_gaussian(m, covariance=r @ r.mT), (mean, root))
    variance = random(2, 3, seed=3).square().requires_grad_()
    assert torch.autograd.gradcheck(lambda m, v: vmf.concentration_from_gaussian(m, variance=v), (mean, variance))
    assert torch.autograd.gradgradcheck(lambda m, v: vmf.concentration_from_gaussian(m, variance=v), (mean, variance))


@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(-140, 140))
def test_tangential_variance_is_the_trace_of_the_projected_covariance(seed: int, dim: int, log_unit: float) -> None:
    mean, root = random(5, dim, seed=seed), random(5, dim, dim, seed=seed + 1)
    covariance = root @ root.mT
    u = mean / mean.norm(dim=1, keepdim=True)
    p = torch.eye(dim, dtype=torch.float64) - u[:, :, None] * u[:, None, :]
    truth = (p @ covariance @ p).diagonal(dim1=1, dim2=2).sum(1) / mean.square().sum(1)
    total = covariance.diagonal(dim1=1, dim2=2).sum(1) / mean.square().sum(1)
    ours = vmf.tangential_variance(mean, covariance=covariance)
    assert bool(((ours - truth).abs() <= 1e-14 * dim * total).all())
    # the unit that outputs are measured in does not matter, even where its square overflows
    unit = 10.0**log_unit
    scaled = vmf.tangential_variance(mean * unit, covariance=covariance * unit**2)
    assert bool(((scaled - ours).abs() <= 1e-14 * dim * total).all())
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    as_matrix = vmf.tangential_variance(mean, covariance=torch.diag_embed(diagonal))
    assert bool(((vmf.tangential_variance(mean, variance=diagonal) - as_matrix).abs() <= 1e-14 * dim * total).all())


@covering(1, dim=[2, 3, 512], tv=[1e-30, 1e-12, 1e-3, 1.0, 1e6])
def test_concentration_from_gaussian_is_accurate_for_any_tangential_variance(tv: float, dim: int) -> None:
    mean = torch.zeros(dim, dtype=torch.float64)
    mean[0] = 2.0
    variance = torch.zeros(dim, dtype=torch.float64)
    variance[-1] = 4 * tv
    kappa = vmf.concentration_from_gaussian(mean, variance=variance).item()
    with mpmath.workdps(60):
        square = 1 / (1 + mpmath.mpf(variance[-1].item()) / 4)
        truth = float(mpmath.sqrt(square) * (dim - square) / (1 - square))
    assert kappa == pytest.approx(truth, rel=1e-14)


MEAN, ONES = torch.ones(3), torch.ones(3)


test_refusals = refuses(
    InputError,
    (lambda: vmf.fit(torch.ones(1, 3)), r"samples: expected shape .* S >= 2"),
    (lambda: vmf.fit(torch.zeros(4, 3)), "4 zero vectors"),
    (lambda: vmf.fit(torch.full((4, 3), torch.nan)), "12 of 12 NaN or infinite"),
    (lambda: vmf.mean_direction([[1.0, 2.0]]), "torch.Tensor", InputTypeError),
    (lambda: vmf.concentration(torch.tensor(1.1), 3), r"rbar: expected values in \[0, 1\]"),
    (lambda: vmf.concentration(torch.tensor(0.5), 1), "dim: expected D >= 2"),
    (lambda: vmf.tangential_variance(MEAN), "exactly one"),
    (lambda: vmf.tangential_variance(MEAN, variance=ONES, covariance=torch.eye(3)), "exactly one"),
    (lambda: vmf.concentration_from_gaussian(MEAN, variance=torch.ones(4)), r"shape \(3,\)"),
    (lambda: vmf.concentration_from_gaussian(MEAN, variance=-ONES), "variances >= 0"),
    (lambda: vmf.tangential_variance(MEAN, covariance=1 - 3 * torch.eye(3)), "variances|semidefinite"),
    (lambda: vmf.tangential_variance(0 * MEAN, variance=ONES), "zero vectors"),
)

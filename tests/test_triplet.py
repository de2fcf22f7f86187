"""The Bayesian triplet loss and its parts: moments, log-probability, divergences, against matrices, mpmath, torch."""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import covering, each, refuses
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.triplet import (
    bayesian_triplet_loss,
    kl_to_normal,
    kl_to_uniform,
    log_normal_cdf,
    log_probability,
    tau_moments,
    tau_moments_vmf,
)

Embedding = tuple[Tensor, Tensor]


def triplet(
    seed: int, dim: int, batch: tuple[int, ...] = (), *, width: int | None = None, dtype: torch.dtype = torch.float64
) -> list[Embedding]:
    """Means and variances of three embeddings."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(last: int) -> Tensor:
        return torch.randn(*batch, last, generator=generator, dtype=torch.float64)

    return [(numbers(dim).to(dtype), numbers(width or dim).exp().to(dtype)) for _ in range(3)]


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
    three = triplet(seed, dim, width=1 if isotropic else None, dtype=dtype)
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


def directed(seed: int, dim: int, kappa: float, batch: tuple[int, ...] = ()) -> list[Embedding]:
    generator = torch.Generator().manual_seed(seed)

    def one() -> Embedding:
        mu = torch.randn(*batch, dim, generator=generator, dtype=torch.float64)
        return mu, kappa * torch.randn(batch, generator=generator, dtype=torch.float64).exp()

    return [one(), one(), one()]


def by_matrices(three: list[Embedding]) -> tuple[float, float]:
    """tr(E[a a^T] E[d d^T]) with d = n - p, in 60 digits, from Bessel functions."""
    with mpmath.workdps(60):
        means, seconds = [], []
        for mu, kappa in three:
            dim, k = len(mu), mpmath.mpf(float(kappa))
            m = mpmath.matrix([mpmath.mpf(float(x)) for x in mu])
            m = m / mpmath.norm(m)
            order = mpmath.mpf(dim) / 2
            length = mpmath.besseli(order, k) / mpmath.besseli(order - 1, k)
            across = length / k
            along = 1 - length**2 - (dim - 1) * across
            outer = m * m.T
            means.append(length * m)
            seconds.append(across * (mpmath.eye(dim) - outer) + (along + length**2) * outer)
        a, p, n = means
        d = seconds[1] + seconds[2] - p * n.T - n * p.T
        product = seconds[0] * d
        inner = (a.T * (n - p))[0]
        trace = sum(product[i, i] for i in range(product.rows))
        return float(2 * inner), float(4 * (trace - inner**2))


@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from([0.01, 1.0, 30.0, 1e4, 1e6]), st.booleans())
def test_moments_are_those_of_the_matrices(seed: int, dim: int, kappa: float, close: bool) -> None:
    three = directed(seed, dim, kappa)
    if close:
        # Directions 1e-4 apart, where the matrices cancel in float64.
        three = [(three[0][0] + 1e-4 * mu, one) for mu, one in three]
    moments = tau_moments_vmf(*three)
    mean, variance = by_matrices(three)
    assert moments.variance.item() == pytest.approx(variance, rel=1e-9)
    assert moments.mean.item() == pytest.approx(mean, rel=1e-9, abs=1e-9 * math.sqrt(variance))


def test_without_concentration_nothing_is_left_but_the_dimension() -> None:
    for dim in (2, 5, 512):
        moments = tau_moments_vmf(*directed(0, dim, 0.0))
        assert moments.mean.item() == 0
        assert moments.variance.item() == pytest.approx(8 / dim)


@covering(1, kappa=[0.0, 0.3, 1.4, 5.0, 200.0], dim=[2, 3])
def test_gradients_of_directed_moments(dim: int, kappa: float) -> None:
    flat = [t.requires_grad_() for pair in directed(1, dim, kappa) for t in pair]

    def moments(*t: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(tau_moments_vmf(t[0:2], t[2:4], t[4:6]))

    if kappa:
        assert torch.autograd.gradcheck(moments, flat)
    else:
        # A step to the left of 0 is refused; the mean grows by the product of two concentrations, the variance by more.
        grads = torch.autograd.grad(moments(*flat)[1].sum(), flat[1::2])
        assert all(float(grad.abs().max()) < 1e-12 for grad in grads)


def test_batches_broadcast_and_lengths_of_directions_do_not_matter() -> None:
    """A negative for every row of a matrix."""
    shapes: list[tuple[int, ...]] = [(3, 1), (3, 1), (3, 5)]
    for make, scale, function in (
        (triplet, 1, tau_moments),
        (lambda seed, dim, batch: directed(seed, dim, 3.0, batch), 3, tau_moments_vmf),
        (triplet, 1, lambda *three: (bayesian_triplet_loss(*three, kl_weight=1.0, reduction="none"),)),
    ):
        three = [make(seed, 4, batch)[0] for seed, batch in enumerate(shapes)]
        single = function(*[(scale * m[1, i], v[1, i]) for (m, v), i in zip(three, (0, 0, 2), strict=True)])
        for found, alone in zip(function(*three), single, strict=True):
            assert found.shape == (3, 5)
            torch.testing.assert_close(found[1, 2], alone)


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


@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(0, 3), st.sampled_from([(), (0,), (1,), (2, 3)]))
def test_log_probability_is_the_normal_approximation(seed, dim, margin, batch) -> None:
    three = triplet(seed, dim, batch)
    mean, variance = tau_moments(*three)
    normal = torch.distributions.Normal(mean, variance.sqrt(), validate_args=False)
    result = log_probability(*three, margin=margin)
    assert result.shape == batch
    torch.testing.assert_close(result.exp(), normal.cdf(torch.full_like(mean, -margin)), rtol=1e-9, atol=1e-12)


@each("dtype, z", [(torch.float32, -1e30), (torch.float64, -1e160), (torch.float16, -6e4)])
def test_a_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, z: float) -> None:
    given_z = torch.tensor([1.0, z], dtype=dtype)
    if dtype == torch.float16:  # comes back as float32, which holds it
        assert bool(log_normal_cdf(given_z).isfinite().all())
        return
    with pytest.raises(InputError, match="z: expected entries above"):
        log_normal_cdf(given_z)


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
def test_gaussian_is_the_divergence_of_torch(seed, dim, batch, isotropic, prior, dtype) -> None:
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


def uniform_reference(kappa: float, dim: int) -> float:
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
    assert kl_to_uniform(f64(kappa), dim).item() == pytest.approx(uniform_reference(kappa, dim), rel=1e-12, abs=0)


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


@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([(), (0,), (1,), (2, 3)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(0, 2),
    st.floats(0.1, 10),
    st.sampled_from([0.0, 1e-6, 1.0]),
)
def test_gaussian_loss_is_the_sum_of_its_parts(seed, dim, batch, dtype, margin, prior, weight) -> None:
    three = triplet(seed, dim, batch, dtype=dtype)
    loss = bayesian_triplet_loss(*three, margin, prior_variance=prior, kl_weight=weight, reduction="none")
    right = weight * sum(kl_to_normal(*one, prior) for one in three) - log_probability(*three, margin)
    assert loss.shape == batch
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, right, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@given(
    st.integers(0, 10**6),
    st.integers(2, 6),
    st.sampled_from([(), (0,), (1,), (2, 3)]),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_loss_on_the_sphere_is_the_sum_of_its_parts(seed, dim, batch, margin, dtype) -> None:
    three = triplet(seed, dim, batch, width=1, dtype=dtype)
    options: Any = {"distribution": "vmf", "kl_weight": 0.5, "reduction": "none"}
    directed = [(torch.nn.functional.normalize(mean, dim=-1), variance) for mean, variance in three]
    mean, variance = tau_moments_vmf(*((mean, 1 / variance.squeeze(-1)) for mean, variance in three))
    divergence = sum(kl_to_uniform(1 / variance.squeeze(-1), dim) for _, variance in directed)
    precise = 1e-3 if dtype == torch.float32 else 1e-10
    for moments, log_share in (
        ({"moments": "gaussian"}, log_probability(*directed, margin)),
        ({}, log_normal_cdf(-(mean + margin) / variance.sqrt())),
    ):
        loss = bayesian_triplet_loss(*three, margin, **options, **moments)
        assert loss.dtype == dtype
        torch.testing.assert_close(loss, 0.5 * divergence - log_share, rtol=precise, atol=precise)


@pytest.mark.parametrize("distribution", ["gaussian", "vmf"])
def test_reductions(distribution: Any) -> None:
    three = triplet(0, 3, (4, 2), width=1)
    each = bayesian_triplet_loss(*three, distribution=distribution, reduction="none")
    mean, total = (bayesian_triplet_loss(*three, distribution=distribution, reduction=r) for r in ("mean", "sum"))
    torch.testing.assert_close(mean, each.mean())
    torch.testing.assert_close(total, each.sum())


def loss_of(distribution: Any) -> Callable[..., Tensor]:
    return lambda *three: bayesian_triplet_loss(*three, 0.1, distribution=distribution, kl_weight=0.3)


@each(
    "function, width, twice",
    [
        (lambda *three: tuple(tau_moments(*three)), 1, False),
        (lambda *three: tuple(tau_moments(*three)), 2, False),
        (lambda *three: log_probability(*three, margin=0.2), 2, True),
        (loss_of("gaussian"), 1, False),
        (loss_of("vmf"), 1, False),
    ],
)
def test_gradients(function: Callable[..., Any], width: int, twice: bool) -> None:
    for seed in range(2):
        flat = [t.requires_grad_() for one in triplet(seed, 2, (2,), width=width) for t in one]

        def of(*t: Tensor) -> Any:
            return function(t[0:2], t[2:4], t[4:6])

        assert torch.autograd.gradcheck(of, flat, rtol=1e-3, atol=1e-4)
        if twice and not seed:
            assert torch.autograd.gradgradcheck(of, flat, rtol=1e-2, atol=1e-3)


A, P, N = TRIPLET = triplet(0, 3, (2,), width=1)
ZERO, ONE = torch.zeros(2, 3), torch.ones(2, 3)


def moments_with(positive: Embedding) -> Any:
    return tau_moments((ZERO, ONE), positive, (ZERO, ONE))


def directed_with(positive: Embedding) -> Any:
    return tau_moments_vmf((ONE, ONE[:, 0]), positive, (ONE, ONE[:, 0]))


test_parts_refuse_by_name = refuses(
    InputError,
    (lambda: moments_with((ZERO, ONE[:, :2])), "variance of positive: expected shape"),
    (lambda: moments_with((torch.zeros(2, 4), torch.ones(2, 4))), "one dimension D, got anchor 3, positive 4"),
    (lambda: moments_with((ZERO, -ONE)), "variance of positive: expected variances >= 0, got -1.0"),
    (lambda: moments_with((ZERO + math.nan, ONE)), "mean of positive: expected finite"),
    (lambda: moments_with((ZERO + 1e30, ONE)), "overflows"),
    (lambda: directed_with((ONE, ONE[:, :1])), "kappa of positive: expected shape"),
    (lambda: directed_with((ZERO, ONE[:, 0])), "mu of positive: expected non-zero vectors"),
    (lambda: directed_with((torch.ones(2, 4), ONE[:, 0])), "one dimension D, got anchor 3, positive 4"),
    (lambda: directed_with((ONE, -ONE[:, 0])), "kappa of positive: expected >= 0"),
    (lambda: log_probability(*TRIPLET, margin=-0.1), "margin: expected a finite number >= 0"),
    (lambda: log_probability(*[(ONE, ZERO)] * 3), r"Var\[tau\] > 0, got 2 triplets"),
    (lambda: log_normal_cdf(f64(math.nan)), "z: expected"),
    (lambda: kl_to_normal(ZERO, ZERO, 1.0), "variance: expected variances > 0, got 6 zeros"),
    (lambda: kl_to_normal(ZERO, torch.ones(2), 1.0), "variance: expected shape"),
    (lambda: kl_to_normal(ZERO, ONE, 0.0), "prior_variance: expected a finite number > 0"),
    (lambda: kl_to_uniform(f64(-1.0), 3), "kappa"),
    (lambda: kl_to_uniform(f64(1.0), 1), "dim"),
)


@each(
    "three, options, says",
    [
        (TRIPLET, {"margin": -1.0}, "margin"),
        (TRIPLET, {"kl_weight": -1.0}, "kl_weight"),
        (TRIPLET, {"prior_variance": 0.0}, "prior_variance"),
        (TRIPLET, {"prior_variance": 1.0, "distribution": "vmf"}, "prior_variance: expected None with"),
        (TRIPLET, {"distribution": "normal"}, "distribution: expected one of 'gaussian', 'vmf', got normal"),
        (TRIPLET, {"reduction": "max"}, "reduction: expected one of"),
        (TRIPLET, {"moments": "vmf"}, "moments: expected"),
        (TRIPLET, {"moments": "exact"}, "moments: expected"),
        (TRIPLET, {"moments": "exact", "distribution": "vmf"}, "moments: expected"),
        (triplet(0, 3, (0,)), {}, "at least one triplet"),
        (triplet(0, 1, (2,)), {"distribution": "vmf"}, "D >= 2"),
        ([A, P, (N[0], 1e-310 * N[1])], {"distribution": "vmf"}, "variance of negative: expected variances > 0"),
        ([A, P, (N[0], 0 * N[1])], {}, "variance of negative: expected variances > 0"),
        ([A, (0 * P[0], P[1]), N], {"distribution": "vmf"}, "mean of positive: expected non-zero vectors"),
    ],
)
def test_the_loss_refuses_by_name(three: list[Embedding], options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        bayesian_triplet_loss(*three, **options)

"""The functions of kappa alone and their document's quadratic fits, against mpmath, and their derivatives."""

from typing import Any

import mpmath
import pytest
import torch
from scipy.stats import vonmises_fisher
from tables import covering, each

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.vmf.bessel import bessel_derivatives, bessel_values
from contrastive_curvature.vmf.density import log_normalizer_quadratic

DIMS = [2, 3, 4, 5, 8, 16, 32, 49, 50, 51, 128, 512, 2048, 4096]


KAPPAS = [0.0, 1e-8, 1e-3, 0.1, 1.0, 10.0, 30.0, 100.0, 1e3, 1e4, 1e6, 1e8]


def reference(kappa: float, dim: int) -> dict[str, mpmath.mpf]:
    # 60 digits, because the textbook derivatives cancel up to 16 + 8 of them at kappa = 1e8, 1 - A another 8
    with mpmath.workdps(60):
        half, x = mpmath.mpf(dim) / 2, mpmath.mpf(kappa)
        if x == 0:
            log_c = mpmath.loggamma(half) - mpmath.log(2) - half * mpmath.log(mpmath.pi)
            values = {"ratio": mpmath.mpf(0), "slope": 1 / mpmath.mpf(dim), "curvature": mpmath.mpf(0)}
        else:
            low, high = mpmath.besseli(half - 1, x), mpmath.besseli(half, x)
            log_c = (half - 1) * mpmath.log(x) - half * mpmath.log(2 * mpmath.pi) - mpmath.log(low)
            a = high / low
            slope = 1 - a * a - (dim - 1) * a / x
            curvature = -2 * a * slope - (dim - 1) * (slope / x - a / x**2)
            values = {"ratio": a, "slope": slope, "curvature": curvature}
        return {**values, "log_c": log_c, "mode": log_c + x, "complement": 1 - values["ratio"]}


def error(value: float, truth: mpmath.mpf, floor: float = 0.0) -> float:
    with mpmath.workdps(60):
        scale = max(abs(truth), mpmath.mpf(floor))
        return float(abs(mpmath.mpf(value) - truth) / scale) if scale else abs(value)


@pytest.mark.parametrize("dim", DIMS)
def test_agrees_with_mpmath(dim: int, device: str) -> None:
    kappa = torch.tensor(KAPPAS, dtype=torch.float64, device=device)
    complement, derivatives = bessel_values(kappa, dim).complement, bessel_derivatives(kappa, dim)
    others = {"complement": complement, **derivatives._asdict()}
    log_c, mode = vmf.log_normalizer(kappa, dim), vmf.log_density_at_mode(kappa, dim)
    length = vmf.mean_resultant_length(kappa, dim)
    for i, k in enumerate(KAPPAS):
        truth = reference(k, dim)
        # measured 7e-16 (log), 9e-16 (ratio), 3e-13 (derivatives, whose recurrence magnifies rounding by up to 50);
        # asked for: 1e-10. Near a zero of the log-normaliser the error is counted as absolute.
        assert error(log_c[i].item(), truth["log_c"], floor=1.0) < 1e-14
        # a difference of terms the size of log C_D(0), which is 1.1e4 at D = 4096
        assert error(mode[i].item(), truth["mode"], floor=max(1.0, dim)) < 1e-14
        assert error(length[i].item(), truth["ratio"]) < 1e-14
        for name, values in others.items():
            assert error(values[i].item(), truth[name]) < 2e-12, (name, k)


@pytest.mark.parametrize("dim", [3, 40])
def test_gradients(dim: int, device: str) -> None:
    # kappa starts away from 0 only because a numerical difference would step below it
    kappa = torch.tensor([0.05, 0.9, 80.0], dtype=torch.float64, device=device, requires_grad=True)
    functions = (vmf.log_normalizer, vmf.log_density_at_mode, vmf.mean_resultant_length)
    for function in functions:
        assert torch.autograd.gradcheck(lambda k, f=function: f(k, dim), kappa, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda k, f=function: f(k, dim), kappa)


@each("dim", [2, 3, 20])
def test_density_agrees_with_scipy(dim: int) -> None:
    rng = torch.Generator().manual_seed(dim)
    mu = torch.nn.functional.normalize(torch.randn(dim, generator=rng, dtype=torch.float64), dim=0)
    z = torch.nn.functional.normalize(torch.randn(7, dim, generator=rng, dtype=torch.float64), dim=1)
    for kappa in (0.3, 4.0, 60.0):
        ours = vmf.log_prob(z, mu, torch.tensor(kappa, dtype=torch.float64))
        theirs = torch.from_numpy(vonmises_fisher(mu.numpy(), kappa).logpdf(z.numpy()))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)


@covering(1, kappa=[0.0, 1e-8, 1.0, 1e8], dim=[2, 3, 128, 4096])
def test_derivative_of_the_log_normalizer_is_minus_the_mean_length(dim: int, kappa: float) -> None:
    k = torch.tensor(kappa, dtype=torch.float64, requires_grad=True)
    truth = reference(kappa, dim)
    (first,) = torch.autograd.grad(vmf.log_normalizer(k, dim), k, create_graph=True)
    (second,) = torch.autograd.grad(first, k)
    (rest,) = torch.autograd.grad(vmf.log_density_at_mode(k, dim), k)
    assert error(-first.item(), truth["ratio"]) < 1e-14
    assert error(-second.item(), truth["slope"]) < 2e-12
    assert error(rest.item(), truth["complement"]) < 2e-12


def test_fourth_derivative_is_refused() -> None:
    k = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = vmf.log_normalizer(k, 5)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, k, create_graph=True)
    with pytest.raises(UnsupportedError, match="at most three times"):
        torch.autograd.grad(value, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_low_precision_is_the_rounded_float64(dtype: torch.dtype, device: str) -> None:
    kappa = torch.tensor([0.0, 1e-3, 1.0, 100.0, 1e4], device=device).to(dtype)
    for dim in (2, 512):
        low, high = vmf.log_normalizer(kappa, dim), vmf.log_normalizer(kappa.double(), dim)
        assert low.dtype == torch.float32
        assert torch.equal(low, high.float())


@each(
    "kappa, dim, kind, message",
    [
        (torch.tensor([1.0, -2.0]), 3, InputError, "kappa: expected >= 0"),
        (torch.tensor(float("nan")), 3, InputError, "kappa: expected finite"),
        (torch.tensor(1), 3, InputTypeError, "kappa: expected a floating-point"),
        (1.0, 3, InputTypeError, "kappa: expected a torch.Tensor"),
        (torch.tensor(1.0), 1, InputError, "dim: expected D >= 2"),
        (torch.tensor(1.0), 2.0, InputTypeError, "dim: expected an int"),
    ],
)
def test_refusals(kappa: Any, dim: Any, kind: type[Exception], message: str) -> None:
    for function in (vmf.log_normalizer, vmf.log_density_at_mode, vmf.mean_resultant_length):
        with pytest.raises(kind, match=message):
            function(kappa, dim)


def test_by_hand() -> None:
    kappa = torch.tensor([0.0, 10.0], dtype=torch.float64)
    by_hand = torch.tensor([127.0, 127 - 0.1909 - 0.3355], dtype=torch.float64)
    torch.testing.assert_close(log_normalizer_quadratic(kappa, 128), by_hand, rtol=1e-15, atol=0)
    by_hand = torch.tensor([868.0, 868 - 0.002662 - 0.09685], dtype=torch.float64)
    torch.testing.assert_close(log_normalizer_quadratic(kappa, 512), by_hand, rtol=1e-15, atol=0)


def test_refusals_of_quadratic_fits() -> None:
    with pytest.raises(UnsupportedError, match=r"dim: expected 128 or 512, got 64\. log_normalizer is exact"):
        log_normalizer_quadratic(torch.ones(1), 64)
    with pytest.raises(InputError, match="kappa: expected >= 0"):
        log_normalizer_quadratic(-torch.ones(1), 128)

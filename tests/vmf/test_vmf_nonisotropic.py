"""The non-isotropic von Mises-Fisher density and EL-nivMF: integrals, closed forms, surface factor, gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each, refused, refuses
from torch import Tensor
from vmf_points import f64, random, sphere

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.vmf.distances import expected_likelihood_distance
from contrastive_curvature.vmf.nonisotropic import el_nivmf_distance, el_nivmf_logits, nivmf_distance, nivmf_log_prob


def axis_kappas(dim: int, seed: int, low: float, high: float) -> Tensor:
    share = torch.rand(dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return low * (high / low) ** share


@given(st.integers(2, 3), st.integers(0, 10**6), st.floats(0.01, 20), st.floats(1, 4))
def test_density_integrates_to_one_on_circle_and_sphere(dim: int, seed: int, low: float, ratio: float) -> None:
    z, weights = sphere(dim)
    mu, kappa = random(dim, seed=seed), axis_kappas(dim, seed, low, low * ratio)
    total = (weights * nivmf_log_prob(z, mu, kappa).exp()).sum().item()
    assert total == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(
    ("dim", "low", "ratio", "proposal"), [(5, 3.0, 2.5, 2.0), (20, 4.0, 1.6, 3.0), (64, 10.0, 1.2, 8.0)]
)
def test_density_integrates_to_one_above(dim: int, low: float, ratio: float, proposal: float) -> None:
    n, mu, kappa = 40_000, random(dim, seed=dim), axis_kappas(dim, dim, low, low * ratio)
    # importance sampling from a wider isotropic distribution around the same direction
    width = f64(proposal)
    x = vmf.sample(mu, width, n, torch.Generator().manual_seed(2))
    weights = (nivmf_log_prob(x, mu, kappa) - vmf.log_prob(x, mu, width)).exp()
    error = weights.std().item() / math.sqrt(n)
    assert error < 0.01
    assert abs(weights.mean().item() - 1) < 4.5 * error


@given(st.integers(0, 10**6), st.integers(2, 200), st.floats(-3, 5))
def test_equal_concentrations_are_the_isotropic_distribution(seed: int, dim: int, log_kappa: float) -> None:
    x, mu, kappa = random(3, dim, seed=seed), random(dim, seed=seed + 1), 10.0**log_kappa
    found = nivmf_log_prob(x, mu, f64(kappa).expand(dim))
    slack = 1e-13 * (dim * 20 + kappa)
    torch.testing.assert_close(found, vmf.log_prob(x, mu, f64(kappa)), rtol=1e-12, atol=slack)
    # which the printed function exceeds by the factor kappa^(D - 1)
    printed = nivmf_log_prob(x, mu, f64(kappa).expand(dim), normalized=False)
    torch.testing.assert_close(printed, found + (dim - 1) * math.log(kappa), rtol=1e-12, atol=slack)


@given(
    st.integers(0, 10**6),
    st.integers(2, 300),
    st.integers(0, 3),
    st.integers(0, 3),
    st.floats(-2, 5),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_pairs_agree_with_single_densities(seed, dim, rows, columns, log_kappa, normalized, dtype) -> None:
    scale = 10.0**log_kappa
    mu, proxy = random(rows, dim, seed=seed).to(dtype), random(columns, dim, seed=seed + 1).to(dtype)
    kappa = (scale * (0.2 + random(columns, dim, seed=seed + 2).abs())).to(dtype)
    found = nivmf_distance(mu, proxy, kappa, normalized=normalized)
    assert found.shape == (rows, columns)
    assert found.dtype == dtype
    single = -nivmf_log_prob(mu.double()[:, None], proxy.double(), kappa.double(), normalized=normalized)
    slack = torch.finfo(dtype).eps * 64 * (1 + dim + scale * dim**0.5)
    torch.testing.assert_close(found.double(), single, rtol=16 * torch.finfo(dtype).eps, atol=slack)


@pytest.mark.parametrize("normalized", [True, False])
def test_gradients(normalized: bool, device: str) -> None:
    x, mu = random(2, 4, device=device).requires_grad_(), random(3, 4, seed=1, device=device).requires_grad_()
    kappa = (0.3 + 5 * random(3, 4, seed=2, device=device).abs()).requires_grad_()

    def single(x: Tensor, mu: Tensor, kappa: Tensor) -> Tensor:
        return nivmf_log_prob(x[:, None], mu, kappa, normalized=normalized)

    def pairs(x: Tensor, mu: Tensor, kappa: Tensor) -> Tensor:
        return nivmf_distance(x, mu, kappa, normalized=normalized)

    for function in (single, pairs):
        assert torch.autograd.gradcheck(function, (x, mu, kappa))
        assert torch.autograd.gradgradcheck(function, (x, mu, kappa))


def test_concentrations_of_any_size_do_not_overflow() -> None:
    for scale in (1e-15, 1e25):
        kappa = torch.tensor([[scale, 3 * scale]])
        for normalized in (True, False):
            found = nivmf_distance(torch.ones(1, 2), torch.ones(1, 2), kappa, normalized=normalized)
            assert bool(torch.isfinite(found).all())


POINTS, PROXIES = torch.ones(2, 3), torch.ones(4, 3)


test_refusals = refuses(
    InputError,
    (lambda: nivmf_distance(POINTS, PROXIES, 0 * PROXIES), "proxy_kappa: expected > 0 for every"),
    (lambda: nivmf_distance(POINTS, PROXIES, torch.ones(4)), r"proxy_kappa: expected shape \(4, 3\)"),
    (lambda: nivmf_distance(POINTS, torch.ones(4, 5), torch.ones(4, 5)), "mu 3, proxy_mu 5"),
    (lambda: nivmf_distance(POINTS, PROXIES, 1.0), "kappa: expected a torch.Tensor", InputTypeError),
    (lambda: nivmf_log_prob(torch.ones(3), torch.ones(3), torch.zeros(3)), "kappa: expected > 0 for every"),
    (lambda: nivmf_log_prob(torch.ones(3), torch.ones(3), torch.tensor(1.0)), r"expected shape \(..., D\)"),
    (lambda: nivmf_log_prob(torch.ones(3), torch.ones(2), torch.ones(3)), "x 3, mu 2, kappa 3"),
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("dim", "kappa", "other"), [(2, 3.0, 2.0), (10, 8.0, 5.0), (64, 100.0, 30.0)])
def test_value_and_gradients_for_isotropic_proxies(dim: int, kappa: float, other: float) -> None:
    repeats, n = 30, 400
    mu, proxy = random(1, dim, seed=dim), random(1, dim, seed=dim) + 0.5 * random(1, dim, seed=dim + 1)

    def leaves() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = (mu, f64([kappa]), proxy, f64([other]))
        return tuple(t.clone().requires_grad_() for t in given)

    closed = leaves()
    distance = expected_likelihood_distance(*closed)
    truth = torch.cat([distance.flatten(), *(g.flatten() for g in torch.autograd.grad(distance.sum(), closed))])
    drawn = []
    for seed in range(repeats):
        m, k, p, o = arguments = leaves()
        found = el_nivmf_distance(m, k, p, o[:, None].expand(1, dim), n, seeded(seed))
        drawn.append(torch.cat([found.flatten(), *(g.flatten() for g in torch.autograd.grad(found.sum(), arguments))]))
    values = torch.stack(drawn).detach()
    error = values.std(0) / math.sqrt(repeats)
    # Student's t with 29 degrees exceeds 6 once in 6e5; the bias of the logarithm is of the order 1 / n
    assert bool(((values.mean(0) - truth.detach()).abs() < 6 * error + 4 / n * (1 + truth.detach().abs())).all())
    assert error[0].item() < 0.02
    assert error[dim + 1].item() < 0.1 * truth[dim + 1].abs().item()


def test_algorithm_1_at_temperature_1_is_the_distance_and_at_others_is_not() -> None:
    mu, kappa, proxy, axes = random(2, 5), f64([3.0, 9.0]), random(4, 5, seed=1), 1 + 5 * random(4, 5, seed=2).abs()
    distance = el_nivmf_distance(mu, kappa, proxy, axes, 7, seeded(0))
    logits = el_nivmf_logits(mu, kappa, proxy, axes, f64(1.0), 7, seeded(0))
    torch.testing.assert_close(logits, math.log(7) - distance, rtol=1e-13, atol=1e-13)
    # erratum: the power 1/t stands inside the mean; it is convex for t < 1, so Jensen puts it above that outside
    inside = el_nivmf_logits(mu, kappa, proxy, axes, f64(0.25), 7, seeded(0)) - math.log(7)
    assert bool((inside > -distance / 0.25 + 1e-3).all())


def test_the_printed_likelihood_of_z_needs_no_sample() -> None:
    # erratum: Algorithm 1 prints the likelihood of z in the loop over samples, which is d_nivMF whatever the norm of z
    mu, proxy, axes = random(2, 5), random(4, 5, seed=1), 1 + 5 * random(4, 5, seed=2).abs()
    certain = el_nivmf_distance(mu, f64([1e13, 1e13]), proxy, axes, 3, seeded(0))
    torch.testing.assert_close(certain, nivmf_distance(mu, proxy, axes), rtol=1e-4, atol=1e-4)
    unsure = el_nivmf_distance(mu, f64([1.0, 1.0]), proxy, axes, 3, seeded(0))
    assert (unsure - certain).abs().min().item() > 1e-2


@pytest.mark.parametrize("normalized", [True, False])
def test_gradients_of_proxies_and_temperature(normalized: bool) -> None:
    mu, kappa = random(2, 4), f64([3.0, 9.0])
    proxy, axes = random(3, 4, seed=1).requires_grad_(), (0.5 + 4 * random(3, 4, seed=2).abs()).requires_grad_()
    temperature = f64([0.7]).requires_grad_()

    def logits(p: Tensor, a: Tensor, t: Tensor) -> Tensor:
        return el_nivmf_logits(mu, kappa, p, a, t, 5, seeded(0), normalized=normalized)

    assert torch.autograd.gradcheck(logits, (proxy, axes, temperature))


TENSORS = (torch.ones(2, 3), torch.ones(2), torch.ones(4, 3), torch.ones(4, 3))


@each(
    "at, value, kind, message",
    [
        (0, torch.zeros(2, 3), InputError, "mu: expected non-zero"),
        (1, torch.ones(3), InputError, r"kappa: expected shape \(2,\)"),
        (1, 2.0, InputTypeError, "kappa: expected a torch.Tensor"),
        (2, torch.ones(4, 2), InputError, "proxy_kappa: expected shape"),
        (3, torch.zeros(4, 3), InputError, "proxy_kappa: expected > 0 for every axis"),
    ],
)
def test_refusals_of_expected_likelihood(at: int, value: object, kind: type[Exception], message: str) -> None:
    arguments: list[object] = list(TENSORS)
    arguments[at] = value
    with pytest.raises(kind, match=message):
        el_nivmf_distance(*arguments, 3)
    with pytest.raises(kind, match=message):
        el_nivmf_logits(*arguments, torch.tensor(1.0), 3)
    refused(lambda: el_nivmf_distance(*TENSORS, 0), "n_samples: expected a positive whole number")
    refused(lambda: el_nivmf_logits(*TENSORS, torch.tensor(0.0), 3), "temperature: expected")

"""Distances of vMF distributions: integrals on the circle and the sphere, Monte Carlo above, gradients, refusals."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from torch import Tensor
from vmf_points import f64, random, sphere

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.vmf import distances as d

Distance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

ALL = (
    d.bhattacharyya_distance,
    d.expected_likelihood_distance,
    d.kl_distance,
    d.kl_distance_printed,
    d.squared_euclidean_distance,
)


def integrals(z: Tensor, weights: Tensor, p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> dict[Distance, float]:
    log_p, log_q = vmf.log_prob(z, *p), vmf.log_prob(z, *q)
    return {
        d.bhattacharyya_distance: -math.log((weights * ((log_p + log_q) / 2).exp()).sum().item()),
        d.expected_likelihood_distance: -math.log((weights * (log_p + log_q).exp()).sum().item()),
        d.kl_distance: (weights * log_p.exp() * (log_p - log_q)).sum().item(),
    }


@given(st.integers(2, 3), st.integers(0, 10**6), st.floats(0, 40), st.floats(0, 40))
def test_distances_are_the_integrals_on_circle_and_sphere(dim: int, seed: int, kappa: float, other: float) -> None:
    mu, proxy = random(1, dim, seed=seed), random(1, dim, seed=seed + 1)
    z, weights = sphere(dim)
    truth = integrals(z, weights, (mu[0], f64(kappa)), (proxy[0], f64(other)))
    for distance, value in truth.items():
        assert distance(mu, f64([kappa]), proxy, f64([other])).item() == pytest.approx(value, rel=1e-11, abs=1e-11)


@given(
    st.integers(0, 10**6),
    st.integers(2, 600),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 1e-8, 1.0, 40.0, 1e5]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_pairs_agree_with_the_printed_formulas(seed, dim, rows, columns, scale, dtype) -> None:
    mu, proxy = random(rows, dim, seed=seed).to(dtype), random(columns, dim, seed=seed + 1).to(dtype)
    kappa, other = scale * random(rows, seed=seed + 2).abs().to(dtype), random(columns, seed=seed + 3).abs().to(dtype)
    u, p = torch.nn.functional.normalize(mu.double(), dim=1), torch.nn.functional.normalize(proxy.double(), dim=1)
    k, o = kappa.double()[:, None], other.double()[None]
    together = torch.linalg.vector_norm(k[..., None] * u[:, None] + o[..., None] * p, dim=-1)
    cosine = u @ p.T
    log_c, log_o = vmf.log_normalizer(k, dim), vmf.log_normalizer(o, dim)
    truth = {
        d.squared_euclidean_distance: (k[..., None] * u[:, None] - o[..., None] * p).square().sum(-1),
        d.bhattacharyya_distance: vmf.log_normalizer(together / 2, dim) - log_c / 2 - log_o / 2,
        d.expected_likelihood_distance: vmf.log_normalizer(together, dim) - log_c - log_o,
        d.kl_distance: log_c - log_o + vmf.mean_resultant_length(k, dim) * (k - o * cosine),
        d.kl_distance_printed: log_c - log_o + k - o * cosine,
    }
    eps = torch.finfo(dtype).eps
    for distance, value in truth.items():
        found = distance(mu, kappa, proxy, other)
        assert found.dtype == dtype
        assert found.shape == (rows, columns)
        # terms of the size of log C_D(0) (1e3 at D = 600) and of kappa are subtracted in the printed formulas
        torch.testing.assert_close(found.double(), value, rtol=8 * eps, atol=eps * 64 * (1 + scale) + 1e-11)
    torch.testing.assert_close(d.cosine_distance(mu, proxy).double(), -cosine, rtol=0, atol=8 * eps)


def test_close_directions_of_huge_concentration_keep_their_digits() -> None:
    # At D = 3, log C + kappa = log(kappa / 2 pi), and B = log(mean kappa / root of the product) + quarter turn terms
    kappa, step = 1e8, 1e-3
    mu, proxy = f64([[1.0, 0.0, 0.0]]), f64([[math.cos(step), math.sin(step), 0.0]])
    length = kappa * math.cos(step / 2)
    closed = math.log(length / kappa) + 2 * kappa * math.sin(step / 4) ** 2
    found = d.bhattacharyya_distance(mu, f64([kappa]), proxy, f64([kappa])).item()
    assert found == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("distance", ALL)
def test_gradients(distance: Distance, device: str) -> None:
    mu, proxy = random(2, 4, device=device).requires_grad_(), random(3, 4, seed=1, device=device).requires_grad_()
    kappa, other = f64([0.4, 9.0], device).requires_grad_(), f64([0.3, 2.0, 30.0], device).requires_grad_()
    assert torch.autograd.gradcheck(distance, (mu, kappa, proxy, other))
    assert torch.autograd.gradgradcheck(distance, (mu, kappa, proxy, other))


def test_gradient_of_the_cosine() -> None:
    assert torch.autograd.gradcheck(d.cosine_distance, (random(2, 4).requires_grad_(), random(3, 4).requires_grad_()))


@each("dim, k, o", [(2, 0.0, 0.0), (3, 0.0, 3.0), (50, 3.0, 3.0)])
def test_gradients_where_the_sum_of_the_parameters_vanishes(dim: int, k: float, o: float) -> None:
    mu = torch.eye(dim, dtype=torch.float64)[:1].requires_grad_()
    kappa = f64([k]).requires_grad_()
    found = d.expected_likelihood_distance(mu, kappa, -mu.detach(), f64([o]))
    by_kappa, by_mu = torch.autograd.grad(found.sum(), (kappa, mu))
    # d/dk of log C(|a + b|) - log C(k) is A(k) - A(|a + b|) cos, and the cosine of a + b with mu is -1 where k < o
    length = vmf.mean_resultant_length(f64([k, abs(k - o)]), dim)
    assert by_kappa.item() == pytest.approx((length[0] + length[1]).item(), rel=1e-12, abs=1e-12)
    assert by_mu.abs().max().item() < 1e-12
    by_half = torch.autograd.grad(d.bhattacharyya_distance(mu, kappa, -mu.detach(), f64([o])).sum(), kappa)[0]
    half = vmf.mean_resultant_length(f64([k, abs(k - o) / 2]), dim)
    assert by_half.item() == pytest.approx((half.sum() / 2).item(), rel=1e-12, abs=1e-12)


ONE = (torch.ones(2, 3), torch.ones(2), torch.ones(4, 3), torch.ones(4))


@each(
    "at, value, kind, message",
    [
        (0, torch.ones(3), InputError, r"mu: expected shape \(rows, D\)"),
        (0, torch.zeros(2, 3), InputError, "mu: expected non-zero vectors"),
        (0, [[1.0, 2.0, 3.0]], InputTypeError, "mu: expected a torch.Tensor"),
        (1, torch.tensor([1.0, -1.0]), InputError, "kappa: expected >= 0"),
        (2, torch.ones(4, 5), InputError, "mu 3, proxy_mu 5"),
        (3, torch.ones(4, 3), InputError, r"proxy_kappa: expected shape \(4,\)|kappa"),
    ],
)
def test_refusals(at: int, value: object, kind: type[Exception], message: str) -> None:
    arguments: list[object] = list(ONE)
    arguments[at] = value
    for distance in ALL:
        with pytest.raises(kind, match=message):
            distance(*arguments)
    if at in (0, 2):
        with pytest.raises(kind, match=message):
            d.cosine_distance(arguments[0], arguments[2])

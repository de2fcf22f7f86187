"""Moments of tau of von Mises-Fisher embeddings: against samples, matrices, quadrature and limits."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.triplet import bayesian_triplet_loss, log_normal_cdf, tau_moments_vmf

Embedding = tuple[Tensor, Tensor]


def embeddings(seed: int, dim: int, kappa: float, batch: tuple[int, ...] = ()) -> list[Embedding]:
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
    three = embeddings(seed, dim, kappa)
    if close:
        # Directions 1e-4 apart, where the matrices cancel in float64.
        three = [(three[0][0] + 1e-4 * mu, one) for mu, one in three]
    moments = tau_moments_vmf(*three)
    mean, variance = by_matrices(three)
    assert moments.variance.item() == pytest.approx(variance, rel=1e-9)
    assert moments.mean.item() == pytest.approx(mean, rel=1e-9, abs=1e-9 * math.sqrt(variance))


def test_without_concentration_nothing_is_left_but_the_dimension() -> None:
    for dim in (2, 5, 512):
        moments = tau_moments_vmf(*embeddings(0, dim, 0.0))
        assert moments.mean.item() == 0
        assert moments.variance.item() == pytest.approx(8 / dim)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.4, 5.0, 200.0])
@pytest.mark.parametrize("dim", [2, 5])
def test_gradients(dim: int, kappa: float) -> None:
    flat = [t.requires_grad_() for pair in embeddings(1, dim, kappa) for t in pair]

    def moments(*t: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(tau_moments_vmf(t[0:2], t[2:4], t[4:6]))

    if kappa:
        assert torch.autograd.gradcheck(moments, flat)
    else:
        # A step to the left of 0 is refused; the mean grows by the product of two concentrations, the variance by more.
        grads = torch.autograd.grad(moments(*flat)[1].sum(), flat[1::2])
        assert all(float(grad.abs().max()) < 1e-12 for grad in grads)


def test_batches_broadcast_and_lengths_do_not_matter() -> None:
    a, p, n = (embeddings(seed, 4, 3.0, batch)[0] for seed, batch in enumerate([(3, 1), (3, 1), (3, 5)]))
    moments = tau_moments_vmf(a, p, n)
    assert moments.mean.shape == moments.variance.shape == (3, 5)
    single = tau_moments_vmf(*[(3 * mu[1, i], kappa[1, i]) for (mu, kappa), i in ((a, 0), (p, 0), (n, 2))])
    torch.testing.assert_close((moments.mean[1, 2], moments.variance[1, 2]), tuple(single))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_the_loss_takes_these_moments_for_von_mises_fisher_embeddings(margin: float, dtype: torch.dtype) -> None:
    three = [(mu.to(dtype), kappa.to(dtype)) for mu, kappa in embeddings(0, 4, 5.0, (6,))]
    given = [(mu, 1 / kappa.unsqueeze(-1)) for mu, kappa in three]
    loss = bayesian_triplet_loss(*given, margin, distribution="vmf", kl_weight=0.0, reduction="none")
    mean, variance = tau_moments_vmf(*three)
    precise = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(loss, -log_normal_cdf(-(mean + margin) / variance.sqrt()), rtol=precise, atol=precise)
    assert loss.dtype == mean.dtype == dtype
    other = bayesian_triplet_loss(
        *given, margin, distribution="vmf", moments="gaussian", kl_weight=0.0, reduction="none"
    )
    assert (other - loss).abs().max() > 1e-3


TWO = (torch.ones(2, 3), torch.ones(2))


@each(
    "bad, says",
    [
        ((torch.ones(2, 3), torch.ones(2, 1)), "kappa of positive: expected shape"),
        ((torch.zeros(2, 3), torch.ones(2)), "mu of positive: expected non-zero vectors"),
        ((torch.ones(2, 4), torch.ones(2)), "one dimension D, got anchor 3, positive 4"),
        ((torch.ones(2, 3), -torch.ones(2)), "kappa of positive: expected >= 0"),
    ],
)
def test_bad_values(bad: Embedding, says: str) -> None:
    with pytest.raises(InputError, match=says):
        tau_moments_vmf(TWO, bad, TWO)


@each("options", [{"moments": "vmf"}, {"moments": "exact"}, {"moments": "exact", "distribution": "vmf"}])
def test_moments_that_do_not_go_with_the_distribution_are_refused(options: dict[str, str]) -> None:
    three = [(mu, 1 / kappa.unsqueeze(-1)) for mu, kappa in embeddings(0, 4, 5.0, (6,))]
    with pytest.raises(InputError, match="moments: expected"):
        bayesian_triplet_loss(*three, **options)

"""What the documents on the Bayesian triplet loss print, beside what is right; the figures are those of the docs."""

from __future__ import annotations

import math

import pytest
import torch
from devices import DEVICES
from torch import Tensor

from contrastive_curvature.triplet import bayesian_triplet_loss, kl_to_normal, log_probability, tau_moments

STANDARD = torch.distributions.Normal(torch.tensor(0.0).double(), 1.0)


def three_close(device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    variance = torch.tensor([[0.05]], dtype=torch.float64, device=device)
    return [(torch.full((1, 32), x, dtype=torch.float64, device=device), variance) for x in (0.0, 0.1, 0.11)]


def test_the_margin_has_the_wrong_sign_in_the_listing_and_is_not_scaled_on_the_poster() -> None:
    three, margin = three_close(), 0.5
    right = log_probability(*three, margin).exp().item()
    mean, variance = tau_moments(*three)
    listing = STANDARD.cdf((margin - mean) / variance.sqrt()).item()
    poster = STANDARD.cdf(torch.tensor(-margin).double()).item()
    noise = torch.randn(3, 50_000, 32, generator=torch.Generator().manual_seed(0)).double()
    a, p, n = (m + v.sqrt() * e for (m, v), e in zip(three, noise, strict=True))
    share = ((a - p).square().sum(1) - (a - n).square().sum(1) < -margin).double().mean().item()
    assert (right, listing, poster) == pytest.approx((0.340, 0.706, 0.309), abs=5e-4)
    assert share == pytest.approx(right, abs=0.012)  # standard error 0.002, and the normal approximation


def test_the_floor_in_the_logarithm_of_the_listing_flattens_the_loss() -> None:
    z = torch.tensor(-10.0).double().requires_grad_()
    printed = -torch.log(STANDARD.cdf(z) + 1e-8)
    printed.backward()
    assert printed.item() == pytest.approx(18.42, abs=0.01)
    assert z.grad is not None
    assert 0 < -z.grad.item() < 1e-14


def printed_kl(mean: Tensor, variance: Tensor) -> Tensor:
    """Listing 2, lines 26 to 31, for the prior N(0, I): embeddings are columns, as in listing 1."""
    _, d = mean.shape
    return (0.5 * (variance * d + (mean**2).sum(1) - d - d * variance.log())).mean()


def test_the_gaussian_divergence_of_the_listing_runs_over_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 3, 5):
        mean = torch.randn(3, batch, generator=generator, dtype=torch.float64)
        variance = torch.rand(1, batch, generator=generator, dtype=torch.float64)
        right = kl_to_normal(mean.T, variance.T).mean().item()
        if batch == 5:
            with pytest.raises(RuntimeError, match="size"):
                printed_kl(mean, variance)
        else:
            # as many embeddings as dimensions: the mean over both is the same
            factor = 1 if batch == 3 else 1 / 3
            assert printed_kl(mean, variance).item() == pytest.approx(right * factor)


def test_the_logarithm_of_two_in_the_listing_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        torch.log(2.0)


def test_equal_embeddings_have_heavier_tails_than_the_normal_distribution() -> None:
    # D = 1, means 0, variances 1: tau = (p - n)(p + n - 2 a), a product of independent Gaussians of variances 2 and 6.
    noise = torch.randn(3, 200_000, generator=torch.Generator().manual_seed(0)).double()
    a, p, n = noise
    one = (torch.zeros(1).double(), torch.ones(1).double())
    variance = tau_moments(one, one, one).variance.item()
    assert variance == pytest.approx(12.0)
    beyond = ((p - n) * (p + n - 2 * a) < -4 * math.sqrt(variance)).double().mean().item()
    assert beyond == pytest.approx(3.2e-3, abs=5e-4)
    assert log_probability(one, one, one, 4 * math.sqrt(variance)).exp().item() == pytest.approx(3.17e-5, rel=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("distribution", ["gaussian", "vmf"])
def test_every_device_gives_the_same_loss(device: str, distribution: str) -> None:
    anchor, positive, negative = three_close(device)
    positive[0].requires_grad_()
    anchor[0].add_(0.01)
    loss = bayesian_triplet_loss(anchor, positive, negative, 0.1, distribution=distribution, kl_weight=1.0)
    loss.backward()
    first, other, last = three_close()
    first[0].add_(0.01)
    here = bayesian_triplet_loss(first, other, last, 0.1, distribution=distribution, kl_weight=1.0)
    assert positive[0].grad is not None
    assert loss.item() == pytest.approx(here.item(), rel=1e-12)

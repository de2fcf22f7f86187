"""Embeddings of which a concentration and an uncertainty are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each

import contrastive_curvature as cc
from contrastive_curvature.embedding.stored import tangential_variance_of


@given(dim=st.integers(2, 40), log_kappa=st.floats(-5, 15), seed=st.integers(0, 99))
def test_they_have_the_concentration_they_were_given(device, dim, log_kappa, seed):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(3, dim, dtype=torch.float64, generator=g).to(device)
    kappa = dim * torch.full((3,), 10.0**log_kappa, dtype=torch.float64, device=device)
    stored = cc.StoredEmbeddings(mu, kappa, torch.ones(3, device=device))
    # The concentration of the Gaussian itself; the variance along the mean, of its size, does not count.
    of_gaussian = cc.vmf.concentration_from_gaussian(stored.raw_mean, variance=stored.variance)
    torch.testing.assert_close(of_gaussian, kappa, rtol=1e-9, atol=0)
    assert torch.equal(stored.kappa, kappa)


def test_the_variance_of_no_concentration_is_finite(device):
    variance = tangential_variance_of(torch.tensor([0.0, 1e300], dtype=torch.float64, device=device), 3)
    assert bool(variance.isfinite().all())
    assert bool((variance > 0).all())


@each(
    "change, error, text",
    [
        ({"mu": "text"}, cc.InputTypeError, "mu"),
        ({"mu": torch.ones(3, 1)}, cc.InputError, r"mu: expected shape \(N, D\) with D >= 2"),
        ({"mu": torch.zeros(3, 2)}, cc.InputError, "mu: expected non-zero rows"),
        ({"kappa": torch.ones(2)}, cc.InputError, "kappa"),
        ({"kappa": -torch.ones(3)}, cc.InputError, "kappa: expected numbers >= 0"),
        ({"uncertainty": torch.full((3,), torch.inf)}, cc.InputError, "uncertainty"),
    ],
)
def test_what_is_refused(device, change, error, text):
    given = {"mu": torch.ones(3, 2), "kappa": torch.ones(3), "uncertainty": torch.ones(3)}
    given = {name: value.to(device) for name, value in given.items()}
    assert len(cc.StoredEmbeddings(**given)) == 3
    with pytest.raises(error, match=text):
        cc.StoredEmbeddings(**{**given, **change})
    with pytest.raises(cc.InputTypeError, match=r"embeddings: expected an EmbeddingDistribution, such as la\(x\)"):
        cc.StoredEmbeddings.of(given["mu"])

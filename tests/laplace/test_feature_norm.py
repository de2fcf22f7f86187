"""The warning of a diagonal last layer whose variance is little more than the norm of the features."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from laplace import Laplace
from scipy.stats import rankdata
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace.advice import norm_correlation

WIDTH, DIM = 64, 4


def pooled(n: int = 300) -> Tensor:
    """As the averages of rectified activations: all positive, large or small together."""
    generator = torch.Generator().manual_seed(0)
    size = 0.5 + torch.rand(n, 1, generator=generator)
    profile = 0.5 + torch.rand(1, WIDTH, generator=generator)
    return (size * profile + 0.3 * torch.randn(n, WIDTH, generator=generator)).clamp(min=0).double()


def sparse(n: int = 300) -> Tensor:
    """As unpooled activations: every group of points has features of its own, some of which all the data know well."""
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(0, 16, (n,), generator=generator).clamp(max=8)
    out = torch.zeros(n, 16, WIDTH // 16)
    out[torch.arange(n), which] = 0.5 + torch.rand(n, WIDTH // 16, generator=generator)
    return out.flatten(1).double()


def encoder(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Identity(), nn.Linear(WIDTH, DIM, bias=bias)).double()


def fit(x: Tensor, structure: str = "diag", bias: bool = True, weights: str = "last_layer", **kwargs: Any) -> Any:
    la: Any = Laplace(encoder(bias), "contrastive", weights, structure, backend_kwargs={"pd_fix": "psd", **kwargs})
    la.fit([(part, torch.arange(len(part)) % 5) for part in x.split(100)])
    return la


@pytest.mark.parametrize("pairs", ["dataset", "batch"])
@pytest.mark.parametrize("bias", [True, False])
def test_pooled_features_are_warned_of_once_and_sparse_ones_are_not(bias: bool, pairs: str) -> None:
    with pytest.warns(cc.FeatureNormWarning, match=r"rank correlation of (1\.000|0\.9).*kron_lowrank") as caught:
        fit(pooled(), bias=bias, pairs=pairs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    fit(sparse(), bias=bias, pairs=pairs)  # a warning would be an error here


def test_others_are_not_warned_of() -> None:
    for weights, structure in (("last_layer", "kron_lowrank"), ("last_layer", "kron"), ("all", "diag")):
        fit(pooled(), structure, weights=weights)
    fit(pooled(99))  # too few points for a rank correlation


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [pooled, sparse])
def test_the_correlation_is_that_of_the_posteriors_own_variance(make: Any, bias: bool) -> None:
    x = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cc.FeatureNormWarning)
        la = fit(x, bias=bias)
    la.optimize_prior_precision(strength=1.0)
    out = la(x)
    u = out.mu.detach()
    across = (out.variance * (1 - u.square())).sum(1).detach().numpy()
    ranks = np.stack([rankdata(across), rankdata(x.norm(dim=1).numpy())])
    layer = la.model.last_layer
    found = norm_correlation(x, layer.weight, layer.bias, la.H)
    assert found == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-4)
    assert (found > 0.93) == (make is pooled)

"""An encoder that learned nothing: no positive curvature is left, and every structure says so and what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc

SEED = 53
"""Of random weights whose curvature factor has negative eigenvalues only, as about one in thirty has."""


def problem(size: float, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(12, 5, dtype=torch.float64)
    encoder = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3)).double().eval()
    with torch.no_grad():
        encoder[2].weight.mul_(size)
    return encoder, x, torch.arange(12) % 6


def fitted(structure: str, size: float, seed: int = 0, **options: Any) -> Any:
    encoder, x, y = problem(size, seed)
    la = Laplace(encoder, "contrastive", hessian_structure=structure, backend_kwargs=options)
    la.fit([(x, y)])
    return la


@each("structure", ["kron_lowrank", "kron", "diag", "full"])
def test_fit_warns_and_the_prior_is_refused(structure: str) -> None:
    """Embeddings in one place: in euclidean distance every pair's curvature has the sign of its weight."""
    with pytest.warns(UserWarning, match="zero everywhere: the posterior is the prior.*Train the encoder") as caught:
        la = fitted(structure, 1e-12, distance="euclidean")
    assert caught[0].filename == __file__
    before = la.temperature, la.prior_precision.clone()
    with pytest.raises(cc.InputError, match=r"zero everywhere.*smaller negative_weight.*la\.prior_precision"):
        la.optimize_prior_precision()
    assert (la.temperature, float(la.prior_precision)) == (before[0], float(before[1]))
    la.prior_precision = 2.0
    assert la(problem(1e-12)[1]).uncertainty.isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(structure, 1e-12, distance="euclidean", negative_weight=0.01).optimize_prior_precision()
        fitted("diag", 1e-12, distance="euclidean", pd_fix="positive").optimize_prior_precision()


def test_factors_may_have_nothing_where_a_diagonal_has_something() -> None:
    """Kronecker factors are clamped in the eigenbasis of a sum over points, a diagonal entry by entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagonal = fitted("diag", 1.0, seed=SEED)
    assert bool((diagonal.H > 0).any())
    assert bool((diagonal.H_raw < 0).any())
    for structure in ("kron_lowrank", "kron"):
        with pytest.warns(UserWarning, match="zero everywhere"):
            la = fitted(structure, 1.0, seed=SEED)
        assert bool((torch.linalg.eigvalsh(la.H_raw[0][0]) < 0).all())

"""``la(x, n_samples=S)``: covariances from samples of the linearised encoder, without a Jacobian."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc

KINDS = [
    ("all", "diag", {}),
    ("all", "kron", {}),
    ("all", "full", {}),
    ("subnetwork", "full", {"indices": [0, 3, 20, 41]}),
]
S = 7


def inputs(n: int, seed: int, device: str) -> Tensor:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device)


def fitted(weights: str, structure: str, options: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), cc.L2Norm()).double().to(device)
    more = {"subnetwork_indices": torch.tensor(options["indices"])} if options else {}
    la: Any = Laplace(encoder, "contrastive", weights, structure, backend_kwargs={"pd_fix": "psd"}, **more)
    la.fit([(inputs(24, 0, device), (torch.arange(24) % 3).to(device))])
    la.optimize_prior_precision()
    return la


@pytest.mark.parametrize(("weights", "structure", "options"), KINDS)
def test_the_covariance_is_that_of_the_moved_outputs(weights: str, structure: str, options: Any, device: str) -> None:
    la, x = fitted(weights, structure, options, device), inputs(6, 1, device)

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(3)

    out = la(x, n_samples=S, generator=generator())
    every = Laplace(la.model, "contrastive", "all", "diag")
    jacobians, z = every.backend.jacobians(x)
    moves = la.sample(S, generator()) - la.mean
    moved = torch.einsum("bdp,sp->bsd", jacobians, moves)
    truth = moved.mT @ moved / S
    torch.testing.assert_close(out.covariance, truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.raw_mean, z)
    dense = cc.EmbeddingDistribution(z, covariance=truth).relative_to(la.typical_norm, la.class_centres)
    torch.testing.assert_close(out.uncertainty, dense.uncertainty, rtol=1e-8, atol=0)
    parts = cc.EmbeddingDistribution.cat([out[:2], out[2:], la(x[:1])])
    torch.testing.assert_close(parts.covariance[:6], truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.predict([x], n_samples=S, generator=generator()).covariance, out.covariance)
    with pytest.raises(cc.UnsupportedError, match=r"p_value.*from samples"):
        _ = out.p_value


def test_the_standard_error_is_how_far_repetitions_scatter(device: str) -> None:
    la, x = fitted(*KINDS[0], device), inputs(3, 1, device)
    generator = torch.Generator(device).manual_seed(0)
    outs = [la(x, n_samples=60, generator=generator) for _ in range(150)]
    angles = torch.stack([out.uncertainty for out in outs])
    error = torch.stack([out.uncertainty_error for out in outs]).mean(0)
    torch.testing.assert_close(error, angles.std(0), rtol=0.2, atol=0)
    # Unbiased in the variance, of which the angle is a concave function.
    exact = la(x)
    spread = torch.stack([out.tangential_variance for out in outs]).mean(0)
    torch.testing.assert_close(spread, exact.tangential_variance, rtol=0.08, atol=0)
    assert torch.equal(exact.uncertainty_error, torch.zeros_like(error))
    assert torch.isinf(la(x, n_samples=1, generator=generator).uncertainty_error).all()


def test_a_last_layer_keeps_its_closed_form(device: str) -> None:
    la, x = fitted("last_layer", "kron", {}, device), inputs(3, 1, device)
    assert torch.equal(la(x, n_samples=2).covariance, la(x).covariance)

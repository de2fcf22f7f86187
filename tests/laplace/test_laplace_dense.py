"""Dense posteriors keep their digits in float32 as far as the curvature does, and say where it does not."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    ("all", {}),
    ("last_layer", {}),
    ("subnetwork", {"subnetwork_indices": torch.arange(0, 150, 2)}),
]


def fitted(weights: str, more: dict[str, Any], scale: float, dtype: torch.dtype, device: str) -> tuple[Any, Tensor]:
    """A posterior of an encoder whose outputs are short: the curvature goes with the inverse of their square."""
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(60, 6, generator=generator), torch.arange(60) % 4
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(scale)
    la = Laplace(model.to(device, dtype), "contrastive", weights, "full", **more)
    x, labels = x.to(device, dtype), labels.to(device)
    la.fit([(x[:32], labels[:32]), (x[32:], labels[32:])])
    return la, x


@pytest.mark.parametrize(("weights", "more"), WEIGHTS, ids=[name for name, _ in WEIGHTS])
@pytest.mark.parametrize(("scale", "tolerance"), [(1, 1e-5), (1e-2, 5e-3)])
def test_float32_is_as_good_as_its_curvature(
    weights: str, more: dict[str, Any], scale: float, tolerance: float, device: str
) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        la, x = fitted(weights, more, scale, dtype, device)
        joint = la(x[:5], joint=True)
        assert la.sample(3).dtype == la.posterior_covariance.dtype == joint.joint_covariance.dtype == dtype
        numbers = [la(x).kappa, joint.kappa, la.log_det_posterior_precision.reshape(1)]
        found.append(torch.cat(numbers).double())
    assert torch.allclose(*found, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(("weights", "more"), WEIGHTS, ids=[name for name, _ in WEIGHTS])
def test_a_prior_below_the_rounding_of_the_curvature_is_told_of(
    weights: str, more: dict[str, Any], device: str
) -> None:
    la, x = fitted(weights, more, 1e-3, torch.float32, device)
    with pytest.warns(UserWarning, match=r"rounded to torch.float32, which is [\d.e+]+ % of the prior precision"):
        la(x)
    # The remedies that it names.
    la, x = fitted(weights, more, 1e-3, torch.float64, device)
    truth = la(x).kappa
    assert truth.isfinite().all()
    la, x = fitted(weights, more, 1e-3, torch.float32, device)
    la.optimize_prior_precision()
    assert la(x).kappa.isfinite().all()


def test_a_curvature_beyond_the_range_of_float32_still_has_a_posterior(device: str) -> None:
    """Its negative eigenvalues of rounding are set to zero in float64, so that the precision is positive definite."""
    la, x = fitted("all", {}, 1e-6, torch.float32, device)
    with pytest.warns(UserWarning, match="rounded to torch.float32"):
        assert bool(la(x).covariance.isfinite().all())
    la.optimize_prior_precision()
    assert la(x).kappa.isfinite().all()

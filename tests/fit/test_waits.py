"""A batch of a fit seldom waits for a GPU, and conditions that are looked at later are refused as at once."""

import math
from typing import Any

import pytest
import torch
from devices import PRETENDED
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

pytestmark = pytest.mark.skipif(not PRETENDED, reason="a pretended device counts waits: make test-device")


def waits(n: int, weights: str, structure: str, loss: cc.losses.CosineLoss, device: str) -> int:
    """Count the waits of a fit of n batches."""
    from pretend_device import WAITS

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    loader = DataLoader(TensorDataset(torch.randn(10 * n, 6), torch.arange(10 * n) % 5), batch_size=10)
    WAITS.clear()
    Laplace(model, "contrastive", weights, structure, backend_kwargs={"loss": loss}).fit(loader)
    return len(WAITS)


@pytest.mark.parametrize(
    ("weights", "structure", "loss", "most"),
    [
        ("last_layer", "kron_lowrank", cc.ContrastiveLoss(), 0),
        ("last_layer", "kron_lowrank", cc.InfoNCELoss(), 0),
        ("last_layer", "kron_lowrank", cc.LogisticLoss(pd_fix="psd"), 1),  # eigenvalues
        ("all", "diag", cc.ContrastiveLoss(), 3),  # signed square roots
        ("last_layer", "kron_lowrank", cc.ProxyLoss(torch.eye(5, 3) + 1), 2),  # proxies on the CPU; labels
        ("all", "kron", cc.SupConLoss(), 2),  # its cost, whose positives are listed; eigenvalues
    ],
)
def test_a_batch_seldom_waits(weights: str, structure: str, loss: cc.losses.CosineLoss, most: int, device: str) -> None:
    """Conditions are looked at after many batches."""
    few, many = (waits(n, weights, structure, loss, device) for n in (4, 24))
    assert few
    assert many - few <= 20 * (most + 0.25)


def test_conditions_that_are_looked_at_late_are_refused_alike(device: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    x, y = torch.randn(40, 6), torch.arange(40) % 5
    for row, bad in ((23, math.nan), (13, math.inf)):
        broken = x.clone()
        broken[row] = bad
        with pytest.raises(cc.InputError, match=rf"batch {row // 10} .*NaN or infinity in rows \[{row % 10}\]"):
            Laplace(model, "contrastive").fit(DataLoader(TensorDataset(broken, y), batch_size=10))

    class Changing(list[Any]):
        """Another label in the second pass."""

        def __iter__(self) -> Any:
            self.passes = getattr(self, "passes", 0) + 1
            return iter([(x[:20], y[:20]), (x[20:], y[20:] + 9 * (self.passes > 2))])

    with pytest.raises(cc.InputError, match=r"other targets in the second, \[9, 10, 11, 12, 13\]"):
        Laplace(model, "contrastive", "all", "diag").fit(Changing([0, 0]))

"""Small posteriors of a last layer, and how their outputs are compared with ``la(x)``."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from tiny import numbers
from torch import Tensor, nn

import contrastive_curvature as cc

INPUTS, WIDTH, DIM = 4, 7, 3
STRUCTURES = {
    "diag": {},
    "kron": {"rank": "full"},
    "full": {},
    "kron_lowrank": {},
    "kron_lowrank of rank 2": {"rank": 2},
}


def inputs(n: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    return (2 * numbers(seed, n, INPUTS)).to(device, dtype)


def fitted(
    structure: str = "kron_lowrank",
    *,
    calibrated: bool = True,
    centres: bool = True,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    body: nn.Module | None = None,
    seed: int = 0,
    calibrate: Mapping[str, Any] | None = None,
    **host: Any,
) -> Any:
    torch.manual_seed(seed)
    if body is None:
        layers = [nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, DIM, bias=bias)]
        body = nn.Sequential(*layers, cc.L2Norm())
    x, labels = inputs(48, seed + 1, dtype, device), torch.arange(48, device=device) % 3
    x = x + labels.unsqueeze(1)
    options = {"pd_fix": "psd", **STRUCTURES[structure]}
    la = Laplace(
        body.to(device, dtype), "contrastive", "last_layer", structure.split()[0], backend_kwargs=options, **host
    )
    la.fit([(x[:20], labels[:20]), (x[20:], labels[20:])])
    la.optimize_prior_precision()
    if not centres:
        la.class_centres = None
    if calibrated:
        la.calibrate([inputs(37, seed + 2, dtype, device)], **(calibrate or {}))
    return la


def truth(la: Any, x: Any, outputs: tuple[str, ...] = ("mu", "kappa", "uncertainty", "p_value")) -> list[Tensor]:
    prediction = la(x)
    return [getattr(prediction, name).cpu() for name in outputs]


def assert_same(found: Any, wanted: list[Tensor], tolerance: float) -> None:
    """Entries of ``mu`` are at most one in size; the others are compared relatively."""
    assert len(found) == len(wanted)
    for number, (new, old) in enumerate(zip(found, wanted, strict=True)):
        new = torch.as_tensor(np.asarray(new.detach().cpu() if isinstance(new, Tensor) else new))
        assert new.dtype == old.dtype
        torch.testing.assert_close(
            new, old, rtol=0 if number == 0 else tolerance, atol=tolerance if number == 0 else 0, equal_nan=True
        )

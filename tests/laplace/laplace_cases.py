"""The posterior of the small encoder, of every kind."""

from typing import Any

import torch
from laplace import Laplace
from tiny import data, encoder

INDICES = torch.tensor([0, 3, 26, 30, 41])
"""The subnetwork, of 43 parameters."""


def make(
    weights: str = "last_layer", structure: str = "diag", dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    if weights == "subnetwork":
        options.setdefault("subnetwork_indices", INDICES)
    kwargs = {"margin": 1.2, "pd_fix": "psd"}
    return Laplace(encoder(dtype=dtype), "contrastive", weights, structure, backend_kwargs=kwargs, **options)


def fitted(
    weights: str = "last_layer", structure: str = "diag", dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    la = make(weights, structure, dtype, **options)
    x, y = data(dtype=dtype)
    la.fit([(x[:6], y[:6]), (x[6:], y[6:])])
    return la

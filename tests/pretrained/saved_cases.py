"""What the tests of saved posteriors share: small encoders, fitted posteriors, and whether two predict the same."""

import copy
import warnings
from typing import Any

import torch
from laplace import Laplace
from strategies import close
from tiny import numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

__all__ = ["batches", "encoder", "fitted", "inputs", "predicts_the_same", "reloaded"]

ROUNDING = 1e-10
"""Saved tensors are contiguous, so that a product may add in another order."""


def inputs(seed: int, n: int = 6, device: str = "cpu") -> Tensor:
    return numbers(seed, n, 4).to(device)


def batches(device: str, n: int = 24) -> Any:
    x = inputs(0, n, device)
    return DataLoader(TensorDataset(x, torch.arange(n, device=device) % 3), 8)


def encoder(device: str = "cpu", seed: int = 0, activation: type[nn.Module] = nn.Tanh, width: int = 5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), activation(), nn.Linear(width, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=generator))
    return model.eval().to(device)


def fitted(weights: str, structure: str, device: str, *, calibrated: bool = True, **options: Any) -> Any:
    """A fitted posterior with a prior and a calibration of its own."""
    given: dict[str, Any] = {}
    if weights == "subnetwork":
        given = {"backend_kwargs": {"pd_fix": "psd"}, "subnetwork_indices": torch.tensor([0, 3, 8, 30])}
    with warnings.catch_warnings():
        # K-FAC leaves cross terms out, and says so.
        warnings.simplefilter("ignore", UserWarning)
        la = Laplace(encoder(device), "contrastive", weights, structure, **{**given, **options})
        la.fit(batches(device))
    la.optimize_prior_precision()
    if calibrated:
        la.calibrate(DataLoader(TensorDataset(inputs(1, 20, device), torch.zeros(20, device=device)), 8))
    return la


def predicts_the_same(one: Any, other: Any, device: str) -> bool:
    """Whether two posteriors give the same distributions, uncertainties, p-values and samples."""
    x = inputs(2, 6, device)
    mine, theirs = one(x), other(x)
    names = ["mu", "kappa", "covariance", "uncertainty"] + (["p_value"] if one.posterior.calibration else [])
    same = all(close(getattr(mine, name).detach(), getattr(theirs, name).detach(), ROUNDING) for name in names)
    if one.posterior.calibration is None and other.posterior.calibration is not None:
        return False
    drawn = [
        la.predictive_samples(x, n_samples=3, generator=torch.Generator(device).manual_seed(3)) for la in (one, other)
    ]
    same = same and close(drawn[0].detach(), drawn[1].detach(), 1e-6)
    settings = [(la.temperature, la.typical_norm, la.n_data, float(la.loss), la.plain_options()) for la in (one, other)]
    return same and settings[0] == settings[1] and close(one.prior_precision, other.prior_precision, 0.0)


def reloaded(la: Any, folder: Any, device: str, **options: Any) -> Any:
    """Saved and loaded around another object of the same encoder."""
    model = la.model.model if hasattr(la.model, "last_layer") else la.model
    return cc.load_pretrained(la.save_pretrained(folder), copy.deepcopy(model).to(device), **options)

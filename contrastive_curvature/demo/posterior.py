"""The post-hoc posterior of a trained encoder, and what it predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from tqdm import tqdm

from contrastive_curvature import vmf
from contrastive_curvature.demo.config import DemoConfig
from contrastive_curvature.demo.data import Batches
from contrastive_curvature.hessian.sphere import normalize

__all__ = ["closed_form", "fit_posterior", "forward", "read_features", "sampled_embeddings", "sampled_vmf", "timed"]

_CHUNK = 2**25
"""Numbers that sampled weights, or what they give, may fill at once."""

T = TypeVar("T")


def timed(work: Callable[[], T], device: torch.device, repeats: int = 1) -> tuple[T, float]:
    """Run something, and return what it gives with the seconds it took, the device's queue included.

    Args:
        work: What to run.
        device: Where it runs.
        repeats: How often to run it at most; the quickest counts. A run of more than a second is not repeated.

    Returns:
        What ``work`` returns, and the seconds.
    """
    best = float("inf")
    for _ in range(repeats):
        _synchronize(device)
        started = time.perf_counter()
        result = work()
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
        if best > 1:
            break
    return result, best


def fit_posterior(config: DemoConfig, encoder: nn.Module, batches: Batches) -> Any:
    """Fit the last layer's diagonal posterior over all pairs of the training set, with the library's default prior.

    Args:
        config: Options of the curvature.
        encoder: The trained encoder.
        batches: The training set.

    Returns:
        The fitted Laplace object.
    """
    from laplace import Laplace

    la = Laplace(
        encoder,
        likelihood="contrastive",
        subset_of_weights="last_layer",
        hessian_structure="diag",
        backend_kwargs=config.curvature,
    )
    la.fit(batches, progress_bar=True)
    la.optimize_prior_precision()
    return la


def forward(encoder: nn.Module, batches: Batches) -> Tensor:
    """Raw outputs of the deterministic encoder, shape (N, D)."""
    with torch.no_grad():
        return torch.cat([encoder(x) for x, _ in batches])


def closed_form(la: Any, batches: Batches) -> tuple[Tensor, Tensor]:
    """Uncertainties without sampling.

    Args:
        la: The posterior.
        batches: Images.

    Returns:
        The library's uncertainties (N,), and ``1 / kappa`` (N,).
    """
    parts = [(predicted.uncertainty, 1 / predicted.kappa) for x, _ in batches for predicted in [la(x)]]
    return torch.cat([uncertainty for uncertainty, _ in parts]), torch.cat([angular for _, angular in parts])


def read_features(la: Any, batches: Batches, keep: int | None = None) -> tuple[Tensor, Tensor]:
    """Raw outputs of all images, and what the last layer makes them from.

    Args:
        la: The posterior.
        batches: Images.
        keep: Of how many images to keep the features; ``None`` for all.

    Returns:
        Raw outputs (N, D) and features (keep, F).
    """
    outputs, features = [], []
    left = len(batches.x) if keep is None else keep
    with torch.no_grad():
        for x, _ in tqdm(batches, desc="[features]", leave=False):
            z, phi = la.model.forward_with_features(x)
            outputs.append(z)
            if left > 0:
                # A copy: a slice would keep its whole batch alive.
                features.append(phi[:left] if left >= len(phi) else phi[:left].clone())
                left -= len(phi)
    return torch.cat(outputs), torch.cat(features)


def sampled_embeddings(
    la: Any, features: Tensor, n_samples: int, seed: int, desc: str, progress: bool = True
) -> Iterator[Tensor]:
    """Embeddings by one sampled network after the other, each the same network for all images.

    Only the last layer is random, so the features are computed once and for all. Equal seeds give equal networks.

    Args:
        la: The posterior.
        features: Inputs of the last layer, shape (N, F).
        n_samples: Number of networks.
        seed: Of their weights.
        desc: What the progress bar says.
        progress: Whether to show one.

    Yields:
        Unit embeddings, shape (N, D).
    """
    generator = torch.Generator(features.device).manual_seed(seed)
    layer = la.model.last_layer
    dim, width = layer.weight.shape
    step = max(1, _CHUNK // max(dim * width, dim * len(features)))
    with tqdm(total=n_samples, desc=desc, leave=False, disable=not progress) as bar:
        for start in range(0, n_samples, step):
            # Not around the yield: what comes between two samples is the caller's.
            with torch.no_grad():
                theta = la.sample(min(step, n_samples - start), generator=generator)
                weight, bias = theta[:, : dim * width].reshape(-1, width), theta[:, dim * width :].flatten()
                raw = linear(features, weight, bias).view(len(features), -1, dim)
                units = [normalize(sample)[0] for sample in raw.unbind(1)]
            for unit in units:
                yield unit
                bar.update()


def sampled_vmf(la: Any, features: Tensor, n_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mean directions and uncertainties from sampled networks (paper, Eq. 42-43).

    Args:
        la: The posterior.
        features: Inputs of the last layer, shape (N, F).
        n_samples: Number of networks.
        seed: Of their weights.

    Returns:
        Mean directions (N, D), and ``1 / kappa`` (N,), float64: a concentration comes from one minus the mean length.
    """
    total: Tensor | None = None
    for u in sampled_embeddings(la, features, n_samples, seed, "[sampled networks]"):
        total = u.double() if total is None else total + u.double()
    if total is None:
        msg = "n_samples was checked to be positive"
        raise RuntimeError(msg)
    mean = total / n_samples
    length = mean.norm(dim=1).clamp(max=1.0)
    return mean, 1 / vmf.concentration(length, mean.shape[1]).clamp(min=1e-12)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

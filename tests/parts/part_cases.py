"""Fits whose data come in parts: what is fitted, of what, and how it is compared."""

import copy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from laplace import Laplace
from tiny import Numbered, encoder, numbers
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.fit.part_state import State
from contrastive_curvature.losses.logistic import LogisticLoss

N = 12


def neighbours(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Positive where targets are equal, negative where they are neighbours."""
    return a[:, None] == b, (a[:, None] - b).abs() == 1


CASES: dict[str, dict[str, Any]] = {
    "exact": {"margin": 0.9},
    "as the number of points has it": {"margin": 0.9, "negative_samples": "auto"},
    "sampled": {"margin": 0.9, "negative_samples": 7},
    "sampled, all weights": {"margin": 1.2, "negative_samples": 7, "weights": "all"},
    "positive": {"pd_fix": "positive", "margin": 0.9, "negative_samples": 7, "weights": "all"},
    "coupled by sample": {"pd_fix": "full", "margin": 0.9, "negative_samples": 7, "structure": "full"},
    "kron": {"pd_fix": "psd", "margin": 0.9, "structure": "kron", "weights": "all"},
    "kron_lowrank": {"pd_fix": "psd", "margin": 0.9, "structure": "kron_lowrank", "negative_samples": 7},
    "relation": {"relation": neighbours, "margin": 0.9},
    "logistic sampled": {"loss": LogisticLoss(4.0, -1.0, pd_fix="psd_parts"), "negative_samples": 7},
    "mc samples": {"pd_fix": "psd", "margin": None, "structure": "kron", "mc_samples": 2, "weights": "all"},
    "pairs of batches": {"margin": 0.9, "pairs": "batch", "structure": "full"},
    "all pairs of batches": {"margin": 0.9, "pairs": "batch", "normalization": "sum"},
    "anchors of batches": {"loss": cc.InfoNCELoss(0.4), "structure": "kron"},
}
"""Options of the backend, and ``weights`` and ``structure`` of the fit."""

ALONE = ("pairs of batches", "all pairs of batches", "anchors of batches", "mc samples")
"""Fits whose curvature depends on which points share a batch, or on random numbers of a part."""


def make(case: str, device: str, **more: Any) -> Any:
    """A posterior of its own, around an encoder of its own."""
    options = {**CASES[case], **more}
    weights, structure = options.pop("weights", "last_layer"), options.pop("structure", "diag")
    if "loss" in options:
        options["loss"] = copy.deepcopy(options["loss"])
    elif "negative_samples" not in options and "pairs" not in options:
        options["negative_samples"] = None
    elif "pairs" in options:
        options.pop("negative_samples", None)
    if "loss" in options and isinstance(options["loss"], LogisticLoss):
        options.setdefault("negative_samples", None)
    return Laplace(encoder(device), "contrastive", weights, structure, backend_kwargs=options)


def points(device: str, n: int = N, seed: int = 7) -> tuple[Tensor, ...]:
    """Inputs and labels."""
    return numbers(seed, n, 4).to(device), (torch.arange(n) // 2 % 3).to(device)


def batches_of(device: str, sizes: Sequence[int], chosen: Tensor | None = None, seed: int = 7) -> Numbered:
    """The points, or some of them, in batches of some sizes."""
    given = points(device, seed=seed)
    chosen = torch.arange(len(given[0])) if chosen is None else chosen
    at = chosen.to(device)
    return Numbered(list(zip(*(part[at].split(list(sizes)) for part in given), strict=True)), chosen)


def fit_in_parts(case: str, device: str, parts: Sequence[Any], **more: Any) -> tuple[Any, State, State]:
    """A fit in which every step has objects of its own."""
    count = len(parts)
    first = [make(case, device, **more).part_statistics(part, (k, count)) for k, part in enumerate(parts)]
    statistics = State.merged(first)
    second = [make(case, device, **more).part_curvature(p, (k, count), statistics) for k, p in enumerate(parts)]
    curvature = State.merged(second)
    la = make(case, device, **more)
    la.fit_parts(statistics, curvature)
    return la, statistics, curvature


def content_of(state: State) -> bytes:
    """What a file of a state holds."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "state"
        state.save(file)
        return file.read_bytes()


def posterior(la: Any, device: str) -> dict[str, Tensor]:
    """What a fit leaves, as tensors."""
    la.prior_precision = 2.0
    found = la(numbers(3, 5, 4).to(device))
    out = {"mean": found.raw_mean, "covariance": found.covariance, "uncertainty": found.uncertainty}
    scalars = {"loss": la.loss, "cost": la.cost, "n": la.n_data, "norm": la.typical_norm}
    out |= {name: torch.tensor(-1.0 if part is None else float(part)).double() for name, part in scalars.items()}
    if la.class_centres is not None:
        out |= {"sums": la.class_centres.sums, "labels": la.class_centres.labels.double()}
        out["typical"] = torch.tensor(la.class_centres.typical).double()
    return out


def same_posterior(la: Any, other: Any, device: str, tolerance: float = 1e-9) -> None:
    mine, theirs = posterior(la, device), posterior(other, device)
    assert mine.keys() == theirs.keys()
    for name in mine:
        size = max(float(theirs[name].abs().max()), 1e-300)
        assert float((mine[name] - theirs[name]).abs().max()) <= tolerance * size, name

"""Fits that several processes do together, and what is compared of them."""

from collections.abc import Iterator
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature as cc

N, MANY, WIDTH, BATCH = 25, 2307, 5, 5
"""25 points are no multiple of two or three processes; of 2,307 a fit keeps some."""

FULL = {"pd_fix": "full", "margin": None}
SAMPLED = {"negative_samples": 7}

# Part of the weights, structure, options of the backend, and what the points are given as.
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "last layer, diag": ("last_layer", "diag", {}, "points"),
    "last layer, kron": ("last_layer", "kron", {}, "points"),
    "last layer, full": ("last_layer", "full", {}, "points"),
    "last layer, kron_lowrank": ("last_layer", "kron_lowrank", {}, "points"),
    "all, kron": ("all", "kron", {}, "points"),
    "all, full": ("all", "full", {}, "points"),
    "subnetwork, full": ("subnetwork", "full", {}, "points"),
    "shuffled": ("last_layer", "diag", {}, "shuffled"),
    "uneven": ("last_layer", "full", {}, "uneven"),
    "empty": ("last_layer", "kron", {}, "empty"),
    "many, sampled": ("last_layer", "kron", SAMPLED, "many"),
    "negatives": ("last_layer", "diag", SAMPLED, "points"),
    "negatives, full": ("all", "full", {**SAMPLED, "pd_fix": "full"}, "points"),
    "batches": ("last_layer", "diag", {"pairs": "batch"}, "points"),
    "batches, sum": ("last_layer", "full", {"pairs": "batch", "normalization": "sum"}, "points"),
    "infonce, kron": ("all", "kron", {"loss": cc.InfoNCELoss(0.5)}, "views"),
    "full": ("all", "full", FULL, "points"),
    "full, empty": ("last_layer", "full", FULL, "empty"),
    "whole": ("last_layer", "diag", {}, "whole"),
    "whole, infonce": ("last_layer", "diag", {"loss": cc.InfoNCELoss(0.5)}, "whole views in order"),
}


def numbers(n: int, seed: int, device: str) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def data(given: str, device: str) -> TensorDataset:
    n = MANY if given == "many" else N
    x, second = numbers(n, 0, device), numbers(n, 1, device)
    # The same numbers of every class in every share, as they often are in large data sets.
    return TensorDataset(x, second if "views" in given else (torch.arange(n) // 6 % 3).to(device))


def made(device: str, weights: str, structure: str, options: dict[str, Any], seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3)).double().to(device)
    if weights == "subnetwork":
        more["subnetwork_indices"] = torch.tensor([0, 3, 11, 26, 30], device=device)
    return Laplace(encoder, "contrastive", weights, structure, backend_kwargs=options, **more)


def fitted(device: str, case: str, loader: Any) -> Any:
    weights, structure, options, _ = CASES[case]
    la = made(device, weights, structure, options)
    la.fit(loader)
    return la


def parts(given: str, world: int, points: TensorDataset) -> list[list[int]]:
    """The points of every process."""
    every = list(range(len(points)))
    if given == "uneven":
        return [every[:4], every[4:]] + [[]] * (world - 2)
    if given == "empty":
        return [[], *(every[rank :: world - 1] for rank in range(world - 1))]
    return [every[rank::world] for rank in range(world)]


def batches(points: TensorDataset, chosen: list[int]) -> list[tuple[Tensor, ...]]:
    return [points[chosen[start : start + BATCH]] for start in range(0, len(chosen), BATCH)]


def size(given: str) -> int:
    return 200 if given == "many" else BATCH


def share(given: str, rank: int, world: int, device: str) -> Any:
    points = data(given, device)
    if given.startswith("whole"):
        return DataLoader(points, BATCH, shuffle="order" not in given)
    if given in ("uneven", "empty"):
        return batches(points, parts(given, world, points)[rank])
    return DataLoader(points, size(given), sampler=DistributedSampler(points, world, rank, shuffle=given == "shuffled"))


def together(case: str, world: int, device: str) -> Any:
    """All the data for one process, in the same batches where these matter."""
    _, _, options, given = CASES[case]
    points = data(given, device)
    if options.get("pairs") == "batch" or "infonce" in case:
        whole = given.startswith("whole")
        return [
            batch for chosen in (parts(given, world, points) if not whole else []) for batch in batches(points, chosen)
        ] or DataLoader(points, BATCH)
    return DataLoader(points, size(given))


def values(la: Any) -> dict[str, Tensor]:
    """What a posterior says, all of it."""
    device = str(la._device)
    out = {f"raw {k}": part.detach().clone() for k, part in enumerate(flat(la.H_raw))}
    found = {"loss": la.loss, "cost": la.cost, "n": la.n_data, "norm": la.typical_norm, "error": la.curvature_error}
    out |= {name: torch.tensor(-1.0 if x is None else float(x), dtype=torch.float64) for name, x in found.items()}
    centres = la.class_centres
    if centres is not None:
        out |= {"labels": centres.labels, "sums": centres.sums, "typical": torch.tensor(centres.typical)}
    la.calibrate([numbers(11, 2, device)])
    prediction = la(3 * numbers(6, 3, device))
    out |= {"p": prediction.p_value, "kappa": prediction.kappa, "uncertainty": prediction.uncertainty}
    return {name: part.detach().cpu() for name, part in out.items()}


def flat(raw: Any) -> Iterator[Tensor]:
    if isinstance(raw, Tensor):
        yield raw
        return
    for part in raw:
        yield from flat(part)

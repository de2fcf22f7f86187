"""How far a last-layer diagonal from a random bank of M points as negatives is from that of all pairs.

For feature files of ``benchmarks.transfer``: the curvature of the last layer over some thousand training points, exact,
and from many banks of each size. ``bias``: the norm of the mean error over banks relative to the norm of the exact
diagonal, less what the spread of so many banks would give on its own; ``spread``: of one bank about the mean of banks,
the root mean square; ``trace``: the relative mean error of the sum of the diagonal, signed, with its standard error.

Run: ``python -m benchmarks.negative_samples_bias --cache FOLDER [--only NAME ...] [--out FOLDER]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.script import judge_files
from contrastive_curvature import (
    ContrastiveLoss,
    InfoNCELoss,
    MultiSimilarityLoss,
    SigLIPLoss,
    SupConLoss,
)
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.derivatives import DatasetDerivatives
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.contrastive_classes import LabelledPoints, SampledContrastive
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.sampled_rows import SampledRowDerivatives
from contrastive_curvature.pairs.relation import LabelRelation

POINTS = 4000
"""Training points, chosen at random."""

BANKS = {100: 12, 300: 8, 1000: 6, 3000: 3}
"""Size of a bank -> number of banks."""

LOSSES: dict[str, Callable[[], CosineLoss]] = {
    "contrastive, fixed": lambda: ContrastiveLoss(margin=0.7, pd_fix="fixed"),
    "contrastive, psd": lambda: ContrastiveLoss(margin=0.7, pd_fix="psd"),
    "SigLIP, fixed": lambda: SigLIPLoss(pd_fix="fixed"),
    "SigLIP, psd_parts": lambda: SigLIPLoss(),
    "InfoNCE 0.1, psd_parts": lambda: InfoNCELoss(0.1),
    "InfoNCE 0.05, psd_parts": lambda: InfoNCELoss(0.05),
    "SupCon 0.1, psd_parts": lambda: SupConLoss(0.1),
    "multi-similarity, psd_parts": lambda: MultiSimilarityLoss(),
}

_BATCH = 1000


def sampled(loss: CosineLoss, z: Tensor, labels: Tensor, bank: Tensor) -> DatasetHessian:
    """The Hessian over a data set with some of its points as negatives.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        z: Raw outputs, shape (N, D).
        labels: Class labels, shape (N,).
        bank: Which points are the bank, shape (M,).
    """
    u = normalize(z)[0]
    made: DatasetDerivatives
    if isinstance(loss, RowLoss):
        made = SampledRowDerivatives(loss, u, labels, bank)
    elif isinstance(loss, ContrastiveLoss):
        made = SampledContrastive(loss, ClassTable.of(z, labels), [LabelledPoints(u[bank], labels[bank])], u)
    else:
        msg = f"no sampled negatives for {type(loss).__name__}"
        raise TypeError(msg)
    return DatasetHessian(z, made, loss.distance, loss.pd_fix)


def exact(loss: CosineLoss, z: Tensor, labels: Tensor) -> OutputHessian:
    """The Hessian over all pairs."""
    return loss.data_hessian(z, LabelRelation(labels))


def errors(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Bias and spread of diagonals.

    Args:
        found: Of B banks, shape (B, P).
        truth: Exact, shape (P,).

    Returns:
        ``bias``, ``spread``, ``trace`` and ``trace_error``, see the module.
    """
    size, mean, many = truth.norm(), found.mean(0), len(found)
    variance = (found - mean).square().sum(1).sum() / (many - 1)
    bias = ((mean - truth).square().sum() - variance / many).clamp(min=0).sqrt()
    traces = found.sum(1) / truth.sum() - 1
    return {
        "bias": float(bias / size),
        "spread": float(variance.sqrt() / size),
        "trace": float(traces.mean()),
        "trace_error": float(traces.std() / math.sqrt(many)),
    }


def judge(content: FeatureFile, seed: int = 0) -> dict[str, Any]:
    """Errors of the diagonal of one encoder.

    Args:
        content: Of its feature file.
        seed: Of the points and the banks.

    Returns:
        ``points``, ``classes``, and ``losses``: name -> size of the bank -> :func:`errors`.
    """
    rows = np.random.default_rng(seed).permutation(len(content.train_features))[:POINTS]
    features = torch.from_numpy(content.train_features[rows]).float()
    labels = torch.from_numpy(content.train_labels[rows]).long()
    z = features @ torch.from_numpy(content.weight).float().T + torch.from_numpy(content.bias).float()
    squares = torch.cat([features.double().square(), torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
    generator = torch.Generator().manual_seed(seed)
    # The same banks for all losses.
    banks = {
        many: [torch.randperm(len(z), generator=generator)[:many] for _ in range(times)]
        for many, times in BANKS.items()
        if many < len(z)
    }
    out: dict[str, Any] = {}
    for name, make in LOSSES.items():
        loss = make()
        truth = (exact(loss, z, labels).blocks.diagonal().double().T @ squares).flatten()
        out[name] = {}
        for many, chosen in banks.items():
            found = torch.stack([_diagonal(sampled(loss, z, labels, bank), z, labels, squares) for bank in chosen])
            out[name][str(many)] = errors(found, truth)
    return {"points": len(z), "classes": len(labels.unique()), "losses": out}


def _diagonal(hessian: DatasetHessian, z: Tensor, labels: Tensor, squares: Tensor) -> Tensor:
    total = torch.zeros(z.shape[1], squares.shape[1], dtype=torch.float64)
    for some in torch.arange(len(z)).split(_BATCH):
        total += hessian.at(z[some], labels[some]).blocks.diagonal().double().T @ squares[some]
    return total.flatten()


def markdown(results: Mapping[str, dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """A table for every encoder."""
    out = ["# Negatives from a bank of M points", ""]
    out += [
        f"`python -m benchmarks.negative_samples_bias` on {machine['cores']} cores of {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date']}: the diagonal of the last layer from banks of M points as negatives, "
        "against that of all pairs. In each cell: bias / spread of one bank / error of the trace ± its standard error, "
        "all in percent of the exact diagonal; a bias of 0.00 is less than so many banks can tell. Number of banks: "
        + ", ".join(f"{times} of {many}" for many, times in BANKS.items())
        + ".",
    ]
    for name, found in results.items():
        sizes = list(next(iter(found["losses"].values())))
        out += ["", f"## {name}: {found['points']} points of {found['classes']} classes", ""]
        out += ["| loss | " + " | ".join(f"M = {many}" for many in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
        for loss, by_size in found["losses"].items():
            cells = [
                f"{100 * e['bias']:.2f} / {100 * e['spread']:.2f} / "
                f"{100 * e['trace']:+.2f} ± {100 * e['trace_error']:.2f}"
                for e in (by_size[many] for many in sizes)
            ]
            out.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def main() -> None:
    """Judge every feature file of a folder; print the tables, write JSON and Markdown."""
    settings = {"points": POINTS, "banks": {str(many): times for many, times in BANKS.items()}}
    judge_files(__doc__, "negative_samples_bias", judge, markdown, settings)


if __name__ == "__main__":
    main()

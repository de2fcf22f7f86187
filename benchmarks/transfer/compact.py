"""A few numbers of every input, from which any rule for the two answers can be computed without another fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.transfer.feature_file import FeatureFile, load_features
from benchmarks.transfer.figures import retrieve
from benchmarks.transfer.fitted import DEFAULT, Fitted, Points
from benchmarks.transfer.results import key_of
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.laplace.prior import STRENGTH

__all__ = ["RANKS", "RATIO", "STRENGTHS", "Compact", "compact", "compact_of", "variance_name"]

Numbers = NDArray[np.float64]

Compact = dict[str, dict[str, Numbers]]
"""Set of inputs -> name -> numbers (N,): ``n``, ``phi``, :data:`RATIO`, and a tangential variance for each strength and
rank. Sets are ``train`` (a sample), ``test`` (with ``right``: 0, 1 or NaN), ``unknown_NAME`` and ``harmed_KIND`` (its
worst level)."""

RATIO = "ratio"
"""Name of the distance to the nearest class centre over that to the second; ones where the posterior has no centres."""

STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Strengths of the prior."""

RANKS = (16, 256)
"""Ranks of the input factor, at the default strength, beside the one that the posterior takes itself."""

_LARGEST = 64
"""Dimensions of the output up to which other ranks are tried: a covariance has their square."""

_VERSION = 2
_BATCH = 1024
_COVARIANCES = 2**20
"""Entries of the covariances in memory at once: many more would leave the processor's caches."""


def variance_name(strength: float | None = None, rank: int | None = None) -> str:
    """Name of a variance: of a strength at the default rank, or of a rank at the default strength."""
    return f"V rank {rank}" if rank is not None else f"V {strength:g}"


def compact_of(features: Path, folder: Path) -> Compact:
    """The numbers of a feature file, computed once and kept.

    Args:
        features: The feature file.
        folder: Where ``choice.npz`` is kept.
    """
    # The ranks are at the default strength, so that they change with it.
    path, key = folder / "choice.npz", key_of(features, what=(_VERSION, STRENGTHS, RANKS, STRENGTH))
    if path.is_file():
        with np.load(path) as archive:
            if str(archive["key"]) == key:
                return _nested({name: archive[name] for name in archive.files if name != "key"})
    found = compact(load_features(features))
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"{one}|{name}": v for one, values in found.items() for name, v in values.items()}
    np.savez_compressed(path, key=np.array(key), **arrays)
    return found


def compact(content: FeatureFile) -> Compact:
    """The numbers of the inputs of a feature file, from the default posterior."""
    fitted = Fitted(content)
    worst = {kind: max(level for other, level in content.harmed if other == kind) for kind, _ in content.harmed}
    sets = {"train": fitted.training_sample, "test": fitted.test}
    sets |= {f"unknown_{name}": fitted.points(name, torch.from_numpy(f)) for name, f in content.unknown.items()}
    for kind, level in worst.items():
        sets[f"harmed_{kind}"] = fitted.points(kind, torch.from_numpy(content.harmed[kind, level]))
    out: Compact = {
        name: {
            "n": points.outputs.double().norm(dim=1).numpy(),
            "phi": points.features.double().norm(dim=1).numpy(),
        }
        for name, points in sets.items()
    }
    out["test"]["right"] = retrieve(fitted.test.outputs, torch.from_numpy(content.test_labels)).right.double().numpy()
    la = fitted.posterior(DEFAULT)
    _add_ratios(out, la.class_centres, sets)
    for strength in STRENGTHS:
        la.optimize_prior_precision(strength=strength)
        _add(out, variance_name(strength), la, sets)
    for rank in RANKS:
        if rank < content.features and content.dim <= _LARGEST:
            _add(out, variance_name(rank=rank), fitted.fit(DEFAULT, {"rank": rank}), sets)
    return out


def _add(out: Compact, name: str, la: Any, sets: Mapping[str, Points]) -> None:
    """Tangential variances of the raw outputs, in their own squared units."""
    size = min(_BATCH, max(1, _COVARIANCES // int(la.n_outputs) ** 2))
    for one, points in sets.items():
        parts = []
        for block in points.features.split(size):
            predicted = la(block)
            # The product first in float64: a variance may be far below the squared norm.
            spread = predicted.tangential_variance.detach().double()
            parts.append(spread * predicted.raw_mean.detach().double().square().sum(1))
        out[one][name] = torch.cat(parts).numpy()


def _add_ratios(out: Compact, centres: ClassCentres | None, sets: Mapping[str, Points]) -> None:
    for one, points in sets.items():
        ratio = torch.ones(len(points)) if centres is None else centres.ratio(points.outputs)
        out[one][RATIO] = ratio.double().numpy()


def _nested(arrays: Mapping[str, Numbers]) -> Compact:
    out: Compact = {}
    for full, values in arrays.items():
        one, name = full.split("|")
        out.setdefault(one, {})[name] = values
    return out

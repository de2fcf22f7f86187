"""Does the novelty separate unknown inputs from known ones, and what does a threshold flag?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.apps.report.curves import bin_edges, histogram, rounded
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.scored import Scored

__all__ = ["Detection", "Flagged", "Thresholds", "detection_of", "known_inputs", "thresholds_of"]

_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_LARGEST = 0.5


@dataclass(frozen=True)
class Detection:
    """How well the novelty separates unknown test inputs from known ones.

    Attributes:
        auroc: Area under the ROC curve.
        auprc: Average precision; unknown inputs are the positive class.
    """

    auroc: float
    auprc: float


@dataclass(frozen=True)
class Flagged:
    """What the decision ``p_value <= alpha`` flags as unknown.

    Attributes:
        alpha: The threshold.
        known: Share of the known test inputs, which should be about ``alpha``.
        unknown: Share of the unknown inputs; ``None`` where there are none.
        novelty: Novelty from which on inputs are flagged, to the nearest one seen; ``None`` where none is.
        deviation: Standard deviation of ``known`` by chance, of test and of calibration inputs, where it is calibrated.
    """

    alpha: float
    known: float
    unknown: float | None
    novelty: float | None
    deviation: float | None


@dataclass(frozen=True)
class Thresholds:
    """Flagged shares at many thresholds, and the histograms of the novelty.

    Attributes:
        steps: From the smallest threshold that there are enough calibration inputs for to 0.5.
        chosen: The thresholds that were asked for.
        too_small: Thresholds that were asked for and need more calibration inputs.
        n_compared: Known inputs that p-values compare with; ``None`` where that is not known.
        calibrated: Whether ``la.calibrate`` has run; otherwise they are training inputs, and p-values optimistic.
        edges: Of the bins of both histograms; the last bin holds all larger values too.
        known: Share of the known test inputs in each bin.
        unknown: Share of the unknown inputs in each bin; ``None`` where there are none.
    """

    steps: tuple[Flagged, ...]
    chosen: tuple[Flagged, ...]
    too_small: tuple[float, ...]
    n_compared: int | None
    calibrated: bool
    edges: list[float]
    known: list[float]
    unknown: list[float] | None


def known_inputs(la: Any) -> tuple[int | None, bool]:
    """Number of known inputs that a posterior's p-values compare with, and whether ``la.calibrate`` gave them."""
    calibration, sample = la.known.calibration, la.known.sample
    if calibration is not None:
        return len(calibration.reference.statistics), True
    return (None if sample is None else len(sample.features)), False


def detection_of(test: Scored, unknown: Scored | None) -> Detection | Missing:
    """AUROC and AUPRC of the novelty."""
    if unknown is None:
        return Missing("No unknown inputs were given. Give some of a kind that the encoder was not trained for.")
    for scored in (test, unknown):
        if isinstance(scored.novelty, Missing):
            return scored.novelty
    known, other = _cut(test.novelty), _cut(unknown.novelty)
    return Detection(metrics.auroc(known, other), metrics.auprc(known, other))


def thresholds_of(la: Any, test: Scored, unknown: Scored | None, alphas: tuple[float, ...]) -> Thresholds | Missing:
    """What is flagged, at the thresholds that are asked for and at many others."""
    if isinstance(test.p_value, Missing) or isinstance(test.novelty, Missing):
        return test.p_value if isinstance(test.p_value, Missing) else Missing("There is no novelty.")
    n, calibrated = known_inputs(la)
    least = 0.0 if n is None else 1 / (n + 1)
    grid = _alphas(least)
    edges = bin_edges(
        _cut(test.novelty), torch.cat([_cut(test.novelty)] + ([_cut(unknown.novelty)] if unknown else []))
    )
    return Thresholds(
        tuple(_flagged(alpha, test, unknown, n if calibrated else None) for alpha in grid),
        tuple(_flagged(alpha, test, unknown, n if calibrated else None) for alpha in alphas if alpha >= least),
        tuple(alpha for alpha in alphas if alpha < least),
        n,
        calibrated,
        [rounded(edge) for edge in edges],
        histogram(edges, _cut(test.novelty)),
        None if unknown is None else histogram(edges, _cut(unknown.novelty)),
    )


def _flagged(alpha: float, test: Scored, unknown: Scored | None, n: int | None) -> Flagged:
    sides = [test] if unknown is None else [test, unknown]
    p = torch.cat([_tensor(side.p_value) for side in sides])
    novelty = torch.cat([_cut(side.novelty) for side in sides])
    flagged = p <= alpha
    line: float | None = None
    if bool(flagged.any()) and bool((~flagged).any()):
        line = float((novelty[flagged].min() + novelty[~flagged].max()) / 2)
    elif bool(flagged.any()):
        line = float(novelty.min())
    shares = [float((_tensor(side.p_value) <= alpha).double().mean()) for side in sides]
    deviation = None if n is None else math.sqrt(alpha * (1 - alpha) * (1 / n + 1 / len(test)))
    return Flagged(alpha, shares[0], shares[1] if len(shares) > 1 else None, line, deviation)


def _alphas(least: float) -> list[float]:
    """Round numbers from ``least`` to the largest threshold, four decades at most."""
    least = max(least, 1e-4)
    everything = [float(f"{step}e{power}") for power in range(-5, 0) for step in _STEPS]
    return [alpha for alpha in everything if least <= alpha <= _LARGEST] or [_LARGEST]


def _cut(novelty: Tensor | Missing) -> Tensor:
    """Novelties without infinities, which no metric takes; their order stays."""
    return _tensor(novelty).nan_to_num(posinf=torch.finfo(torch.float32).max, neginf=torch.finfo(torch.float32).min)


def _tensor(value: Tensor | Missing) -> Tensor:
    if isinstance(value, Missing):
        raise TypeError(value.reason)
    return value

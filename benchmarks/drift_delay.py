"""How long a drift monitor takes: inputs from a shift to the alarm at delta = 0.01.

Simulated: normal scores that shift at the start or after some unchanged inputs. On encoders of ``benchmarks.transfer``:
calibrated on half of the test inputs, then the other half, then corrupted inputs; beside it, the share of the corrupted
inputs that a p-value flags at 0.01 one by one.

    python -m benchmarks.drift_delay --cache FOLDER [--only NAME ...]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import Case, describe, machine_line, options, table, write_results
from benchmarks.thresholds import Encoder
from benchmarks.transfer.feature_file import load_features
from contrastive_curvature.decisions.drift import EXPONENTS, grow, sequential_p_values

ENCODERS = ("faces", "fashionmnist-32-supcon", "fashionmnist-32-triplet", "omniglot-64-supcon", "clinc150-64-supcon")
KINDS = ("noise", "occlusion", "typos")
SHIFTS, BEFORE = (0.3, 0.7, 1.5, 4.0), (0, 500, 10_000)
SIMULATED, STREAMS, MOST = 40, 100, 1400
DELTA = 0.01

Scores = NDArray[np.float64]


def delay(calibration: Scores, before: Scores, after: Scores, rng: np.random.Generator) -> float:
    """Inputs of a stream from the shift to the alarm; infinite without one, negative for a false alarm before it."""
    stream = np.concatenate([before, after])
    p_values = sequential_p_values(np.sort(calibration).tolist(), stream, 1 - rng.random(len(stream)))
    alarm = grow(np.full(len(EXPONENTS), -np.inf), 0, p_values)[1] >= -np.log(DELTA)
    return float(alarm.argmax() + 1 - len(before)) if alarm.any() else np.inf


def simulated(shift: float, before: int) -> float:
    """Median delay of normal scores."""
    rng = np.random.default_rng(0)
    draws = ((rng.normal(size=500), rng.normal(size=before), shift + rng.normal(size=2000)) for _ in range(SIMULATED))
    return float(np.median([delay(*draw, rng) for draw in draws]))


def corrupted(path: Path) -> dict[str, Any]:
    """Share flagged and median delay, by kind and level."""
    content = load_features(path)
    encoder, rng = Encoder(content), np.random.default_rng(0)
    known = encoder.score("novelty")
    rest = np.setdiff1d(np.arange(len(known)), content.corrupted_rows)
    found = {}
    for (kind, level), features in content.corrupted.items():
        if kind not in KINDS:
            continue
        scores, flagged, delays = (
            encoder.score("novelty", encoder.fitted.points(features)),
            [],
            [],
        )
        for _ in range(STREAMS):
            first, second = np.array_split(known[rng.permutation(rest)[:MOST]], 2)
            flagged.append(np.mean(1 + (first[:, None] >= scores).sum(0) <= 0.01 * (len(first) + 1)))
            delays.append(delay(first, second, rng.permutation(scores), rng))
        median = float(np.median(delays))
        found[f"{kind} {level}"] = {
            "flagged": float(np.mean(flagged)),
            "delay": median if np.isfinite(median) else None,
        }
    return found


def render(results: Case) -> str:
    """Two tables."""
    simulations = [[row["shift"], *(f"{value:.0f}" for value in row["delays"])] for row in results["simulated"]]
    shown = [
        [name, kind, f"{100 * row['flagged']:.1f} %", "-" if row["delay"] is None else f"{row['delay']:.0f}"]
        for name, found in results["encoders"].items()
        for kind, row in found.items()
    ]
    parts = [
        "# Inputs from a shift to the alarm",
        f"`python -m benchmarks.drift_delay`, {machine_line(results['machine'])}. Alarm at evidence {1 / DELTA:.0f}.",
        f"Simulated, 500 calibration inputs, median of {SIMULATED} streams:",
        table(["shift, standard deviations", *(f"after {n:,} inputs" for n in BEFORE)], simulations),
        f"Encoders of `benchmarks.transfer`, median of {STREAMS} streams; a dash: no alarm in half of them or more:",
        table(["encoder", "corruption, level", "flagged one by one at 0.01", "inputs until the alarm"], shown),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--cache", type=Path, default=Path("runs/transfer"), help="folder with the feature files")
    parser.add_argument("--only", nargs="+", default=list(ENCODERS))
    given = parser.parse_args(arguments)
    simulations = [{"shift": s, "delays": [simulated(s, before) for before in BEFORE]} for s in SHIFTS]
    encoders = {name: corrupted(given.cache / f"{name}.npz") for name in given.only}
    results = {"machine": describe(given.device), "simulated": simulations, "encoders": encoders}
    write_results(given.out, "drift_delay", results, render(results))


if __name__ == "__main__":
    main()

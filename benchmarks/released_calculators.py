"""Our Hessian calculators against those that the paper's authors released: values, time and memory.

The released code is not part of this project. Clone https://github.com/IlMioFrizzantinoAmabile/stochman, check out
commit 1d285ae and give the folder; ``stochman/hessian.py`` and ``stochman/nnj.py`` are loaded from it by path. Both
sides get the same weights and the same triplets, in float32. The method ``fix`` and the Euclidean distance must agree
to 1e-5 of the largest entry. With ``full`` and ``pos`` the released Arccos code is wrong, and so is the released code
for what lies below a max pooling (``docs/migration.md``); the table shows by how much.

Run: ``python -m benchmarks.released_calculators --checkout PATH [--quick] [--out FOLDER]``. Exit code 1: values that
should agree do not; 2: there is no checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.machine import describe, measure_peak, measure_time
from contrastive_curvature.hosts.stochman import ArccosHessianCalculator, ContrastiveHessianCalculator

RESULTS = Path(__file__).parent / "results"
NAMES = ("ContrastiveHessianCalculator", "ArccosHessianCalculator")
OURS = dict(zip(NAMES, (ContrastiveHessianCalculator, ArccosHessianCalculator), strict=True))
TOLERANCE = 1e-5

Case = dict[str, Any]


def load(checkout: Path, name: str) -> ModuleType:
    path = checkout / "stochman" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"released_{name}", path)
    if spec is None or spec.loader is None:
        msg = f"{path} is no Python file"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def networks(library: Any, quick: bool) -> dict[str, tuple[list[nn.Module], tuple[int, ...], int]]:
    """Layers, input shape and number of triplets; the same seed gives the same weights in either library."""
    torch.manual_seed(0)
    width, count = (256, 50) if quick else (9216, 500)
    hidden = [library.Linear(64, 64), library.Tanh(), library.Linear(64, 16)]
    convolution = [library.Conv2d(1, 4, 3, bias=False), library.Tanh(), library.MaxPool2d(2), library.Flatten()]
    made = {
        f"last layer {width} -> 3": ([library.Linear(width, 3)], (width,), count),
        "linear 64 -> 64, tanh, linear -> 16": (hidden, (64,), count),
        "conv 1 -> 4, tanh, max pool, linear 36 -> 8": ([*convolution, library.Linear(36, 8)], (1, 8, 8), count),
    }
    for layers, _, _ in made.values():
        # The released normalisation adds 1e-6 to the norm of the outputs: shorter ones would show nothing else.
        layers[-1].weight.data.mul_(8)
    return made


def compare(released: ModuleType, nnj: ModuleType, name: str, method: str, index: int, quick: bool) -> Case:
    title = list(networks(nn, quick))[index]
    theirs, shape, count = networks(nnj, quick)[title]
    ours, _, _ = networks(nn, quick)[title]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, *shape, generator=generator)
    tuples = tuple(torch.randint(0, 64, (3, count), generator=generator))
    # A pair of a point with itself costs nothing; the released method 'fix' counts it all the same.
    apart = (tuples[0] != tuples[1]) & (tuples[0] != tuples[2])
    tuples = tuple(t[apart] for t in tuples)
    ends = name == NAMES[0]
    model = nn.Sequential(*ours, cc.L2Norm())
    network = nnj.Sequential(*theirs, *([nnj.L2Norm()] if ends else []), add_hooks=True)
    theirs_calculator = getattr(released, name)(method=method, speed="half", shape="diagonal")
    calculators = (
        lambda: OURS[name](method=method).compute_hessian(x, model, tuples),
        lambda: theirs_calculator.compute_hessian(x, network, tuples),
    )
    case: Case = {"network": title, "pairs": 2 * int(apart.sum()), "calculator": name, "method": method}
    found = []
    for side, calculate in zip(("ours", "released"), calculators, strict=True):
        value, figures = measure(calculate, 1 if quick or side == "released" else 3)
        found.append(value)
        case[side] = figures
    case["difference"] = float((found[0] - found[1]).abs().max() / found[0].abs().max())
    case["must_agree"] = method == "fix" or (name == NAMES[0] and "max pool" not in title)
    case["agrees"] = case["difference"] <= TOLERANCE
    case["ratio"] = case["released"]["cpu_seconds"] / case["ours"]["cpu_seconds"]
    return case


def measure(calculate: Callable[[], Tensor], repetitions: int) -> tuple[Tensor, dict[str, float]]:
    value, peak = measure_peak(calculate)
    return value, {**measure_time(calculate, repetitions), "peak_mib": peak}


def render(results: Case) -> str:
    machine = results["machine"]
    rows = []
    for c in results["cases"]:
        verdict = "known error" if not c["must_agree"] else "agrees" if c["agrees"] else "DIFFERS"
        rows.append(
            f"| {c['network']} | {c['pairs']} | {c['calculator'].removesuffix('HessianCalculator')} | {c['method']} "
            f"| {c['difference']:.0e} | {verdict} | {1e3 * c['ours']['cpu_seconds']:.1f} "
            f"| {1e3 * c['released']['cpu_seconds']:.0f} | {c['ratio']:.0f} "
            f"| {c['ours']['peak_mib']:.0f} | {c['released']['peak_mib']:.0f} |"
        )
    table = "\n".join(rows)
    columns = ("network", "pairs", "calculator", "method", "difference", "verdict", "ours ms", "released ms", "ratio")
    columns += ("ours MiB", "released MiB")
    return f"""# Hessian calculators: ours and the released ones

Diagonal with respect to all weights, `speed="half"`, 64 points, float32, one thread; released code at commit 1d285ae.
{machine["cpu"]}, {machine["cores"]} cores shared with other jobs (load {machine["load"]} at the start),
torch {machine["torch"]}, {machine["date"]}.{" Quick sizes: the times mean nothing." if results["quick"] else ""}
Milliseconds of processor time, MiB above the inputs in the first call. Difference: largest, relative to the largest
entry; it must stay below {TOLERANCE:.0e} except where the released code has a known error (`docs/migration.md`).

| {" | ".join(columns)} |
|{" --- |" * len(columns)}
{table}
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkout", type=Path, required=True, help="folder of the released stochman at commit 1d285ae"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try whether it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    missing = [f for f in ("hessian.py", "nnj.py") if not (options.checkout / "stochman" / f).is_file()]
    if missing:
        print(
            f"--checkout: expected a folder with stochman/hessian.py and stochman/nnj.py, got {options.checkout} "
            f"without {' and '.join(missing)}. Clone https://github.com/IlMioFrizzantinoAmabile/stochman and check "
            "out 1d285ae.",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    results: Case = {"machine": describe(), "quick": options.quick, "cases": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        released, nnj = load(options.checkout, "hessian"), load(options.checkout, "nnj")
        for index in range(len(networks(nn, options.quick))):
            for name in NAMES:
                for method in ("fix", "pos", "full"):
                    case = compare(released, nnj, name, method, index, options.quick)
                    results["cases"].append(case)
                    print(f"{case['network']}, {name}, {method}: difference {case['difference']:.1e}", flush=True)
    text = render(results)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "released_calculators.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "released_calculators.md").write_text(text, encoding="utf-8")
    return int(any(c["must_agree"] and not c["agrees"] for c in results["cases"]))


if __name__ == "__main__":
    sys.exit(main())

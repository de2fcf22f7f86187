"""What the benchmarks reach of the device's own rates: from their result files and ``rates.json`` beside them.

Operations of ``curvature`` and ``scale`` in closed form, those of ``backends`` and ``steps`` as torch counted them
(matrix products and convolutions). Small cases are bound by the start of kernels, and show it.

Run: ``python -m benchmarks.gpu.fractions FOLDER``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.rates import fractions_of
from benchmarks.machine import write_results
from benchmarks.scale import DIMENSIONS, FEATURES

Counted = tuple[str, float, float, float]
"""A case with its operations, least bytes (0: unknown) and seconds."""

_SIZE = 4
_LAYER_WIDTH = 9216


def counted(name: str, found: dict[str, Any]) -> Iterator[Counted]:
    """Cases of one benchmark whose operations are known.

    Args:
        name: Of the benchmark.
        found: What its result file holds.
    """
    yield from {"curvature": _curvature, "scale": _scale, "backends": _backends, "steps": _steps}[name](found)


def _curvature(found: dict[str, Any]) -> Iterator[Counted]:
    for case in found["cases"]:
        if case["case"] == "wide" and case["pd_fix"] == "fixed":
            n, width, dim = case["sizes"]
            shown = f"{case['distance']}, fixed, N = {n}, F = {width:,}, D = {dim:,}"
        elif case["case"] == "dataset":
            n, width, dim = case["points"], _LAYER_WIDTH, 3
            shown = f"all pairs of N = {n:,}, F = {width:,}, D = {dim}"
        else:
            continue
        flop = 2 * n * n * (2 * dim + 1) + 2 * n * dim * width
        yield shown, flop, _SIZE * (n * (width + dim) + dim * width), case["node"]["seconds"]


def _scale(found: dict[str, Any]) -> Iterator[Counted]:
    for row in found["rows"]:
        if row["structure"] != "diag":
            continue
        n, columns = row["n"], row["samples"] or row["n"]
        shown = f"fit, diag, N = {n:,}, {'all pairs' if row['samples'] is None else f'M = {columns:,}'}"
        # Two passes through the layer, the pair sums, the sum of the last layer; features are moved in both passes.
        flop = 4 * n * FEATURES * DIMENSIONS + 2 * n * columns * (2 * DIMENSIONS + 1) + 2 * n * DIMENSIONS * FEATURES
        yield shown, flop, 2 * _SIZE * n * FEATURES, row["seconds"]


def _backends(found: dict[str, Any]) -> Iterator[Counted]:
    for case in found["cases"]:
        for side in ("classification", "psd"):
            measured = case.get(side, {})
            if measured.get("flop") and "seconds" in measured:
                shown = f"{case['network']}, {case['weights']}, {case['structure']}, {case['backend']}, {side}"
                yield shown, measured["flop"], 0, measured["seconds"]


def _steps(found: dict[str, Any]) -> Iterator[Counted]:
    for case in found["cases"]:
        for name, call in case.get("calls", {}).items():
            if call.get("flop"):
                what = "online" if case["kind"] == "online" else f"{case['loss']}, {case['fix']}"
                yield f"{what}, D = {case['dim']}: {name}", call["flop"], 0, call["seconds"]


def render(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        "# What the benchmarks reach of the device's rates",
        "",
        "Rates: rates.md. Of the floor: the least time that operations and bytes allow, over the time taken. float32.",
        "",
        "| benchmark | case | ms | GFLOP | of FLOP/s | of bandwidth | of the floor |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        bandwidth = f"{row['of_bandwidth']:.1%}" if row["bytes"] else ""
        lines.append(
            f"| {row['benchmark']} | {row['case']} | {1e3 * row['seconds']:.2f} | {row['flop'] / 1e9:.3g} | "
            f"{row['of_flops']:.1%} | {bandwidth} | {row['of_floor']:.1%} |"
        )
    lines += ["", *(f"- {name}: no result file" for name in result["missing"])]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str] | None = None) -> None:
    """Write ``fractions.json`` and ``fractions.md`` beside the files they are made from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of rates.json and the benchmarks' results")
    folder = parser.parse_args(argv).folder
    rates = json.loads((folder / "rates.json").read_text(encoding="utf-8"))["rates"]
    rows, missing = [], []
    for name in ("curvature", "scale", "backends", "steps"):
        path = folder / f"{name}.json"
        if not path.is_file():
            missing.append(name)
            continue
        for shown, flop, moved, seconds in counted(name, json.loads(path.read_text(encoding="utf-8"))):
            rows.append({"benchmark": name, "case": shown, **fractions_of(flop, moved, seconds, rates)})
    result = {"rates": rates, "rows": rows, "missing": missing}
    write_results(folder, "fractions", result, render(result))


if __name__ == "__main__":
    main()

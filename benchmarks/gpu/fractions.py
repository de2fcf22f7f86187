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
from benchmarks.machine import table, write_results
from benchmarks.scale import DIMENSIONS, FEATURES

Counted = tuple[str, float, float, float]
"""A case with its operations, least bytes (0: unknown) and seconds."""

_SIZE = 4
_LAYER_WIDTH = 9216


def _curvature(found: dict[str, Any]) -> Iterator[Counted]:
    for case in found["cases"]:
        if case["case"] == "wide" and case["pd_fix"] == "fixed":
            n, width, dim = case["sizes"]
        elif case["case"] == "dataset":
            n, width, dim = case["points"], _LAYER_WIDTH, 3
        else:
            continue
        shown = f"{case.get('distance', 'all pairs')}, N = {n:,}, F = {width:,}, D = {dim:,}"
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


_COUNTED = {"curvature": _curvature, "scale": _scale, "backends": _backends, "steps": _steps}


def _render(rows: list[dict[str, Any]]) -> str:
    head = ["benchmark", "case", "ms", "GFLOP", "of FLOP/s", "of bandwidth", "of the floor"]
    lines = [
        [
            *(row["benchmark"], row["case"], f"{1e3 * row['seconds']:.2f}", f"{row['flop'] / 1e9:.3g}"),
            *(f"{row['of_flops']:.1%}", f"{row['of_bandwidth']:.1%}" if row["bytes"] else "", f"{row['of_floor']:.1%}"),
        ]
        for row in rows
    ]
    text = "Rates: rates.md. Of the floor: the least time that operations and bytes allow, over the time taken."
    return f"# What the benchmarks reach of the device's rates\n\n{text}\n\n{table(head, lines)}\n"


def main(argv: list[str] | None = None) -> None:
    """Write ``fractions.json`` and ``fractions.md`` beside the files they are made from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of rates.json and the benchmarks' results")
    folder = parser.parse_args(argv).folder
    rates = json.loads((folder / "rates.json").read_text(encoding="utf-8"))["rates"]
    rows = [
        {"benchmark": name, "case": shown, **fractions_of(flop, moved, seconds, rates)}
        for name, cases in _COUNTED.items()
        if (path := folder / f"{name}.json").is_file()
        for shown, flop, moved, seconds in cases(json.loads(path.read_text(encoding="utf-8")))
    ]
    write_results(folder, "fractions", {"rates": rates, "rows": rows}, _render(rows))


if __name__ == "__main__":
    main()

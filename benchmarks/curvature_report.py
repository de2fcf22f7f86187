"""The tables of ``benchmarks.curvature``, in Markdown."""

from __future__ import annotations

from typing import Any

__all__ = ["CHUNKS", "TARGETS", "render"]

Case = dict[str, Any]

# Pairs held at once: as in the released code (the whole batch), and a number whose products stay in the cache.
CHUNKS = {"pairwise": None, "chunked": 64}
TARGETS = {"fixed": 1000, "positive": 200, "full": 200}


def render(results: Case) -> str:
    """The tables, in Markdown."""
    machine, cases = results["machine"], results["cases"]
    listed, wide = ([c for c in cases if c["case"] == name] for name in ("pairwise", "wide"))
    n, width, dim, count = listed[0]["sizes"]
    n_wide, width_wide, dim_wide = wide[0]["sizes"]
    whole = cases[-1]
    first = [
        [c["distance"], c["pd_fix"], *(milliseconds(c[name]) for name in ("node", "ggn"))]
        + [
            f"{c[name][figure]:{form}}"
            for name in CHUNKS
            for figure, form in (("cpu_seconds", ".2f"), ("ratio", ".0f"))
        ]
        + [f"{c[name]['peak_mib']:.0f}" for name in ("node", *CHUNKS)]
        + [f"{error:.0e}" for error in c["error"].values()]
        + [f"{TARGETS[c['pd_fix']]}: {verdict(c['met'])}"]
        for c in listed
    ]
    second = [[c["distance"], c["pd_fix"], *both_times(c["node"], 3), verdict(c["met"])] for c in wide]
    third = [[*both_times(whole["forward"], 1)[:2], *both_times(whole["node"], 1), f"{whole['ratio']:.1f}"]]
    third[0].append(verdict(whole["met"]))
    times = "s by the clock | s of processor"
    tables = [
        table(
            "distance | fix | node ms | cc.ggn ms | paper s | ratio | chunked s | ratio | node MiB | paper MiB "
            "| chunked MiB | error float64 | float32 | target ratio to paper",
            first,
        ),
        table(f"distance | fix | {times} | MiB | target 2 s, 4 GiB", second),
        table(f"forward pass: {times} | curvature: {times} | MiB | ratio | target 1 pass, 3 GiB", third),
    ]
    place = f"{machine['cpu']}, {machine['cores']} cores shared with other jobs (load {machine['load']} at the start)"
    if "accelerator" in machine:
        place = f"{machine['accelerator']}; all times by the clock, also where the processor is named"
    return f"""# Curvature: time and memory

{place},
torch {machine["torch"]}, {machine["date"]}.{" Quick sizes: the figures mean nothing." if results["quick"] else ""}
Fastest of several calls; memory (MiB) is what the first call took above its inputs.

## {n} points, {count} triplets, last layer {width} -> {dim}

Paper: every pair pulled back on its own, the whole batch at once as in the released code; chunked: the same,
{CHUNKS["chunked"]} pairs at a time, which stay in the cache. `cc.ggn` also runs and checks the encoder.
One thread, processor time.

{tables[0]}

## {n_wide} points, class labels, last layer {width_wide} -> {dim_wide}

{tables[1]}

## All {whole["ordered_pairs"]:,} ordered pairs of {whole["points"]:,} points, arccos, fixed, margin 0.7

{whole["source"]}; {whole["encoder"]}; {whole["negatives_inside"]:.0%} of the negatives inside the margin.
One forward pass of the encoder, then the curvature from features.

{tables[2]}
"""


def table(header: str, rows: list[list[str]]) -> str:
    lines = [header, " | ".join("---" for _ in header.split(" | ")), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def both_times(measured: dict[str, float], digits: int) -> list[str]:
    peak = [f"{measured['peak_mib']:.0f}"] if "peak_mib" in measured else []
    return [f"{measured[name]:.{digits}f}" for name in ("seconds", "cpu_seconds")] + peak


def milliseconds(measured: dict[str, float]) -> str:
    return f"{1e3 * measured['cpu_seconds']:.2f}"


def verdict(met: dict[str, bool]) -> str:
    missed = [name for name, ok in met.items() if not ok]
    return f"missed ({', '.join(missed)})" if missed else "met"

"""The paper's table 2 in its own setting, several cells at a time: 20 epochs, 5 seeds, all methods that run by default.

A training of small networks leaves most of a GPU idle, so several processes share it, each with some methods of one
seed; they write into one run folder of ``benchmarks.experiments``, whose locks let one train an encoder that another
needs. Ensembles, which need the encoders of all seeds, come last. Whatever is finished stays: the same command goes on.

Run: ``python -m benchmarks.gpu.table2 --device cuda --data-root DIR --work RUN-FOLDER --out FOLDER [-- EXPERIMENTS'
OPTIONS]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.experiments.methods import ON_ENCODER
from benchmarks.experiments.plan import Row, table_rows
from benchmarks.experiments.report import write_report
from benchmarks.experiments.run import identity, open_run, parse, read_data
from benchmarks.machine import write_results

_TRAINED_ALONE = 2
"""Of the methods that train an encoder of their own, so many are done one after another by one process."""

Unit = tuple[str, tuple[str, ...]]
"""A seed and the methods one process does for it."""


def units(rows: Sequence[Row], seeds: Sequence[str]) -> list[Unit]:
    """What is done by one process each, the encoders that others need first.

    Args:
        rows: Of the table.
        seeds: As on the command line.
    """
    shared = tuple(row.key for row in rows if row.method in ON_ENCODER)
    own = [row.key for row in rows if row.key not in shared and row.method != "deep_ensemble"]
    groups = [shared, *(tuple(own[i : i + _TRAINED_ALONE]) for i in range(0, len(own), _TRAINED_ALONE))]
    return [(seed, group) for group in groups if group for seed in seeds]


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the table, or go on with it.

    Returns:
        Exit status: 0; 1 when a process failed; 3 when it was interrupted, and the same command goes on.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--work", type=Path, required=True, help="run folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for table2.json and table2.md")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2", "3", "4"])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("options", nargs="*", help="further options of benchmarks.experiments")
    given = parser.parse_args(argv)
    common = ["--table", "2", "--data", "fashionmnist", "--protocol", "paper", "--data-root", given.data_root]
    common += ["--device", given.device, "--out", str(given.work), "--quiet", "--threads", "1", *given.options]
    rows = table_rows("2", given.methods)
    whole = [*common, "--seeds", *given.seeds, "--methods", *(row.key for row in rows)]
    config = parse(whole)
    data = read_data(config)
    open_run(config, data)  # now, since two processes at once would refuse each other's folder
    try:
        failed = _share(units(rows, given.seeds), common, given.jobs)
        status = int(_run(whole) or failed)
    except KeyboardInterrupt:
        status = 3
    text = write_report(config.out, identity(config), data)
    write_results(given.out, "table2", json.loads((config.out / "results.json").read_text(encoding="utf-8")), text)
    return status


def _share(todo: Sequence[Unit], common: list[str], jobs: int) -> bool:
    """Run all units, so many at a time; whether one failed."""
    pool = ThreadPoolExecutor(jobs)
    try:
        return any(list(pool.map(lambda unit: _run([*common, "--seeds", unit[0], "--methods", *unit[1]]), todo)))
    finally:
        # Processes that run when this one is interrupted are interrupted too, and save how far they came.
        pool.shutdown(cancel_futures=True)


def _run(options: list[str]) -> bool:
    """Fill some cells; whether that failed."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.experiments", *options]
    return subprocess.run(command, env={**os.environ, **threads}, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())

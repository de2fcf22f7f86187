"""Method after method: fit or load, judge, write; what is finished is not done again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.experiments.clock import Clock
from benchmarks.experiments.data.ndigit import NDigitData
from benchmarks.experiments.methods.base import Setting
from benchmarks.experiments.methods.hedged_pairs import PairMethod
from benchmarks.experiments.methods.lifted import LaplaceLifted
from benchmarks.experiments.saved import read_json
from benchmarks.machine import write_atomically
from benchmarks.ndigit.config import EPOCHS, Config, retrieval_data, setting_of
from benchmarks.ndigit.judge import PARTS, judge
from benchmarks.ndigit.rows import BASE, LAM, ROWS, Row, make_row, rows_of

__all__ = ["fitted", "run"]


def run(config: Config, data: NDigitData) -> dict[str, Any]:
    """Compute what is missing.

    Args:
        config: Checked, with its folder.
        data: The images.

    Returns:
        All results of the run folder: ``"config"``, and ``"cells"``, one for each row and seed.
    """
    held = retrieval_data(data, config.n)
    parts = {name: getattr(data, name) for name in PARTS}
    for seed in config.seeds:
        for row in rows_of(config.methods):
            path = config.out / f"seed{seed}" / f"{row.key}.json"
            if path.is_file():
                continue
            print(f"seed {seed}: {row.title}", flush=True)
            method, seconds = fitted(config, row, seed, held)
            found = judge(method, parts, config.pairs, seed)
            content = {"row": row.key, "seed": seed, "fit_seconds": seconds, "figures": found}
            content["machine"] = machine.describe()
            write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return {"config": config.identity() | {"epochs": EPOCHS}, "cells": _cells(config)}


def fitted(config: Config, row: Row, seed: int, held: Any) -> tuple[PairMethod | LaplaceLifted, float | None]:
    """The method of a row and a seed, trained or loaded, and the seconds of its training.

    Args:
        config: Its folder holds the trained methods.
        row: Of the tables.
        seed: Of the training.
        held: The training images, see :func:`~benchmarks.ndigit.config.retrieval_data`.
    """
    setting: Setting = setting_of(config)
    method = make_row(row, setting, config.iterations // EPOCHS, config.kl_weight)
    folder = config.out / f"seed{seed}" / row.key
    model, training = folder / "model.pt", folder / "training"
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(folder)
    if model.is_file():
        method.load(model, held)
        return method, clock.seconds
    base = None
    if row.key == LAM:
        point = next(other for other in ROWS if other.key == BASE)
        base, _ = fitted(config, point, seed, held)
    training.mkdir(exist_ok=True)
    with clock:
        method.fit(held, seed, training, base)
    method.save(model)
    shutil.rmtree(training)
    return method, clock.seconds


def _cells(config: Config) -> list[dict[str, Any]]:
    """Results in the order of seeds and rows."""
    order = {row.key: place for place, row in enumerate(ROWS)}
    found = [_read(path) for path in config.out.glob("seed*/*.json")]
    return sorted(found, key=lambda cell: (cell["seed"], order[cell["row"]]))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, "a result", "Remove it, and the method is judged again.")

"""All finished cells of a run folder as ``results.json`` and ``results.md``, beside the paper's figures."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from benchmarks.experiments.config import Config
from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.demo import demo_markdown
from benchmarks.experiments.markdown import markdown, summarize_cells
from benchmarks.experiments.plan import BASE, DEMO
from benchmarks.experiments.run import FORMAT, load_results
from benchmarks.machine import write_atomically

_SEARCH = ("knn_embedding", "knn_features")


def collect(config: Config, data: RetrievalData) -> dict[str, Any]:
    """Everything that goes into ``results.json``.

    Args:
        config: Of the run.
        data: What it ran on.

    Returns:
        Options, data, all cells in the run folder, those of earlier starts too, and their summaries.
    """
    everything = load_results(config.out)
    cells = _disjoint([cell for cell in everything if "failed" not in cell])
    # A prediction is held against the plain forward passes of the same seed.
    plain = {cell["seed"]: cell["seconds"]["predict"] for cell in cells if cell["row"] == BASE}
    for cell in cells:
        if cell["seed"] in plain:
            cell["seconds"]["predict_over_forward"] = cell["seconds"]["predict"] / plain[cell["seed"]]
        if cell["row"] in _SEARCH:
            # What they fit is the embedding of the training images that they search.
            cell["seconds"]["search"] = cell["seconds"]["fit"] + cell["seconds"]["predict"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault(cell["row"], []).append(cell)
    return {
        "format": FORMAT,
        "config": config.identity(),
        "data": {
            "title": data.title,
            "ood_title": None if data.ood is None else data.ood_title,
            "train": len(data.train),
            "test": len(data.test),
            "ood": None if data.ood is None else len(data.ood),
            "gallery": None if data.gallery is None else len(data.gallery),
            "calibration": None if data.calibration is None else len(data.calibration),
        },
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": {key: summarize_cells(found) for key, found in rows.items()},
        "cells": cells,
        "failed": [cell for cell in everything if "failed" in cell],
    }


def write_report(config: Config, data: RetrievalData) -> str:
    """Write ``results.json`` and ``results.md``.

    Args:
        config: Of the run.
        data: What it ran on.

    Returns:
        The Markdown.
    """
    results = collect(config, data)
    text = demo_markdown(results) if config.table == DEMO else markdown(results)
    write_atomically(config.out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_atomically(config.out / "results.md", text)
    return text


def _disjoint(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without ensembles that share an encoder with one before: they would be counted as independent runs."""
    kept: list[dict[str, Any]] = []
    for cell in cells:
        before = {seed for other in kept if other["row"] == cell["row"] for seed in other["members"]}
        if not before & set(cell["members"]):
            kept.append(cell)
    return kept

"""All finished cells of a run folder as ``results.json`` and ``results.md``, beside the paper's figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.data import RetrievalData
from benchmarks.retrieval.config import Config
from benchmarks.retrieval.markdown import markdown
from benchmarks.retrieval.plan import BASE
from benchmarks.retrieval.store import load_results
from contrastive_curvature.demo.report import write_atomically

__all__ = ["Summary", "collect", "summarize", "write_report"]

Summary = dict[str, float | int | None]
"""``mean``, ``std`` (of the sample, ``None`` for one value) and the number ``n`` of values."""


def summarize(values: Sequence[float | None]) -> Summary:
    """Mean and sample standard deviation over seeds.

    Args:
        values: One a seed; ``None`` where the figure is undefined, which does not count.

    Returns:
        The summary; its mean is ``None`` where nothing counts.
    """
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "n": len(known),
    }


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
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault(cell["row"], []).append(cell)
    return {
        "config": config.identity(),
        "data": {
            "title": data.title,
            "ood_title": None if data.ood is None else data.ood_title,
            "train": len(data.train),
            "test": len(data.test),
            "ood": None if data.ood is None else len(data.ood),
            "gallery": None if data.gallery is None else len(data.gallery),
        },
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": {key: _row(found) for key, found in rows.items()},
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
    text = markdown(results)
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


def _row(cells: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for cell in cells for name in cell["variants"]))
    return {
        "seeds": [cell["seed"] for cell in cells],
        "figures": _over([cell["figures"] for cell in cells]),
        "variants": {name: _over([cell["variants"].get(name, {}) for cell in cells]) for name in names},
        "seconds": _over([cell["seconds"] for cell in cells]),
    }


def _over(parts: list[dict[str, Any]]) -> dict[str, Summary]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: summarize([part.get(key) for part in parts]) for key in keys}

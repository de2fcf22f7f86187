"""The run folder: what it was made with, and one result a cell, each written whole or not at all."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.config import Config
from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.evaluate import Evaluation, Scores
from benchmarks.experiments.plan import Cell
from benchmarks.machine import write_atomically
from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics import CalibrationBins

_CONFIG = "config.json"
FORMAT = 3
"""Of run folders. In those of format 2, LAM had a diagonal posterior and one score for both questions."""


def read_json(path: Path, wanted: str, instead: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        wanted: What it should be, for the message.
        instead: What to do where it is not.

    Raises:
        InputError: It cannot be read, is damaged, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(path), wanted, f"a damaged file ({error})", instead) from None
    if not isinstance(found, dict):
        raise InputError(str(path), wanted, f"a file with a {type(found).__name__}", instead)
    return found


def open_run(config: Config, data: RetrievalData) -> None:
    """Make the run folder, or check that the one that is there was made with the same options.

    Args:
        config: ``out`` names the folder. Seeds, rows and how to compute may differ from those it was made with.
        data: What was loaded, which must be the same images.

    Raises:
        InputError: Another option differs, the folder or its configuration holds something else, or it cannot be
            written.
    """
    wanted = config.identity() | {"images": data.fingerprint(), "format": FORMAT}
    out, path = config.out, config.out / _CONFIG
    if path.is_file():
        there = read_json(path, "JSON, the options of a run", "Name another --out.")
        differ = [name for name in wanted | there if wanted.get(name) != there.get(name)]
        if differ:
            was, came = (", ".join(f"{name} = {given.get(name)!r}" for name in differ) for given in (there, wanted))
            hint = "Name another --out, or give the same options to go on."
            raise InputError(f"--out {out}", f"options as the run there: {was}", came, hint)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        came = "a folder that holds something else" if out.is_dir() else "a file"
        raise InputError(f"--out {out}", "a new or empty folder, or a run's", came, "Name another one.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"--out {out}", "a folder that can be written", str(error)) from None
    write_atomically(path, json.dumps(wanted, indent=1) + "\n")


def cell_folder(out: Path, seed: int, key: str, members: tuple[int, ...] = ()) -> Path:
    """Where a cell keeps its training, its fitted method and its curves; an ensemble of other members has another."""
    return out / f"seed{seed}" / "-".join([key, *map(str, members)])


def result_file(out: Path, cell: Cell) -> Path:
    """Where a cell's figures stand; it is written last."""
    return out / f"seed{cell.seed}" / f"{cell.row.key}.json"


def save_cell(out: Path, cell: Cell, found: Evaluation, fit_seconds: float | None, machine: dict[str, Any]) -> None:
    """Write the curves, then the figures, which mark the cell as finished.

    Args:
        out: Run folder.
        cell: The cell.
        found: Its evaluation.
        fit_seconds: What fitting took, ``None`` where that is not known.
        machine: What it ran on.
    """
    curves = {
        "scores": {name: vars(scores) for name, scores in found.scores.items()},
        "precision_at_1": found.precision_at_1,
        "nearest": found.nearest,
        "embeddings": found.embeddings,
        "p_values": None if found.p_values is None else vars(found.p_values),
        "calibration": None if found.calibration is None else vars(found.calibration),
    }
    path = cell_folder(out, cell.seed, cell.row.key, cell.members) / "curves.pt"
    write_whole(path, lambda file: torch.save(curves, file))
    content = {
        "row": cell.row.key,
        "method": cell.row.method,
        "options": cell.row.options,
        "seed": cell.seed,
        "members": list(cell.members),
        "figures": found.figures,
        "variants": found.variants,
        "seconds": {"fit": fit_seconds} | found.seconds,
        "machine": machine,
    }
    write_atomically(result_file(out, cell), json.dumps(content, indent=1, allow_nan=False) + "\n")


def save_failure(out: Path, cell: Cell, why: str) -> None:
    """Write why a cell has no figures; it is tried again when the run is started again."""
    content = {"row": cell.row.key, "seed": cell.seed, "members": list(cell.members), "failed": why}
    result_file(out, cell).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(result_file(out, cell), json.dumps(content, indent=1) + "\n")


def read_cell(path: Path) -> dict[str, Any]:
    """Read a cell's result, ``seedN/KEY.json``.

    Raises:
        InputError: It is damaged.
    """
    return read_json(path, "a cell's result in JSON", "Remove it, and the cell is evaluated again.")


def is_finished(out: Path, cell: Cell) -> bool:
    """Whether a cell has its figures, an ensemble those of its members."""
    path = result_file(out, cell)
    if not path.is_file():
        return False
    content = read_cell(path)
    return "failed" not in content and content["members"] == list(cell.members)


def load_results(out: Path) -> list[dict[str, Any]]:
    """What all cells in a run folder gave, figures or a failure, in the order of their seeds.

    Raises:
        InputError: A file among them is damaged or something else.
    """
    found = [read_cell(path) for path in out.glob("seed*/*.json") if path.parent.name[4:].isdecimal()]
    return sorted(found, key=lambda cell: (cell["seed"], cell["row"]))


class Curves:
    """What the plots show of a cell.

    Args:
        content: What was saved.

    Attributes:
        scores: Score -> uncertainties.
        precision_at_1: Of every query, shape (N,).
        nearest: Index of each query's nearest neighbour, shape (N,).
        embeddings: Of the first images in and out of distribution.
        p_values: Of "this image is of a known kind", where there are.
        calibration: Of the votes, where there are.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.scores = {name: Scores(**parts) for name, parts in content["scores"].items()}
        self.precision_at_1: Tensor = content["precision_at_1"]
        self.nearest: Tensor = content["nearest"]
        self.embeddings: dict[str, Tensor | None] = content["embeddings"]
        known, bins = content["p_values"], content["calibration"]
        self.p_values = None if known is None else Scores(**known)
        self.calibration = None if bins is None else CalibrationBins(**bins)


def load_curves(out: Path, seed: int, key: str) -> Curves | None:
    """Read a cell's curves.

    Args:
        out: Run folder.
        seed: Of the cell.
        key: Of its row.

    Returns:
        The curves; ``None`` where the cell is not finished.

    Raises:
        InputError: The figures are damaged.
    """
    cell = out / f"seed{seed}" / f"{key}.json"
    content = read_cell(cell) if cell.is_file() else {"failed": "not yet"}
    if "failed" in content:
        return None
    path = cell_folder(out, seed, key, tuple(content["members"])) / "curves.pt"
    return Curves(torch.load(path, map_location="cpu", weights_only=True))


class Clock:
    """Adds up the time of a fit inside ``with``, over interruptions by an exception, in several processes.

    A process that is killed cannot write what it took: the sum then is unknown, and stays so.

    Args:
        folder: Exists when the clock is started; the count stands in ``clock.json`` there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock.json"
        self._started = 0.0

    @property
    def seconds(self) -> float | None:
        """The sum; ``None`` where a part of it is not known, or nothing was timed."""
        if not self._path.is_file():
            return None
        seconds: float | None = read_json(self._path, "seconds", "Remove it.")["seconds"]
        return seconds

    def __enter__(self) -> Clock:
        self._before = self.seconds if self._path.is_file() else 0.0
        # What stands there until the end: unknown.
        self._write(None)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._started
        self._write(None if self._before is None else self._before + taken)

    def _write(self, seconds: float | None) -> None:
        write_atomically(self._path, json.dumps({"seconds": seconds}) + "\n")

"""The run folder, and its cells one after the other: fit, evaluate, write; what is finished is not done again.

``config.json`` says what the run was made with. A cell, one row and seed, leaves its figures in ``seedN/ROW.json``,
written last, and what plots need in ``seedN/ROW.pt``. The encoder of a seed, which several rows build on, is in
``seedN/encoder.pt``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tqdm import tqdm

from benchmarks import machine
from benchmarks.experiments.config import Config, settings
from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.evaluate import Curves, evaluate
from benchmarks.experiments.methods import METHODS, Method
from benchmarks.experiments.methods.deterministic import Deterministic
from benchmarks.experiments.methods.ensembles import DeepEnsemble
from benchmarks.experiments.plan import BASE, Cell, Row
from benchmarks.machine import write_atomically
from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError

FORMAT = 4
"""Of run folders."""


def open_run(config: Config, data: RetrievalData) -> None:
    """Make the run folder, or check that the one that is there was made with the same options.

    Args:
        config: ``out`` names the folder. Seeds, rows and how to compute may differ from those it was made with.
        data: What was loaded, which must be the same images.

    Raises:
        InputError: Another option differs, or the folder holds something else.
    """
    wanted = config.identity() | {"images": data.fingerprint(), "format": FORMAT}
    out, path = config.out, config.out / "config.json"
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))
        differ = [name for name in wanted | there if wanted.get(name) != there.get(name)]
        if differ:
            was, got = (", ".join(f"{name} = {of.get(name)!r}" for name in differ) for of in (there, wanted))
            hint = "Name another --out, or give the same options to go on."
            raise InputError(f"--out {out}", f"options as the run there: {was}", got, hint)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}", "a new or empty folder, or a run's", "something else", "Name another one.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(wanted, indent=1) + "\n")


def load_results(out: Path) -> list[dict[str, Any]]:
    """What all cells in a run folder gave, figures or a failure, in the order of their seeds."""
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("seed*/*.json")]
    return sorted(cells, key=lambda cell: (cell["seed"], cell["row"]))


def load_curves(out: Path, seed: int, key: str) -> Curves | None:
    """What the plots show of a cell; ``None`` where it is not finished."""
    result = out / f"seed{seed}" / f"{key}.json"
    if not result.is_file() or "failed" in json.loads(result.read_text(encoding="utf-8")):
        return None
    return Curves.of(torch.load(result.with_suffix(".pt"), map_location="cpu", weights_only=True))


class Runner:
    """Fills the cells of one table.

    Args:
        config: Checked.
        data: Loaded.
        rows: Of the table. Every method is made once, so that options it refuses are refused before any training.

    Attributes:
        failed: Cells that have no figures because their method raised an error of the library's.
    """

    def __init__(self, config: Config, data: RetrievalData, rows: Sequence[Row]) -> None:
        self.config, self.data = config, data
        self.setting = settings(config, data)
        self.failed = 0
        self._base: tuple[int, Deterministic, float] | None = None
        for row in rows:
            METHODS[row.method](self.setting, **row.options)
        device = torch.device(config.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._machine = machine.describe() | {"device": config.device, "accelerator": name}
        # A forward pass, so that the first prediction that is timed does not pay for the start of the device.
        with torch.no_grad():
            images = data.test.images(range(min(self.setting.eval_batch, len(data.test))))
            self.setting.make_encoder().eval()(images.to(device)).cpu()

    def run(self, cells: Sequence[Cell]) -> str:
        """Compute what is missing, and report after every seed.

        Args:
            cells: In their order.

        Returns:
            The tables, in Markdown.
        """
        from benchmarks.experiments.plots import draw_all
        from benchmarks.experiments.report import write_report

        config, text = self.config, ""
        with tqdm(total=len(cells), desc="[cells]", unit="cell", disable=not config.progress) as bar:
            for number, cell in enumerate(cells):
                if not number or cells[number - 1].seed != cell.seed:
                    tqdm.write(f"seed {cell.seed}")
                bar.set_postfix_str(f"seed {cell.seed}, {cell.row.key}", refresh=True)
                new = self._fill(cell)
                bar.update()
                last = number + 1 == len(cells)
                if last or (new and cells[number + 1].seed != cell.seed):
                    text = write_report(config, self.data)
                    if last or cell.seed == config.seeds[0]:
                        draw_all(config.out, self.data, config.table, config.seeds[0])
        return text

    def _fill(self, cell: Cell) -> bool:
        """Compute a cell unless it is finished, an ensemble with these members; whether there was anything to do."""
        path = self.config.out / f"seed{cell.seed}" / f"{cell.row.key}.json"
        if path.is_file():
            there = json.loads(path.read_text(encoding="utf-8"))
            if "failed" not in there and there["members"] == list(cell.members):
                return False
        path.parent.mkdir(exist_ok=True)
        content: dict[str, Any] = {"row": cell.row.key, "seed": cell.seed, "members": list(cell.members)}
        try:
            method, seconds = self._fitted(cell)
            found = evaluate(method, self.data, n_votes=self.config.ece_samples, seed=cell.seed)
        except ContrastiveCurvatureError as error:
            # One method that diverges on one seed says nothing against the others.
            tqdm.write(f"seed {cell.seed}, {cell.row.key} failed: {error}", file=sys.stderr)
            self.failed += 1
            content["failed"] = f"{type(error).__name__}: {error}"
        else:
            curves = dataclasses.asdict(found.curves)
            write_whole(path.with_suffix(".pt"), lambda file: torch.save(curves, file))
            content |= {"method": cell.row.method, "options": cell.row.options, "figures": found.figures}
            content |= {"variants": found.variants, "seconds": {"fit": seconds} | found.seconds}
            content["machine"] = self._machine
        write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        return True

    def _fitted(self, cell: Cell) -> tuple[Method, float]:
        """The cell's method, and the seconds of all fits that only it needed."""
        if cell.row.key == BASE:
            return self._encoder(cell.seed)
        method = METHODS[cell.row.method](self.setting, **cell.row.options)
        seconds = 0.0
        if isinstance(method, DeepEnsemble):
            method.members, each = zip(*map(self._encoder, cell.members), strict=True)
            seconds = sum(each)
        base = self._encoder(cell.seed)[0] if method.needs_base else None
        started = time.perf_counter()
        method.fit(self.data, cell.seed, base)
        return method, seconds + time.perf_counter() - started

    def _encoder(self, seed: int) -> tuple[Deterministic, float]:
        """The deterministic encoder of a seed, trained or loaded, and the seconds of its training."""
        if self._base is None or self._base[0] != seed:
            path = self.config.out / f"seed{seed}" / "encoder.pt"
            path.parent.mkdir(exist_ok=True)
            base = Deterministic(self.setting)
            # Several processes may want the same encoder: one trains it, the others wait and load it.
            with FileLock(path.with_suffix(".lock")):
                if path.is_file():
                    saved = torch.load(path, map_location=self.config.device, weights_only=True)
                    base.encoder = self.setting.make_encoder().eval()
                    base.encoder.load_state_dict(saved["encoder"])
                else:
                    started = time.perf_counter()
                    base.fit(self.data, seed)
                    saved = {"encoder": base.encoder.state_dict(), "seconds": time.perf_counter() - started}
                    write_whole(path, lambda file: torch.save(saved, file))
            self._base = seed, base, saved["seconds"]
        return self._base[1:]

"""Cell after cell: fit or load, evaluate, write; what is finished is not done again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
from filelock import FileLock
from tqdm import tqdm

from benchmarks import machine
from benchmarks.experiments.config import Config, settings
from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.evaluate import evaluate
from benchmarks.experiments.methods import Method, make_method
from benchmarks.experiments.methods.deterministic import Deterministic
from benchmarks.experiments.plan import BASE, Cell, Row
from benchmarks.experiments.store import Clock, cell_folder, is_finished, save_cell, save_failure
from contrastive_curvature.errors import ContrastiveCurvatureError


class Runner:
    """Fills the cells of one table.

    Args:
        config: Checked.
        data: Loaded.

    Attributes:
        failed: Cells that have no figures because their method raised an error of the library's.
    """

    def __init__(self, config: Config, data: RetrievalData) -> None:
        self.config, self.data = config, data
        self.setting = settings(config, data)
        self._machine = self._describe()
        self.failed = 0
        self._base: tuple[int, Deterministic] | None = None

    def check(self, rows: Sequence[Row]) -> None:
        """Make every method once, so that options it refuses are refused before anything is computed.

        Args:
            rows: Of the table.

        Raises:
            InputError: An option is out of range.
            UnsupportedError: A combination of options has no answer.
        """
        for row in rows:
            make_method(row.method, self.setting, **row.options)

    def run(self, cells: Sequence[Cell]) -> str:
        """Compute what is missing, and report after every seed.

        Args:
            cells: In their order.

        Returns:
            The tables, in Markdown.
        """
        text = ""
        with tqdm(total=len(cells), desc="[cells]", unit="cell", disable=not self.config.progress) as bar:
            for number, cell in enumerate(cells):
                if not number or cells[number - 1].seed != cell.seed:
                    tqdm.write(f"seed {cell.seed}")
                bar.set_postfix_str(f"seed {cell.seed}, {cell.row.key}", refresh=True)
                new = not is_finished(self.config.out, cell)
                if new:
                    self._fill(cell)
                bar.update()
                last = number + 1 == len(cells)
                if last or (new and cells[number + 1].seed != cell.seed):
                    text = self._report(plots=last or cell.seed == self.config.seeds[0])
        return text

    def _fill(self, cell: Cell) -> None:
        try:
            method, seconds = self._fitted(cell)
            found = evaluate(method, self.data, n_votes=self.config.ece_samples, seed=cell.seed)
        except ContrastiveCurvatureError as error:
            # One method that diverges on one seed says nothing against the others.
            tqdm.write(f"seed {cell.seed}, {cell.row.key} failed: {error}", file=sys.stderr)
            self.failed += 1
            save_failure(self.config.out, cell, f"{type(error).__name__}: {error}")
        else:
            save_cell(self.config.out, cell, found, seconds, self._machine)

    def _fitted(self, cell: Cell) -> tuple[Method, float | None]:
        """The cell's method, fitted or loaded, and the seconds of all fits that only it needed."""
        if cell.row.key == BASE:
            return self._encoder(cell.seed)
        if not cell.members:
            method = make_method(cell.row.method, self.setting, **cell.row.options)
            base = self._encoder(cell.seed)[0] if method.needs_base else None
            return method, self._fit(method, cell.row.key, cell.seed, base)
        members = [self._encoder(seed) for seed in cell.members]

        def trained(seed: int) -> Deterministic:
            # The ensemble counts on from its first seed; the run's own seeds need not be consecutive.
            return members[seed - cell.seed][0]

        method = make_method(cell.row.method, self.setting, trained=trained, **cell.row.options)
        parts = [self._fit(method, cell.row.key, cell.seed, None, cell.members), *(seconds for _, seconds in members)]
        return method, None if None in parts else sum(part for part in parts if part is not None)

    def _encoder(self, seed: int) -> tuple[Deterministic, float | None]:
        """The deterministic encoder of a seed, which methods share; the last one used stays in memory."""
        if self._base is not None and self._base[0] == seed:
            return self._base[1], Clock(cell_folder(self.config.out, seed, BASE)).seconds
        base = Deterministic(self.setting)
        seconds = self._fit(base, BASE, seed, None)
        self._base = (seed, base)
        return base, seconds

    def _fit(
        self, method: Method, key: str, seed: int, base: Method | None, members: tuple[int, ...] = ()
    ) -> float | None:
        folder = cell_folder(self.config.out, seed, key, members)
        model, training, clock = folder / "model.pt", folder / "training", Clock(folder)
        training.parent.mkdir(parents=True, exist_ok=True)
        # Ensembles of several processes may want the same encoder: one trains it, the others wait and load it.
        with FileLock(folder / "lock"):
            if model.is_file():
                method.load(model, self.data)
                return clock.seconds
            training.mkdir(exist_ok=True)
            with clock:
                method.fit(self.data, seed, training, base)
            method.save(model)
            # The checkpoints hold the optimiser too: twice the size of what was just saved.
            shutil.rmtree(training)
        return clock.seconds

    def warm_up(self) -> None:
        """A forward pass, so that the first prediction that is timed does not pay for the start of the device.

        Raises:
            InputError: The network cannot be made.
        """
        encoder = self.setting.make_encoder().eval()
        rows = range(min(self.setting.eval_batch, len(self.data.test)))
        with torch.no_grad():
            encoder(self.data.test.images(rows).to(self.config.device)).cpu()

    def _report(self, plots: bool) -> str:
        from benchmarks.experiments.plots import draw_all
        from benchmarks.experiments.report import write_report

        text = write_report(self.config, self.data)
        if plots:
            draw_all(self.config.out, self.data, self.config.table, self.config.seeds[0])
        return text

    def _describe(self) -> dict[str, Any]:
        device = torch.device(self.config.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return machine.describe() | {"device": self.config.device, "accelerator": name}

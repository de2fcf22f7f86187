"""Run folders of earlier runs, for scripts that measure something else on their fitted methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.config import hold_out
from benchmarks.experiments.data import RetrievalData, load_data
from benchmarks.experiments.methods import Method, Setting, make_method
from benchmarks.experiments.plan import DEMO, known_rows
from benchmarks.experiments.saved import read_json
from benchmarks.experiments.store import cell_folder, check_format
from contrastive_curvature.errors import InputError, expected

__all__ = ["Finished", "read_run"]


@dataclass(frozen=True)
class Finished:
    """A run that was made.

    Args:
        folder: Its folder.
        config: Its options.
        data: What it ran on.
        setting: How its methods were made; without samples for scores, which take their time.
    """

    folder: Path
    config: dict[str, Any]
    data: RetrievalData
    setting: Setting

    def seeds(self, key: str) -> list[int]:
        """Seeds of which a row was fitted, in their order."""
        return sorted(int(path.parts[-3][4:]) for path in self.folder.glob(f"seed*/{key}/model.pt"))

    def load(self, key: str, seed: int) -> Method:
        """The fitted method of a row and a seed."""
        row = next(row for row in known_rows(self.config["table"]) if row.key == key)
        method = make_method(row.method, self.setting, **row.options)
        method.load(cell_folder(self.folder, seed, key) / "model.pt", self.data)
        return method


def read_run(folder: Path, data_root: Path) -> Finished:
    """Read the options of a run, and its data.

    Args:
        folder: The run folder.
        data_root: Where the images are.

    Returns:
        The run.

    Raises:
        InputError: It is no run folder, or one of another version; or images are missing.
    """
    hint = "Run python -m benchmarks.experiments first."
    content = read_json(folder / "results.json", "results in a run folder of benchmarks.experiments", hint)
    check_format(folder, content)
    config = content.get("config")
    if not isinstance(config, dict):
        raise InputError(expected(str(folder), "a run folder of benchmarks.experiments", "one without options", hint))
    names = ("ood", "train_size", "test_size", "image_size")
    data = load_data(config["data"], data_root, **{name: config[name] for name in names})
    data = hold_out(data) if config["table"] == DEMO else data
    given = {name: value for name, value in config.items() if name in Setting.__dataclass_fields__}
    return Finished(folder, config, data, Setting(**given | {"n_samples": 0}, relation=data.relation))

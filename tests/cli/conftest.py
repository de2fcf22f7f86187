"""A folder with small sources, a fitted posterior, and commands that run in this process."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_support import BIAS, CLASSES, WEIGHT, Run, points
from click.testing import CliRunner, Result

from contrastive_curvature.apps.cli import cli


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train.npz`` with the last layer, ``validation.npz`` and ``new.npz`` (one class more), and ``posterior``."""
    place = tmp_path_factory.mktemp("sources")
    train = points(300, 2)
    np.savez(place / "train.npz", **train, weight=WEIGHT, bias=BIAS)
    np.savez(place / "validation.npz", **points(150, 3, CLASSES + 1))
    np.savez(place / "new.npz", **points(40, 4, CLASSES + 1), ids=[f"new {k}" for k in range(40)])
    arguments = ["fit", f"{place}/train.npz", "--out", f"{place}/posterior", "--calibrate", f"{place}/validation.npz"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return place


@pytest.fixture
def place(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the same files, which is the current one."""
    target = tmp_path / "place"
    shutil.copytree(sources, target)
    monkeypatch.chdir(target)
    return target


@pytest.fixture
def run(place: Path) -> Run:
    """``run("score", "posterior", ..., code=0)``: the result of a command that ends with this exit code."""

    def call(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, [str(each) for each in arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return call

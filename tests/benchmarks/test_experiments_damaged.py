"""Damaged files of a run folder: one message that names the file and says what to do, never a traceback."""

import json
import shutil

import pytest
import torch
from tables import each

from benchmarks.experiments import cli, config, plots, store
from benchmarks.experiments.clock import Clock
from contrastive_curvature.errors import InputError
from contrastive_curvature.online import load_checkpoint, save_checkpoint

OPTIONS = ["--table", "2", "--data", "digits", "--train-size", "200", "--test-size", "100", "--n-samples", "3"]
OPTIONS += ["--quiet", "--epochs", "1", "--methods", "deterministic", "laplace_posthoc"]
CELL = "seed0/laplace_posthoc.json"
CURVES = "seed0/laplace_posthoc/curves.pt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged") / "run"
    assert cli.main([*OPTIONS, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


GARBAGE = {"binary": bytes(range(256)), "a list": b"[1, 2]", "another program's": b'{"cells": [], "kernel": "python3"}'}


def spoil(folder, name, kind):
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if kind == "cut short" else GARBAGE[kind])
    return path


@pytest.mark.parametrize("kind", ["cut short", *GARBAGE])
def test_a_damaged_cell_is_named_by_the_command(folder, kind, capsys, monkeypatch):
    path = spoil(folder, CELL, kind)
    monkeypatch.setattr("benchmarks.experiments.run.Runner.run", lambda *_: pytest.fail("started"))
    assert cli.main([*OPTIONS, "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: expected a cell's result")
    assert "Remove it, and the cell is evaluated again." in said


def test_what_the_message_says_works(folder, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)
    before = json.loads((folder / CELL).read_text())["figures"]
    spoil(folder, CELL, "cut short").unlink()
    assert cli.main([*OPTIONS, "--out", str(folder)]) == 0
    assert json.loads((folder / CELL).read_text())["figures"] == before


@pytest.mark.parametrize("kind", ["cut short", *GARBAGE])
def test_a_damaged_configuration_is_named_by_the_command(folder, kind, capsys):
    path = spoil(folder, "config.json", kind)
    assert cli.main([*OPTIONS, "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert str(folder) in said
    assert "Name another --out" in said
    assert (path.read_bytes() if kind != "cut short" else b"") == GARBAGE.get(kind, b"")


@pytest.mark.parametrize("kind", ["cut short", *GARBAGE, "missing"])
def test_damaged_curves_are_named_by_the_command(folder, kind, capsys):
    if kind == "missing":
        (folder / CURVES).unlink()
    else:
        spoil(folder, CURVES, kind)
    assert cli.main([*OPTIONS, "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert str(folder / CURVES) in said
    assert f"Remove {folder / CELL}" in said


@each(
    "change",
    [
        {"row": "norm"},
        {"seed": "0"},
        {"figures": {"map_at_1": "high"}},
        {"figures": {"map_at_1": float("nan")}},
        {"variants": {"own": 3}},
        {"seconds": None},
        {"failed": 3},
    ],
)
def test_a_cell_of_wrong_content_is_named(folder, change):
    path = folder / CELL
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=r"laplace_posthoc\.json: expected a cell's result.*Remove it"):
        store.load_results(folder)


def test_what_is_no_cell_is_left_alone(folder):
    other = folder / "seedlings"
    other.mkdir()
    (other / "plants.json").write_text("[]")
    assert len(store.load_results(folder)) == 2


def test_curves_of_wrong_content_are_named(folder):
    content = load_checkpoint(folder / CURVES)
    save_checkpoint(folder / CURVES, {name: part for name, part in content.items() if name != "nearest"})
    with pytest.raises(InputError, match=r"curves\.pt: expected a cell's curves.*Remove .*laplace_posthoc\.json"):
        store.load_curves(folder, 0, "laplace_posthoc")


def test_curves_of_another_number_of_images_are_named(folder):
    content = load_checkpoint(folder / CURVES)
    short = {name: {"inside": s["inside"][:50], "outside": s["outside"]} for name, s in content["scores"].items()}
    dots = {name: some[:50] for name, some in content["embeddings"].items()}
    part = {
        "embeddings": dots,
        "precision_at_1": content["precision_at_1"][:50],
        "nearest": content["nearest"][:50],
        "scores": short,
    }
    save_checkpoint(folder / CURVES, {**content, **part})
    assert store.load_curves(folder, 0, "laplace_posthoc") is not None
    given = cli.parse([*OPTIONS, "--out", str(folder)])
    with pytest.raises(InputError, match="of 50 test images, not of 100"):
        plots.draw_all(folder, config.read_data(given), 2, 0)


@pytest.mark.parametrize("kind", ["cut short", *GARBAGE])
def test_a_damaged_clock_knows_nothing(tmp_path, kind):
    with Clock(tmp_path) as clock:
        pass
    assert clock.seconds >= 0
    whole = (tmp_path / "clock.json").read_bytes()
    (tmp_path / "clock.json").write_bytes(whole[: len(whole) // 2] if kind == "cut short" else GARBAGE[kind])
    assert clock.seconds is None
    with clock:
        pass
    assert clock.seconds is None  # and does not forget that a part is unknown


@pytest.mark.parametrize("value", ['"x"', "-1.0", "true", "NaN"])
def test_seconds_are_a_number(tmp_path, value):
    (tmp_path / "clock.json").write_text(f'{{"seconds": {value}}}')
    assert Clock(tmp_path).seconds is None


@pytest.mark.parametrize("state", [{}, {"encoder": {"weight": torch.ones(2)}}, None])
def test_another_methods_file_is_reported(folder, state, capsys, monkeypatch):
    """As a failure of its cell, which says what to remove: the others go on."""
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)
    (folder / CELL).unlink()
    model = folder / "seed0" / "laplace_posthoc" / "model.pt"
    content = {} if state is None else {**load_checkpoint(model), "state": state}
    save_checkpoint(model, content)
    assert cli.main([*OPTIONS, "--out", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "laplace_posthoc failed" in said
    assert str(model) in said
    assert "Remove" in json.loads((folder / CELL).read_text())["failed"]

"""Damaged files of a run folder: one message that names the file and says what to do, never a traceback."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.experiments import cli, config, plots, saved, store
from benchmarks.experiments.clock import Clock
from benchmarks.experiments.report import write_report
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


GARBAGE = {
    "empty": b"",
    "binary": bytes(range(256)),
    "not UTF-8": '{"row": "ü"}'.encode("latin-1"),
    "a list": b"[1, 2]",
    "a number": b"3",
    "null": b"null",
    "a word": b'"row"',
    "deep": b"[" * 100_000,
    "another program's": b'{"cells": [], "kernel": "python3"}',
    "an archive": b"PK\x03\x04" + bytes(100),
}


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


CHANGES = [
    *[(key, None, "drop") for key in ("row", "seed", "members", "method", "figures", "variants", "seconds", "machine")],
    ("row", None, 3),
    ("row", None, "norm"),
    ("seed", None, "0"),
    ("seed", None, 1),
    ("seed", None, True),
    ("members", None, None),
    ("members", None, ["0"]),
    ("members", None, [1, 1]),
    ("figures", None, []),
    ("figures", "map_at_1", "high"),
    ("figures", "map_at_1", True),
    ("figures", "map_at_1", [0.5]),
    ("figures", "map_at_1", float("nan")),
    ("figures", "map_at_1", float("inf")),
    ("variants", None, [1]),
    ("variants", "own", 3),
    ("variants", "own", {"auroc": "x"}),
    ("seconds", None, 3),
    ("seconds", "predict", None),
    ("seconds", "predict", 0),
    ("seconds", "predict", "1"),
    ("seconds", "fit", "long"),
    ("machine", None, "mine"),
    ("failed", None, 3),
    ("failed", None, None),
]


@pytest.mark.parametrize(("key", "inner", "value"), CHANGES)
def test_a_cell_of_wrong_content_is_named(folder, key, inner, value):
    path = folder / CELL
    content = json.loads(path.read_text())
    if value == "drop":
        del content[key]
    elif inner is None:
        content[key] = value
    else:
        content[key][inner] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"laplace_posthoc\.json: expected a cell's result.*Remove it"):
        store.load_results(folder)


def test_numbers_beyond_float_are_no_figures(folder):
    path = folder / CELL
    path.write_text(path.read_text().replace('"predict": ', '"predict": 1e999, "x": ', 1))
    with pytest.raises(InputError, match=r"laplace_posthoc\.json.*no number.*Remove it"):
        store.load_results(folder)


def test_what_is_no_cell_is_left_alone(folder):
    other = folder / "seedlings"
    other.mkdir()
    (other / "plants.json").write_text("[]")
    assert len(store.load_results(folder)) == 2


CURVE_CHANGES = {
    "a part missing": lambda c: {k: v for k, v in c.items() if k != "nearest"},
    "a part more": lambda c: {**c, "other": 1},
    "scores a list": lambda c: {**c, "scores": []},
    "scores without outside": lambda c: {**c, "scores": {"own": {"inside": c["precision_at_1"]}}},
    "scores of NaN": lambda c: {
        **c,
        "scores": {n: {**s, "inside": s["inside"] * float("nan")} for n, s in c["scores"].items()},
    },
    "scores too short": lambda c: {
        **c,
        "scores": {n: {**s, "inside": s["inside"][:-1]} for n, s in c["scores"].items()},
    },
    "outside a number": lambda c: {**c, "scores": {n: {**s, "outside": 3.0} for n, s in c["scores"].items()}},
    "precision a matrix": lambda c: {**c, "precision_at_1": c["precision_at_1"].unsqueeze(0)},
    "precision of integers": lambda c: {**c, "precision_at_1": c["precision_at_1"].nan_to_num().long()},
    "precision above one": lambda c: {**c, "precision_at_1": c["precision_at_1"] + 2},
    "nearest of floats": lambda c: {**c, "nearest": c["nearest"].float()},
    "nearest negative": lambda c: {**c, "nearest": -c["nearest"] - 1},
    "embeddings a tensor": lambda c: {**c, "embeddings": c["embeddings"]["inside"]},
    "embeddings of another length": lambda c: {
        **c,
        "embeddings": {**c["embeddings"], "inside": torch.ones(101, 3)},
    },
    "embeddings outside of NaN": lambda c: {
        **c,
        "embeddings": {**c["embeddings"], "outside": torch.full((3, 3), float("nan"))},
    },
    "p-values a list": lambda c: {**c, "p_values": [0.5]},
    "p-values too short": lambda c: {**c, "p_values": {"inside": torch.ones(3), "outside": None}},
    "p-values above one": lambda c: {**c, "p_values": {"inside": c["precision_at_1"] * 0 + 2, "outside": None}},
    "p-values of zero": lambda c: {**c, "p_values": {"inside": torch.ones(100), "outside": torch.zeros(3)}},
    "calibration a list": lambda c: {**c, "calibration": [1]},
    "calibration without edges": lambda c: {
        **c,
        "calibration": {k: v for k, v in c["calibration"].items() if k != "edges"},
    },
    "bins of two numbers": lambda c: {**c, "calibration": {**c["calibration"], "count": c["calibration"]["count"][1:]}},
    "empty bins": lambda c: {**c, "calibration": {**c["calibration"], "count": c["calibration"]["count"] * 0}},
    "no tensors": lambda c: {**c, "precision_at_1": c["precision_at_1"].tolist()},
}


@pytest.mark.parametrize("change", CURVE_CHANGES)
def test_curves_of_wrong_content_are_named(folder, change):
    content = load_checkpoint(folder / CURVES)
    save_checkpoint(folder / CURVES, CURVE_CHANGES[change](content))
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
    with pytest.raises(InputError, match="100 test images"):
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


@pytest.mark.parametrize("value", ['"x"', "-1", "true", "[]", "NaN", "1e999"])
def test_seconds_are_a_number(tmp_path, value):
    (tmp_path / "clock.json").write_text(f'{{"seconds": {value}}}')
    assert Clock(tmp_path).seconds is None


@pytest.mark.parametrize("state", [{}, {"encoder": 3}, {"encoder": {"weight": torch.ones(2)}}, [], None])
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


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_at_random_end_in_a_result_or_in_our_error(folder, data):
    """A flipped, cut or inserted byte: the report is written from finite figures, or the file is named."""
    path = folder / CELL
    good = folder.parent / "good.json"
    if not good.exists():
        good.write_bytes(path.read_bytes())
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        way = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if way == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif way == "cut":
            del content[place : place + data.draw(st.integers(1, 40))]
        else:
            content[place:place] = data.draw(st.binary(min_size=1, max_size=4))
    path.write_bytes(bytes(content))
    given_ = cli.parse([*OPTIONS, "--out", str(folder)])
    refused = None
    try:
        store.load_results(folder)
    except InputError as error:
        refused = error
    if refused is not None:
        assert str(path) in str(refused)
        return
    write_report(given_, _DATA.setdefault("digits", config.read_data(given_)))
    saved.read_json(folder / "results.json", "a report", "")


_DATA = {}

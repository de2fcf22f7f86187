"""The command line: its numbers are those of the library, errors are one line, and nothing is written by halves."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from laplace import Laplace
from page_code import run_blocks
from tables import each
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature.apps.cli import main
from contrastive_curvature.apps.report import plots
from contrastive_curvature.laplace import ContrastiveLaplace

ROOT = Path(__file__).parents[1]
WIDTH, DIM = 12, 4
LAYER = {
    "weight": np.random.default_rng(0).normal(size=(DIM, WIDTH)).astype(np.float32),
    "bias": np.linspace(-0.1, 0.1, DIM, dtype=np.float32),
}
CENTRES = 2 * np.random.default_rng(1).normal(size=(6, WIDTH))
NAMES = np.array(["ant", "bee", "<b>cat</b>", "=1+1", "-0.5", "elk"])


def points(n, seed, classes=5, names=False):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    features = np.maximum(CENTRES[labels] + rng.normal(size=(n, WIDTH)), 0).astype(np.float32)
    return {"features": features, "labels": NAMES[labels] if names else labels}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of points with numbers as labels, the same with names, and embeddings alone; posteriors and retrievers."""
    place = tmp_path_factory.mktemp("files")
    sizes = {"train": (300, 2, 5), "known": (150, 3, 5), "held": (150, 4, 6), "new": (40, 5, 6)}
    for name, (n, seed, classes) in sizes.items():
        layer = LAYER if name == "train" else {}
        np.savez(place / f"{name}.npz", **points(n, seed, classes), **layer)
        of_names = points(n, seed, classes, names=True)
        ids = np.array([f"{'=+-@'[k % 4]}{k}" for k in range(n)])
        np.savez(place / f"{name}_names.npz", **of_names, **layer, ids=ids)
        np.savez(place / f"{name}_embeddings.npz", embeddings=of_names["features"], labels=of_names["labels"])
    for more in ("", "_names", "_embeddings"):
        train, known, held = (f"{place}/{name}{more}.npz" for name in ("train", "known", "held"))
        assert main(["fit", train, "--calibrate", known, "--out", f"{place}/posterior{more}"]) == 0
        words = [*shlex.split("--wrong-answers 0.2 --false-matches 1"), "--out", f"{place}/retriever{more}"]
        assert main(["fit", train, "--held-out", held, *words]) == 0
    return place


@pytest.fixture
def run(files, tmp_path, monkeypatch, capsys):
    """``run("fit train.npz --out here/x", code=0)``: what a command in the folder of the files prints."""
    monkeypatch.chdir(files)

    def call(line, code=0):
        try:
            found = main(shlex.split(line.replace("here/", f"{tmp_path}/")))
        except SystemExit as stop:
            found = stop.code
        out, err = capsys.readouterr()
        assert found == code, err
        assert "Traceback" not in err
        return err if code else out

    return call


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def loaded(files, name, more):
    """The inputs and the labels of a file."""
    with np.load(files / f"{name}{more}.npz") as file:
        return torch.from_numpy(file["embeddings" if more == "_embeddings" else "features"]), file["labels"]


def encoder(more):
    identity = {"weight": np.eye(WIDTH), "bias": np.zeros(WIDTH)}
    arrays = identity if more == "_embeddings" else LAYER
    layer = nn.Linear(*arrays["weight"].shape[::-1])
    layer.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return layer


def fitted(x, labels, known, more=""):
    """A posterior by the library called directly."""
    numbers = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    la = Laplace(encoder(more), "contrastive")
    la.fit([(x, numbers)])
    la.optimize_prior_precision()
    la.calibrate([known])
    return la


@each("more", ["", "_names", "_embeddings"])
def test_scores_and_answers_are_those_of_the_library(files, tmp_path, run, more):
    (x, labels), (known, _), held, (new, _) = (loaded(files, name, more) for name in ("train", "known", "held", "new"))
    run(f"answer posterior{more} new{more}.npz --out here/scores.csv --alpha 0.05")
    embedding = fitted(x, labels, known, more)(new)
    found = table(tmp_path / "scores.csv")
    assert list(found) == ["id", "uncertainty", "novelty", "p_value", "known"]
    for name in ("uncertainty", "novelty", "p_value"):
        wanted = getattr(embedding, name).double().numpy()
        assert np.array(found[name], float) == pytest.approx(wanted, rel=1e-4), name
    known = embedding.is_known(0.05)
    assert found["known"] == tuple("true" if one else "false" for one in known)

    run(f"answer retriever{more} new{more}.npz --out here/answers.csv")
    retriever = cc.Retriever(encoder(more), wrong_answers=0.2, false_matches=None).fit(x, labels, held_out=held)
    answers, found = retriever(new), table(tmp_path / "answers.csv")
    assert list(found) == ["id", "decision", "label", "neighbour", "confidence", "p_value"]
    assert found["decision"] == tuple(answers.decision)
    assert {"answer", "unsure"} <= set(found["decision"])
    assert found["neighbour"] == tuple(map(str, answers.neighbour))
    for name in ("confidence", "p_value"):
        assert np.array(found[name], float) == pytest.approx(getattr(answers, name), rel=1e-4), name
    # No spreadsheet runs a text; a number below zero is not a text.
    safe = [f"'{label}" if more and label[0] in "=-" else str(label) for label in answers.label.tolist()]
    assert list(found["label"]) == safe
    assert "'=1+1" in safe or not more
    ids = [f"'{'=+-@'[k % 4]}{k}" if more == "_names" else str(k) for k in range(40)]
    assert list(found["id"]) == ids


@each("character", "=+-@\t\r")
def test_every_text_that_a_spreadsheet_would_run_has_an_apostrophe(files, tmp_path, run, character):
    ids = np.array([f"{character}cmd|' /C calc'!A0", "a=1", "-1"])
    np.savez(tmp_path / "new.npz", features=points(3, 9)["features"], ids=ids)
    run("answer posterior here/new.npz --out here/scores.csv")
    assert table(tmp_path / "scores.csv")["id"] == (f"'{ids[0]}", "a=1", "'-1")
    np.savez(tmp_path / "new.npz", features=points(3, 9)["features"], ids=[-1, 0, 1])
    run("answer posterior here/new.npz --out here/scores.csv")
    assert table(tmp_path / "scores.csv")["id"] == ("-1", "0", "1")


def test_without_a_calibration_there_is_an_uncertainty_alone(tmp_path, run):
    assert run("fit train.npz --out here/posterior") == "300 inputs; no p-values\n"
    run("answer here/posterior new.npz --out here/scores.csv")
    assert list(table(tmp_path / "scores.csv")) == ["id", "uncertainty"]


def test_report_is_that_of_the_library(files, tmp_path, run, monkeypatch):
    x, labels = loaded(files, "train", "_names")
    (known, _), (test, of_test), (new, _) = (loaded(files, name, "_names") for name in ("held", "known", "new"))
    with np.load(files / "known_names.npz") as file:  # two of the five classes, whose numbers alone would be others
        some = np.isin(of_test, NAMES[[1, 2]])
        np.savez(tmp_path / "test.npz", **{name: array[some] for name, array in file.items()})
    options = "--calibrate held_names.npz --test here/test.npz --unknown new_names.npz"
    run(f"report train_names.npz {options} --out here/report")
    names, numbers = np.unique(labels), torch.from_numpy(np.searchsorted(np.unique(labels), of_test[some]))
    la = fitted(x, labels, known, "_names")
    wanted = cc.report.evaluate(la, [(test[some], numbers)], unknown=[new], class_names=names.tolist())
    written = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert written["metrics"] == pytest.approx(wanted.metrics, rel=1e-3, abs=1e-6)
    assert written["counts"] == {"test": int(some.sum()), "unknown": 40, "gallery": 0, "classes": 2}
    charts = {f"{n}.{kind}" for n in ("novelty", "sparsification", "reliability", "det") for kind in ("png", "svg")}
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "metrics.json", *charts}
    assert (tmp_path / "report" / "novelty.svg").read_bytes().startswith(b"<?xml")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;cat&lt;/b&gt;" in page
    assert "<b>cat" not in page
    assert any(f"{'=+-@'[k % 4]}{k}" in page for k in np.flatnonzero(some))

    monkeypatch.setattr(plots, "draw", lambda _: {})  # charts take seconds
    split = []
    for _ in range(2):  # the same fifths in every run, and over an earlier report
        run("report train.npz --out here/report")
        split.append(json.loads((tmp_path / "report" / "metrics.json").read_text()))
    assert split[0] == split[1]
    assert split[0]["counts"]["test"] == 60
    assert split[0]["posterior"]["training points"] == 180
    assert split[0]["posterior"]["compared with for p-values"] == 60


class Runs:
    """An object that would write a file when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_what_is_wrong_is_one_line_and_leaves_nothing(files, tmp_path, run):
    nothing = np.ones((5, WIDTH), np.float32)
    for name, arrays in {
        "no_labels": {"features": nothing, **LAYER},
        "no_weight": points(5, 1),
        "other_layer": {**points(5, 1), **LAYER, "bias": LAYER["bias"] + 1},
        "narrow": {"features": nothing[:, 1:]},
        "flat": {"features": nothing[0]},
        "empty": {"features": nothing[:0]},
        "texts": {"features": nothing.astype(str)},
        "nan": {"features": nothing * np.nan},
        "short": {**points(5, 1), **LAYER, "labels": np.arange(4)},
        "fractions": {**points(5, 1), **LAYER, "labels": np.arange(5) / 2},
        "objects": {**points(5, 1), **LAYER, "labels": np.array([Runs()] * 5, dtype=object)},
        "scalar": {**points(5, 1), "weight": np.float32(1)},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    (tmp_path / "damaged.npz").write_bytes((files / "train.npz").read_bytes()[:999])
    np.save(tmp_path / "one.npy", nothing)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    (tmp_path / "old.csv").write_text("old")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    here, out, answers = "here/", "--out here/new", "--out here/old.csv"
    for line, *words in [
        (f"fit {here}none.npz {out}", "none.npz"),
        (f"fit {here}no_labels.npz {out}", "no_labels.npz: expected the array labels, got features, weight, bias."),
        (f"fit {here}no_weight.npz {out}", "no_weight.npz: expected the array weight, got features, labels."),
        (f"fit {here}short.npz {out}", "short.npz: labels", "whole numbers or names of shape (5,)"),
        (f"fit {here}fractions.npz {out}", "fractions.npz: labels", "float64"),
        (f"fit {here}objects.npz {out}", "objects.npz", "labels.astype(str)"),
        (f"fit {here}scalar.npz {out}", "scalar.npz: weight"),
        (f"fit {here}damaged.npz {out}", "damaged.npz"),
        (f"fit {here}one.npy {out}", "one.npy"),
        (f"fit train.npz --calibrate {here}nan.npz {out}", "finite"),
        (f"fit train.npz --calibrate {here}other_layer.npz {out}", "other_layer.npz: bias: expected that of the fit"),
        (f"fit train.npz --calibrate known_embeddings.npz {out}", "the array features, got embeddings, labels"),
        (f"fit train.npz --held-out held_names.npz {out}", "labels", "names in all files"),
        (
            f"fit train.npz --held-out held.npz --calibrate known.npz {out}",
            "--calibrate: expected nothing beside --held-out",
        ),
        (f"fit train.npz --wrong-answers 0.1 {out}", "--held-out: expected a file beside --wrong-answers"),
        (f"fit train.npz --held-out held.npz --wrong-answers 2 {out}", "wrong_answers: expected a number in (0, 1)"),
        (f"fit train.npz --out {here}mine", "--out", "one that exists"),
        (f"fit train.npz --out {here}no/where", "--out", "no folder"),
        (f"answer {here}mine new.npz {answers}", "mine: expected a folder of contrastive-curvature fit"),
        (f"answer posterior {here}narrow.npz {answers}", f"features: expected numbers of shape (N, {WIDTH}), got"),
        (f"answer posterior {here}flat.npz {answers}", "flat.npz: features"),
        (f"answer posterior {here}empty.npz {answers}", "empty.npz: features"),
        (f"answer posterior {here}texts.npz {answers}", "texts.npz: features"),
        (f"answer posterior {here}nan.npz {answers}", "finite"),
        (f"answer posterior_embeddings new.npz {answers}", "the array embeddings, got features, labels"),
        (f"answer posterior new.npz --alpha 0.001 {answers}", "alpha"),
        (f"answer retriever new.npz --alpha 0.1 {answers}", "--alpha"),
        (f"answer posterior new.npz --out {here}old.npz", "ends in .csv"),
        (f"report train.npz --test held_names.npz {out}", "labels"),
        (f"report train.npz --test {here}no_labels.npz {out}", "the array labels"),
    ]:
        error = run(line, code=2)
        assert error.startswith("error: "), line
        assert error.count("\n") == 1, line
        assert all(word in error for word in words), (line, error)
    for line in ("", "score", "fit train.npz", "answer posterior new.npz", "fit train.npz --out a --alpha 0.1"):
        assert "contrastive-curvature" in run(line, code=2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not (files / "unpickled").exists()


def test_a_folder_or_a_table_appears_when_it_is_complete(files, tmp_path, run, monkeypatch):
    (tmp_path / "old.csv").write_text("old")
    for name, kind, line in [
        ("save_pretrained", ContrastiveLaplace, "fit train.npz"),
        ("save", cc.Retriever, "fit train.npz --held-out held.npz --wrong-answers 0.2 --false-matches 1"),
    ]:

        def full(self, folder, **_):
            Path(folder).mkdir()
            raise OSError(28, "No space left on device", str(folder))

        with monkeypatch.context() as broken:
            broken.setattr(kind, name, full)
            assert "No space left on device" in run(f"{line} --out here/new", code=2)
    with monkeypatch.context() as broken:
        broken.setattr(csv, "writer", lambda file: file.write("half") and full(None, tmp_path / "x"))
        run("answer posterior new.npz --out here/old.csv", code=2)
    assert [path.name for path in tmp_path.iterdir() if path.name != "x"] == ["old.csv"]
    assert (tmp_path / "old.csv").read_text() == "old"


def test_help_has_an_example_that_is_understood_and_the_version_needs_no_torch(run, tmp_path, monkeypatch):
    assert all(name in run("--help") for name in ("fit", "answer", "report"))
    for name in ("fit", "answer", "report"):
        shown = run(f"{name} --help")
        assert "features (N, F)" in shown
        (example,) = re.findall(r"^Example: contrastive-curvature (.*)$", shown, re.MULTILINE)
        with monkeypatch.context() as empty:
            empty.chdir(tmp_path)
            assert "train.npz" in run(example, code=2) or name == "answer"
    script = "import sys; from contrastive_curvature.__main__ import main\ntry: main(['--version'])\n"
    script += "finally: assert not {'torch', 'numpy', 'laplace'} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (["-c", script], ["-m", "contrastive_curvature", "--version"]):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=True)
        assert done.stdout == f"contrastive-curvature {cc.__version__}\n"


def test_warnings_are_lines(files, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["-m", "contrastive_curvature", "fit", "train.npz", "--held-out", "train.npz", "--out", tmp_path / "new"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=True, cwd=files)
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("warning: ") for line in lines)
    assert any("are in the gallery" in line for line in lines)


def test_the_blocks_of_the_pages_run_in_one_folder(tmp_path, monkeypatch, capsys):
    """Python and shell, as a newcomer reads them."""
    monkeypatch.chdir(tmp_path)
    ran = []
    for page in ("README.md", "docs/command_line.md"):
        text, blocks = (ROOT / page).read_text(encoding="utf-8"), []
        for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            if kind == "python":
                blocks.append((0, block))
            elif kind == "sh" and not block.startswith(("make ", "pip ")):  # which run in a copy of the repository
                run_blocks(ROOT / page, blocks, capsys)
                for line in block.splitlines():
                    program, *words = shlex.split(line)
                    assert program == "contrastive-curvature"
                    assert main(words) == 0, capsys.readouterr().err
                    ran.append(words[0])
    assert set(ran) == {"fit", "answer", "report"}
    assert {"answers.csv", "report"} <= {path.name for path in tmp_path.iterdir()}

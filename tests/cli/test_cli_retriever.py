"""``fit --held-out``, ``answer``, ``add`` and ``evaluate``: the answers and rates of the library, and its promise."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import BIAS, CLASSES, WEIGHT, Run, error_of, points
from test_cli_score import column, read

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.io.serving import Scorer

NAMES = np.array(["ant", "bee", "cat", "dog", "elk", "fox"])
FIT = ("fit", "named.npz", "--held-out", "held.npz", "--wrong-answers", 0.2, "--false-matches", 0.4, "--quiet", "--out")


@pytest.fixture
def named(place: Path) -> None:
    """Sources whose classes are texts; ``more.npz`` has one that no other has."""
    for name, seed, classes in (("named", 2, CLASSES), ("held", 3, CLASSES), ("asked", 7, CLASSES), ("more", 4, 6)):
        found = points(150, seed, classes)
        np.savez(f"{name}.npz", features=found["features"], labels=NAMES[found["labels"]], weight=WEIGHT, bias=BIAS)


def data(name: str) -> tuple[torch.Tensor, list[str]]:
    found = np.load(name)
    return torch.from_numpy(found["features"]), found["labels"].tolist()


def test_answers_and_rates_are_those_of_the_library(run: Run, named: None) -> None:
    run(*FIT, "r", "--false-alarms", 1, "--confidence", 0.8)
    retriever, _ = open_posterior(Path("r"))
    wanted = cc.Retriever(open_posterior(Path("r/posterior"))[0], 0.2, 0.4, None, 0.8)
    wanted.fit(gallery=data("named.npz"), held_out=data("held.npz"))
    assert repr(wanted) == repr(retriever)
    result = run("answer", "r", "asked.npz", "--out", "answers.csv", "--batch-size", 64)
    rows, answers = read("answers.csv"), wanted(data("asked.npz")[0])
    assert [row["decision"] for row in rows] == answers.decision.tolist()
    assert [(row["label"], int(row["neighbour"])) for row in rows] == list(
        zip(answers.label.tolist(), answers.neighbour.tolist(), strict=True)
    )
    np.testing.assert_allclose(column(rows, "confidence"), answers.confidence, rtol=1e-4)
    answered = int((answers.decision == "answer").sum())
    assert 0 < answered < 150
    assert f"answer {answered}" in result.stdout
    assert result.stdout.splitlines()[-1] == f"promised: {wanted!r}"
    evaluate = ("evaluate", "r", "--test", "asked.npz", "--unknown", "more.npz")
    rates = json.loads(run(*evaluate, "--json").stdout)["rates"]
    for name, rate in wanted.evaluate(data("asked.npz"), data("more.npz")[0]).items():
        assert rates[name] == rate._asdict(), name
    assert "asked for: at most 0.2" in run(*evaluate).stdout
    assert "--out" in error_of(run(*evaluate, "--out", "report", code=2))


def test_an_exported_retriever_answers_and_info_knows_it(run: Run, named: None) -> None:
    run(*FIT, "r")
    run("export", "r", "--out", "served.npz")
    retriever, _ = open_posterior(Path("r"))
    features = data("asked.npz")[0]
    served, answers = Scorer.load("served.npz").answer(features.numpy()), retriever(features)
    assert served["decision"].tolist() == answers.decision.tolist()
    assert "--p-value" in error_of(run("export", "r", "--out", "again.npz", "--no-p-value", code=2))
    assert "wrong_answers 0.2, false_matches 0.4" in run("info", "r").stdout
    found = json.loads(run("info", "r", "--json").stdout)
    assert found["retriever"]["answered"] == retriever.answered
    assert found["posteriors"]


def test_points_are_added_by_the_names_of_their_classes(run: Run, named: None) -> None:
    run(*FIT, "r")
    before = {path.name: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()}
    found = json.loads(run("add", "r", "more.npz", "--out", "r2", "--json").stdout)
    assert (found["added"], found["first"], found["last"]) == (150, 150, 299)
    assert "'fox'" in found["promise"]
    assert before == {path.name: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()}
    assert "--overwrite" in error_of(run("add", "r", "more.npz", "--out", "r2", code=2))
    run("add", "r", "more.npz", "--quiet")
    run("answer", "r", "more.npz", "--out", "answers.csv")
    # Each finds itself.
    assert [int(row["neighbour"]) for row in read("answers.csv")] == list(range(150, 300))
    assert [row["label"] for row in read("answers.csv")] == data("more.npz")[1]


def test_folders_and_options_that_do_not_fit(run: Run, named: None) -> None:
    np.savez("bare.npz", features=points(9, 8)["features"])
    run(*FIT, "r")
    for words, wanted in (
        ((*FIT, "r"), "--overwrite"),
        ((*FIT, "posterior", "--overwrite"), "--out posterior"),
        (("fit", "train.npz", "--out", "r", "--overwrite"), "--out r"),
        (("answer", "posterior", "new.npz", "--out", "a.csv"), "a saved retriever"),
        (("fit", "train.npz", "--gallery", "new.npz", "--out", "x"), "--held-out"),
        (("evaluate", "posterior", "--test", "new.npz"), "--out"),
        (("fit", "train.npz", "--held-out", "bare.npz", "--out", "x"), "bare.npz: expected inputs with classes"),
        (("evaluate", "r", "--test", "bare.npz"), "bare.npz: expected inputs with classes"),
        ((*FIT, "x", "--wrong-answers", 0), "'--wrong-answers'"),
        (("fit", "train.npz", "--held-out", "validation.npz", "--gallery", "named.npz", "--out", "x"), "of one kind"),
    ):
        assert wanted in error_of(run(*words, code=2)), words
    run("fit", "train.npz", "--held-out", "validation.npz", "--out", "x", "--quiet")
    assert "the numbers" in error_of(run("add", "x", "more.npz", code=2))
    assert not Path("a.csv").exists()


def test_broken_images_are_left_out_by_name(run: Run) -> None:
    image = pytest.importorskip("PIL.Image")
    module = Path("skip_encoder.py")
    module.write_text("from torch import nn\n\ndef f():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))\n")
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        Path("images", label).mkdir(parents=True)
        for k in range(6):
            image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(f"images/{label}/{k}.png")
    whole = Path("images/cat/1.png").read_bytes()
    Path("images/cat/1.png").write_bytes(whole[: len(whole) // 2])
    Path("images/dog/3.png").write_text("no image")
    fit = ("fit", "images", "--encoder", "skip_encoder:f", "--out", "p")
    assert "--skip-unreadable" in error_of(run(*fit, code=2))
    result = json.loads(run(*fit, "--skip-unreadable", "--json").stdout)
    assert result["inputs"] == 10
    assert "images: 2 of 12 images cannot be read and are left out: cat/1.png, dog/3.png" in result["warnings"]
    score = ("score", "p", "images", "--encoder", "skip_encoder:f", "--out", "s.csv", "--skip-unreadable")
    run(*score)
    assert [row["id"] for row in read("s.csv")] == [f"cat/{k}.png" for k in (0, 2, 3, 4, 5)] + [
        f"dog/{k}.png" for k in (0, 1, 2, 4, 5)
    ]


def test_a_head_is_that_of_the_library(run: Run, named: None) -> None:
    fit = (*FIT[:-1], "--head", "--out")
    run(*fit, "r", "--gallery", "more.npz")
    retriever, encoder = open_posterior(Path("r"))
    wanted = cc.Retriever(encoder.module, 0.2, 0.4, head=True)
    wanted.fit(*data("named.npz"), held_out=data("held.npz"), gallery=data("more.npz"))
    assert repr(retriever) == repr(wanted)
    result = run("answer", "r", "asked.npz", "--out", "answers.csv")
    rows = read("answers.csv")
    assert [row["decision"] for row in rows] == wanted(data("asked.npz")[0]).decision.tolist()
    assert result.stdout.splitlines()[-1] == f"promised: {wanted!r}"
    run(*fit, "r", "--overwrite")
    assert repr(open_posterior(Path("r"))[0]) != repr(wanted)
    for words, named_option in ((("--weights", "all"), "--weights"), (("--calibrate", "more.npz"), "--calibrate")):
        assert f"got {named_option}" in error_of(run(*fit, "x", *words, code=2)), words
    assert "no --held-out" in error_of(run("fit", "named.npz", "--head", "--out", "x", code=2))

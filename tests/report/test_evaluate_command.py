"""``contrastive-curvature evaluate``: files, numbers as JSON, and one line for what is wrong."""

import json

import numpy as np
import pytest
import torch
from report_cases import inputs
from tables import each

from contrastive_curvature.apps.cli import cli
from contrastive_curvature.apps.report import plots

NAMES = np.array(["ant", "bee", "<b>cat</b>", "dog"])


def run(capsys, *words):
    code = cli.main([str(word) for word in words], standalone_mode=False)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write(path, n, seed, unknown=False, classes=True):
    x, labels = inputs(n, seed, unknown)
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 16, generator=random) / 4
    arrays = {"features": x.flatten(1).numpy(), "weight": weight.numpy(), "bias": np.zeros(4, np.float32)}
    if classes:
        arrays["labels"] = NAMES[labels.numpy()]
    np.savez(path, ids=np.array([f"input {i}" for i in range(n)]), **arrays)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved posterior of a last layer, and sources."""
    folder = tmp_path_factory.mktemp("command")
    write(folder / "train.npz", 120, seed=1)
    write(folder / "calibration.npz", 120, seed=2, classes=False)
    write(folder / "test.npz", 90, seed=3)
    write(folder / "unknown.npz", 50, seed=4, unknown=True, classes=False)
    words = ["fit", folder / "train.npz", "--calibrate", folder / "calibration.npz", "--out", folder / "posterior"]
    assert cli.main([str(word) for word in words], standalone_mode=False) == 0
    return folder


def test_page_files_and_json(folder, tmp_path, capsys):
    sources = ["--unknown", folder / "unknown.npz", "--gallery", folder / "train.npz", "--alpha", "0.05", "-k", "3"]
    words = ["evaluate", folder / "posterior", "--test", folder / "test.npz", *sources, "--out", tmp_path / "a" / "b"]
    code, out, err = run(capsys, *words, "--json", "--samples", "4", "--title", "Cats & dogs")
    assert (code, err) == (0, "")
    printed = json.loads(out)
    written = json.loads((tmp_path / "a" / "b" / "metrics.json").read_text())
    assert printed["metrics"] == written["metrics"]
    assert {"recall@3", "auroc", "ece", "flagged_unknown@0.05"} <= set(written["metrics"])
    assert written["counts"] == {"test": 90, "unknown": 50, "gallery": 120, "classes": 4}
    page = (tmp_path / "a" / "b" / "report.html").read_text(encoding="utf-8")
    assert "Cats &amp; dogs" in page
    assert "&lt;b&gt;cat&lt;/b&gt;" in page
    assert "<b>cat" not in page
    assert "input 1" in page
    plots = {
        f"{name}.{kind}" for name in ("novelty", "sparsification", "reliability", "det") for kind in ("png", "svg")
    }
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"report.html", "metrics.json", *plots}
    assert (tmp_path / "a" / "b" / "novelty.svg").read_bytes().startswith(b"<?xml")


def test_classes_mean_the_same_in_both_sources(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda _: {})  # charts take seconds
    # The test inputs have two of the four classes, whose numbers alone would be others.
    x, labels = inputs(90, 3)
    with np.load(folder / "test.npz") as test:
        rows = np.isin(labels.numpy(), (1, 3))
        np.savez(tmp_path / "some.npz", **{k: v if k in ("weight", "bias") else v[rows] for k, v in test.items()})
    words = ["evaluate", folder / "posterior", "--test", tmp_path / "some.npz", "--gallery", folder / "train.npz"]
    code, out, _ = run(capsys, *words, "--out", tmp_path / "out", "--json", "--samples", 0, "-k", 1)
    found = json.loads(out)
    from contrastive_curvature.apps.cli.saved import open_posterior

    la, _ = open_posterior(folder / "posterior")
    gallery, gallery_labels = inputs(120, 1)
    here = torch.from_numpy(rows)
    cosine = la(x[here].flatten(1)).mu @ la(gallery.flatten(1)).mu.T
    right = gallery_labels[cosine.argmax(1)] == labels[here]
    assert code == 0
    assert found["metrics"]["recall@1"] == pytest.approx(float(right.double().mean()), abs=0.03)
    if_numbered_apart = gallery_labels[cosine.argmax(1)] == (labels[here] == 3).long()
    assert abs(found["metrics"]["recall@1"] - float(if_numbered_apart.double().mean())) > 0.1


@each(
    "words, says",
    [
        (["--test", "test.npz", "--unknown", "none.npz"], "none.npz"),
        (["--test", "test.npz", "--alpha", "2"], "alpha"),
        (["--test", "test.npz", "--out", "test.npz"], "--out"),
        ([], "--test"),
    ],
)
def test_what_is_wrong_is_one_line(folder, tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.chdir(folder)
    out = [] if "--out" in words else ["--out", tmp_path / "report"]
    code, printed, err = run(capsys, "evaluate", "posterior", *words, *out)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1
    assert printed == ""
    assert not (tmp_path / "report").exists()

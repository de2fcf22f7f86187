"""Sources: feature folders, arrays, images and texts, whole or refused in one line, and nothing in them is run."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import BIAS, WEIGHT, Run, error_of, opened, points
from tables import each
from test_cli_fit import layer
from test_cli_score import column, read
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.encoders import last_layer_encoder
from contrastive_curvature.apps.cli.sources import Loader, shared_labels

SCORE = ("score", "posterior")


def encoder(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), layer())


def write_folder(name: str, seed: int = 0, n: int = 120, **options: object) -> cc.FeatureFolder:
    torch.manual_seed(1)
    labels = torch.arange(n) % 5
    x = torch.randn(n, 6) + 2 * torch.eye(6)[labels]
    loader = DataLoader(TensorDataset(x, labels), batch_size=50)
    return cc.features(encoder(seed), loader, name, identifiers=[f"point {k}" for k in range(n)], **options)


def test_feature_folder_with_its_last_layer(run: Run) -> None:
    write_folder("train", dtype="float16")
    np.savez("layer.npz", weight=WEIGHT, bias=BIAS)
    fit = ("fit", "train", "--last-layer", "layer.npz", "--out", "p", "--calibration-share", 0.3, "--seed", 1)
    found = json.loads(run(*fit, "--batch-size", 32, "--json").stdout)
    assert (found["inputs"], found["calibration_inputs"]) == (84, 36)
    run("score", "p", "train", "--out", "scores.csv", "--batch-size", 32, "--alpha", 0.1)
    rows = read("scores.csv")
    assert [row["id"] for row in rows] == [f"point {k}" for k in range(120)]
    features = torch.from_numpy(cc.FeatureFolder("train").numpy())
    mu = nn.functional.normalize(layer()(features), dim=1)
    np.testing.assert_allclose(column(rows, "mu_0"), mu[:, 0].detach().numpy(), atol=1e-6)


def test_candidates_of_a_batch_are_drawn_from_all_classes(place: Path) -> None:
    labels, identity = np.sort(np.arange(120) % 4), np.eye(12, dtype=np.float32)
    np.savez("sorted.npz", embeddings=np.arange(120.0)[:, None] * np.ones(12), labels=labels)
    source, rows = opened("sorted.npz"), np.arange(0, 120, 2)
    source.prepare(last_layer_encoder(identity, None, width=12, identity=True))
    (numbers,), _ = shared_labels(source)
    loader = Loader(source, 20, rows, numbers, seed=4)
    parts = list(loader)
    found = torch.cat([y for _, y in parts])
    assert torch.equal(found, torch.cat([y for _, y in loader]))
    assert sorted(found.tolist()) == sorted(numbers[rows].tolist())
    assert all(len(y.unique()) > 1 for _, y in parts)
    # Each input keeps its class.
    assert all(numbers[x[:, 0].long()].tolist() == y.tolist() for x, y in parts)


def test_features_of_another_encoder_are_refused(run: Run) -> None:
    write_folder("train")
    write_folder("other", seed=5)
    np.savez("layer.npz", weight=WEIGHT, bias=BIAS)
    run("fit", "train", "--last-layer", "layer.npz", "--out", "p")
    assert "those of another" in error_of(run("score", "p", "other", "--out", "scores.csv", code=2))
    assert "weight" in error_of(run("fit", "train", "--out", "q", code=2))
    np.savez("layer.npz", weight=WEIGHT[:3])
    assert "4 outputs" in error_of(run("fit", "train", "--last-layer", "layer.npz", "--out", "q", code=2))
    assert not Path("scores.csv").exists()


@each(
    "arrays, wanted",
    [
        ({"features": np.ones((4, 12))}, "labels"),
        ({"labels": np.arange(4)}, "features"),
        ({"features": np.ones((4, 12)), "embeddings": np.ones((4, 12)), "labels": np.arange(4)}, "one of"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4)}, "weight (and bias"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4), "weight": np.ones((4, 11))}, "(4, 11)"),
        ({"features": np.ones((4, 12)), "labels": np.arange(3), "weight": WEIGHT}, "labels"),
        ({"features": np.ones(4), "labels": np.arange(4), "weight": WEIGHT}, "2 axes"),
        ({"features": np.array([["a"]]), "labels": np.arange(1), "weight": WEIGHT}, "real numbers"),
        ({"inputs": np.ones((4, 12)), "labels": np.arange(4)}, "--encoder"),
        ({"X": np.ones((4, 12)), "y": np.arange(4)}, "got X, y. numpy.savez(file, inputs=X, labels=y)"),
    ],
)
def test_arrays_that_do_not_fit(run: Run, arrays: dict[str, np.ndarray], wanted: str) -> None:
    np.savez("bad.npz", **arrays)
    assert wanted in error_of(run("fit", "bad.npz", "--out", "p", code=2))
    assert not Path("p").exists()


def test_an_archive_is_never_unpickled(run: Run) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (open, ("exploded", "w"))

    np.savez("bomb.npz", features=np.array([Bomb()], dtype=object), labels=np.arange(1))
    assert "bomb.npz" in error_of(run(*SCORE, "bomb.npz", "--out", "scores.csv", code=2))
    assert not Path("exploded").exists()


def test_files_that_are_not_what_they_say(run: Run) -> None:
    whole = Path("new.npz").read_bytes()
    with open("one.npz", "wb") as file:
        np.save(file, np.ones(3))
    np.savez("wide.npz", features=np.ones((3, 13)))
    Path("empty.npz").write_bytes(b"")
    Path("half.npz").write_bytes(whole[: len(whole) // 2])
    Path("no.csv").write_bytes(whole)
    Path("no.jsonl").write_text('{"text": 3}')
    Path("new.xyz").write_bytes(whole)
    Path("empty").mkdir()
    for name, wanted in {"one.npz": "cannot be read", "wide.npz": "width 12", "nowhere.npz": "does not exist"}.items():
        assert wanted in error_of(run(*SCORE, name, "--out", "scores.csv", code=2))
    for name in ("empty.npz", "half.npz", "no.csv", "no.jsonl", "new.xyz", "empty"):
        assert name in error_of(run(*SCORE, name, "--out", "scores.csv", code=2))
    assert not Path("scores.csv").exists()


def test_features_are_not_taken_for_embeddings(run: Run) -> None:
    found = points(60, 5)
    np.savez("embeddings.npz", embeddings=found["features"], labels=found["labels"])
    assert "the array features" in error_of(run(*SCORE, "embeddings.npz", "--out", "scores.csv", code=2))
    run("fit", "embeddings.npz", "--out", "p")
    assert "the array embeddings" in error_of(run("score", "p", "new.npz", "--out", "scores.csv", code=2))


def test_tables(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.csv").write_text('\ufefftext,label,id\n"red, apple",fruit,a\ncar,vehicle,b\n', encoding="utf-8")
    Path("b.jsonl").write_text('{"sentence": "pear", "kind": 3}\n\n{"sentence": "bus", "kind": 1}\n')
    found = opened("a.csv", id="id")
    assert (found.texts, found.ids) == (["red, apple", "car"], ["a", "b"])
    other = opened("b.jsonl", text="sentence", label="kind")
    assert (other.ids, other.classes.tolist()) == (["0", "1"], [3, 1])
    numbers, names = shared_labels(found, found)
    assert ([each.tolist() for each in numbers], names) == ([[0, 1], [0, 1]], ["fruit", "vehicle"])
    assert shared_labels(other)[1] is None
    # A number of a table is a text, and the same class as a number of another source.
    text = b'{"text": "red", "label": 3}\n{"text": "blue", "label": 10}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    Path("c.csv").write_text("text,label\npear,10\nbus,2\n")
    piped = opened("-")
    (one, two), names = shared_labels(piped, opened("c.csv"))
    assert (piped.texts, names, one[1]) == (["red", "blue"], ["10", "2", "3"], two[0])
    assert len({*one.tolist(), *two.tolist()}) == 3


@each(
    "content, wanted",
    [
        ("words,label\nred,fruit\n", "--text-column"),
        ("text,label\nred,fruit\nblue,\n", "a class"),
        ('text,label\n"red,fruit\n', "cannot be read"),
        ("text,label,text\nred,fruit,blue\n", "'text' twice"),
    ],
)
def test_tables_that_do_not_fit(run: Run, content: str, wanted: str) -> None:
    Path("bad.csv").write_text(content)
    assert wanted in error_of(run(*SCORE, "bad.csv", "--out", "scores.csv", code=2))


def test_a_last_layer_of_another_encoder(run: Run) -> None:
    found = points(20, 9)
    np.savez("same.npz", **found, weight=WEIGHT.astype(np.float64), bias=BIAS)
    run(*SCORE, "same.npz", "--out", "scores.csv")
    np.savez("other.npz", **found, weight=-WEIGHT, bias=BIAS)
    np.savez("shifted.npz", **found, weight=WEIGHT)
    for command in (
        (*SCORE, "other.npz", "--out", "none.csv"),
        (*SCORE, "shifted.npz", "--out", "none.csv"),
        ("fit", "train.npz", "--out", "q", "--calibrate", "other.npz"),
    ):
        assert "those of another" in error_of(run(*command, code=2))
    assert not Path("none.csv").exists()
    assert not Path("q").exists()


def test_columns_that_no_source_has(run: Run) -> None:
    for option in ("--id-column", "--text-column", "--label-column"):
        assert option in error_of(run(*SCORE, "new.npz", "--out", "scores.csv", option, "text", code=2))
    Path("a.csv").write_text("text,label\nred,fruit\n")
    Path("b.csv").write_text("text,kind\nred,fruit\n")
    assert "'labels'" in error_of(run(*SCORE, "a.csv", "--out", "scores.csv", "--label-column", "labels", code=2))
    # One table with classes is enough: unknown inputs need none.
    evaluate = ("evaluate", "posterior", "--test", "b.csv", "--unknown", "a.csv", "--out", "report")
    assert "--label-column" not in error_of(run(*evaluate, "--label-column", "kind", code=2))

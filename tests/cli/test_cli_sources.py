"""Sources: feature folders, arrays, images and texts, whole or refused in one line, and nothing in them is run."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import BIAS, WEIGHT, Run, error_of, opened, points
from tables import covering
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_feature_folder_with_its_last_layer(run: Run, dtype: str) -> None:
    write_folder("train", dtype=dtype)
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
    write_folder("train")
    labels = np.sort(np.arange(120) % 4)
    np.savez("sorted.npz", embeddings=np.arange(120.0)[:, None] * np.ones(12), labels=labels)
    for name, width in (("train", 12), ("sorted.npz", 12)):
        source, of = opened(name), getattr(opened(name), "encoder_of", None)
        identity = np.eye(width, dtype=np.float32)
        source.prepare(last_layer_encoder(identity, None, width=width, identity=True, source=of))
        (numbers,), _ = shared_labels(source)
        rows = np.arange(0, 120, 2)
        loader = Loader(source, 20, rows, numbers, seed=4)
        parts = list(loader)
        again = torch.cat([y for _, y in loader])
        found = torch.cat([y for _, y in parts])
        assert torch.equal(found, again)
        assert sorted(found.tolist()) == sorted(numbers[rows].tolist())
        assert all(len(y.unique()) > 1 for _, y in parts)
        assert found.tolist() != numbers[rows].tolist()
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


def test_an_incomplete_feature_folder(run: Run) -> None:
    write_folder("train")
    (Path("train") / "features.bin").write_bytes(b"123")
    assert "train" in error_of(run("fit", "train", "--last-layer", "train.npz", "--out", "p", code=2))


@pytest.mark.parametrize(
    ("arrays", "wanted"),
    [
        ({"features": np.ones((4, 12))}, "labels"),
        ({"labels": np.arange(4)}, "features"),
        ({"features": np.ones((4, 12)), "embeddings": np.ones((4, 12)), "labels": np.arange(4)}, "one of"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4)}, "weight (and bias"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4), "bias": BIAS}, "weight"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4), "weight": np.ones((4, 11))}, "(4, 11)"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4), "weight": WEIGHT, "bias": BIAS[:2]}, "(2,)"),
        ({"features": np.ones((4, 12)), "labels": np.arange(3), "weight": WEIGHT}, "labels"),
        ({"features": np.ones((4, 12)), "labels": np.ones(4), "weight": WEIGHT}, "float64"),
        ({"features": np.ones(4), "labels": np.arange(4), "weight": WEIGHT}, "2 axes"),
        ({"features": np.ones((0, 12)), "labels": np.arange(0), "weight": WEIGHT}, "none empty"),
        ({"features": np.array([["a"]]), "labels": np.arange(1), "weight": WEIGHT}, "real numbers"),
        ({"features": np.ones((4, 12)), "labels": np.arange(4), "weight": WEIGHT}, "labels"),
        ({"inputs": np.ones((4, 12)), "labels": np.arange(4)}, "--encoder"),
        ({"X": np.ones((4, 12)), "y": np.arange(4)}, "got X, y. numpy.savez(file, inputs=X, labels=y)"),
        ({"features": np.ones((4, 12)), "labels": np.array(["a"] * 4, object)}, "labels.astype(str)"),
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


@covering(1, content=[b"", b"PK\x03\x04 no archive", b"half"], name=["bad.npz", "bad.csv", "bad.jsonl", "bad.xyz"])
def test_files_that_are_not_what_they_say(run: Run, name: str, content: bytes) -> None:
    whole = Path("new.npz").read_bytes()
    Path(name).write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    assert name in error_of(run(*SCORE, name, "--out", "scores.csv", code=2))
    assert not Path("scores.csv").exists()


def test_a_single_array_and_nothing(run: Run) -> None:
    with open("one.npz", "wb") as file:
        np.save(file, np.ones(3))
    assert "single array" in error_of(run(*SCORE, "one.npz", "--out", "scores.csv", code=2))
    assert "does not exist" in error_of(run(*SCORE, "nowhere.npz", "--out", "scores.csv", code=2))
    Path("empty").mkdir()
    assert "images" in error_of(run(*SCORE, "empty", "--out", "scores.csv", code=2))


def test_features_are_not_taken_for_embeddings(run: Run) -> None:
    found = points(60, 5)
    np.savez("embeddings.npz", embeddings=found["features"], labels=found["labels"])
    assert "the array features" in error_of(run(*SCORE, "embeddings.npz", "--out", "scores.csv", code=2))
    run("fit", "embeddings.npz", "--out", "p")
    assert "the array embeddings" in error_of(run("score", "p", "new.npz", "--out", "scores.csv", code=2))


def test_features_of_another_width(run: Run) -> None:
    np.savez("wide.npz", features=np.ones((3, 13)))
    assert "width 12" in error_of(run(*SCORE, "wide.npz", "--out", "scores.csv", code=2))


def test_tables(place: Path) -> None:
    Path("a.csv").write_text('\ufefftext,label,id\n"red, apple",fruit,a\ncar,vehicle,b\n', encoding="utf-8")
    Path("b.jsonl").write_text('{"sentence": "pear", "kind": 3}\n\n{"sentence": "bus", "kind": 1}\n')
    found = opened("a.csv", id="id")
    assert (found.texts, found.ids) == (["red, apple", "car"], ["a", "b"])  # type: ignore[attr-defined]
    other = opened("b.jsonl", text="sentence", label="kind")
    assert (other.ids, other.classes.tolist()) == (["0", "1"], [3, 1])
    numbers, names = shared_labels(found, found)
    assert ([each.tolist() for each in numbers], names) == ([[0, 1], [0, 1]], ["fruit", "vehicle"])
    assert shared_labels(other)[1] is None


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("text,label\n,fruit\n", "a text"),
        ("words,label\nred,fruit\n", "--text-column"),
        ("text,label\nred,fruit\nblue,\n", "a class"),
        ("text,label\n", "at least one row"),
        ('text,label\n"red,fruit\n', "cannot be read"),
        ("text,label\nred,fruit\nhello, world,greeting\n", "row 1"),
        ("text\nhello,\n", "Quote texts"),
        ("text,label,text\nred,fruit,blue\n", "'text' twice"),
    ],
)
def test_tables_that_do_not_fit(run: Run, content: str, wanted: str) -> None:
    Path("bad.csv").write_text(content)
    assert wanted in error_of(run(*SCORE, "bad.csv", "--out", "scores.csv", code=2))


@pytest.mark.parametrize("content", ["[1]", '{"text": "red"', '{"text": 3}'])
def test_json_lines_that_do_not_fit(run: Run, content: str) -> None:
    Path("bad.jsonl").write_text(content)
    assert "bad.jsonl" in error_of(run(*SCORE, "bad.jsonl", "--out", "scores.csv", code=2))


def test_classes_beyond_64_bits_are_texts(place: Path) -> None:
    lines = [json.dumps({"text": "red", "label": label}) for label in (2**63, -1, 2**70)]
    Path("large.jsonl").write_text("\n".join(lines))
    assert opened("large.jsonl").classes.tolist() == [str(2**63), "-1", str(2**70)]


def test_long_texts_of_a_csv(place: Path) -> None:
    long = "x" * 200_000  # Python's own limit is 131,072
    Path("long.csv").write_text(f"text\n{long}\n")
    assert opened("long.csv").texts == [long]  # type: ignore[attr-defined]


def npy(shape: object, data: bytes = b"") -> bytes:
    """An array of float32 as numpy writes it, whatever its header says."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("content", "compression"),
    [
        (b"no array", zipfile.ZIP_STORED),
        (npy((10**30,)), zipfile.ZIP_STORED),
        (npy((10**13,)), zipfile.ZIP_STORED),
        (npy("(1,)" + "(" * 500), zipfile.ZIP_STORED),
        (b"\x93NUMPY\x01\x00\x05\x00{{{{{", zipfile.ZIP_STORED),
        (npy((4, 12), bytes(range(192))), zipfile.ZIP_LZMA),
    ],
)
def test_damaged_members_of_an_archive(run: Run, content: bytes, compression: int) -> None:
    with zipfile.ZipFile("bad.npz", "w", compression) as archive:
        archive.writestr("features.npy", content)
    if compression == zipfile.ZIP_LZMA:
        whole = bytearray(Path("bad.npz").read_bytes())
        # Behind the header of the member's 12 letters, in the header of LZMA.
        whole[30 + len("features.npy") + 4] ^= 0xFF
        Path("bad.npz").write_bytes(whole)
    assert "bad.npz" in error_of(run(*SCORE, "bad.npz", "--out", "scores.csv", code=2))


def test_a_last_layer_of_another_encoder(run: Run) -> None:
    found = points(20, 9)
    np.savez("same.npz", **found, weight=WEIGHT.astype(np.float64), bias=BIAS)
    run(*SCORE, "same.npz", "--out", "scores.csv")
    np.savez("other.npz", **found, weight=-WEIGHT, bias=BIAS)
    np.savez("shifted.npz", **found, weight=WEIGHT)
    search = ("search", "posterior", "--out", "none.csv", "--queries", "new.npz", "--gallery")
    for name in ("other.npz", "shifted.npz"):
        for command in (
            (*SCORE, name, "--out", "none.csv"),
            (*search, name),
            ("fit", "train.npz", "--out", "q", "--calibrate", name),
        ):
            error = error_of(run(*command, code=2))
            assert name in error
            assert "those of another" in error
    assert not Path("none.csv").exists()
    assert not Path("q").exists()


def test_texts_that_are_no_utf8_are_written_out(run: Run) -> None:
    ids = np.array(["a\udcffb", "\udcc3\udca9", "plain", "other"])
    labels = np.array(["x\udcff", "y", "y", "y"])
    np.savez("odd.npz", **{**points(4, 6), "labels": labels}, ids=ids)
    assert opened("odd.npz").classes.tolist() == ["x\\xff", "y", "y", "y"]
    wanted = ["a\\xffb", "é", "plain", "other"]
    run(*SCORE, "odd.npz", "--out", "scores.csv")
    assert [row["id"] for row in read("scores.csv")] == wanted
    # The name of the result, which stdout may not be able to show.
    search = ("search", "posterior", "--gallery", "odd.npz", "--queries", "new.npz", "-k", 1)
    for command in ((*SCORE, "odd.npz"), search):
        assert "a\\xff.csv" in run(*command, "--out", "a\udcff.csv").stdout
    parquet = pytest.importorskip("pyarrow.parquet")
    run("search", "posterior", "--gallery", "odd.npz", "--queries", "odd.npz", "-k", 1, "--out", "hits.parquet")
    assert parquet.read_table("hits.parquet")["query"].to_pylist() == wanted


def test_classes_by_name_are_the_same_in_two_sources(place: Path) -> None:
    for name, labels in (("a", ["x", "z"]), ("b", ["z", "y"])):
        np.savez(f"{name}.npz", features=np.ones((2, 12)), labels=np.array(labels))
    (one, other), _ = shared_labels(opened("a.npz"), opened("b.npz"))
    assert one[1] == other[0]
    assert len({*one.tolist(), *other.tolist()}) == 3
    assert points(3, 0)["labels"].dtype.kind == "i"


def test_numbers_of_a_csv_and_of_other_sources(place: Path) -> None:
    Path("a.csv").write_text("text,label\nred,3\nblue,10\n")
    Path("b.jsonl").write_text('{"text": "pear", "label": 10}\n{"text": "bus", "label": 2}\n')
    (one, other), names = shared_labels(opened("a.csv"), opened("b.jsonl"))
    assert names == ["10", "2", "3"]
    assert one[1] == other[0]
    assert len({*one.tolist(), *other.tolist()}) == 3


def test_columns_that_no_source_has(run: Run) -> None:
    for option in ("--id-column", "--text-column", "--label-column"):
        for command in (
            (*SCORE, "new.npz", "--out", "scores.csv"),
            ("fit", "train.npz", "--out", "p", "--calibrate", "validation.npz"),
            ("search", "posterior", "--gallery", "train.npz", "--queries", "new.npz", "--out", "scores.csv"),
            ("evaluate", "posterior", "--test", "new.npz", "--out", "report"),
        ):
            assert option in error_of(run(*command, option, "text", code=2))
    Path("a.csv").write_text("text,label\nred,fruit\n")
    error = error_of(run(*SCORE, "a.csv", "--out", "scores.csv", "--label-column", "labels", code=2))
    assert "--label-column" in error
    assert "'labels'" in error
    # One table with classes is enough: queries need none.
    Path("b.csv").write_text("text,kind\nred,fruit\n")
    search = ("search", "posterior", "--gallery", "b.csv", "--queries", "a.csv", "--out", "scores.csv")
    assert "--label-column" not in error_of(run(*search, "--label-column", "kind", code=2))

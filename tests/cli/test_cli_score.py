"""``score``: the library's numbers in a file that is whole or not there, in batches of any size."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import DIM, Run, error_of, points
from tables import each

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.io.pretrained import read_info


def read(name: str) -> list[dict[str, str]]:
    with open(name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=np.float64)


def predicted() -> cc.EmbeddingDistribution:
    return open_posterior(Path("posterior"))[0](torch.from_numpy(np.load("new.npz")["features"]))


def test_numbers_of_the_library(run: Run) -> None:
    line = run("score", "posterior", "new.npz", "--out", "scores.csv", "--alpha", 0.05).stdout
    rows, wanted = read("scores.csv"), predicted()
    assert [row["id"] for row in rows] == [f"new {k}" for k in range(40)]
    mu = np.stack([column(rows, f"mu_{axis}") for axis in range(DIM)], 1)
    # What is written gives the float32 back exactly; novelty and p_value are float64.
    np.testing.assert_array_equal(mu.astype(np.float32), wanted.mu.numpy())
    for name in ("kappa", "uncertainty"):
        np.testing.assert_array_equal(column(rows, name).astype(np.float32), getattr(wanted, name).numpy())
    for name in ("novelty", "p_value"):
        np.testing.assert_array_equal(column(rows, name), getattr(wanted, name).numpy())
    known = wanted.is_known(0.05)
    assert [row["known"] for row in rows] == ["true" if each else "false" for each in known.tolist()]
    assert 0 < int((~known).sum()) < 40
    assert f"{int((~known).sum())} of them unknown" in line


def test_parquet_has_the_same_and_types_in_batches_of_any_size(run: Run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run("score", "posterior", "new.npz", "--out", "scores.parquet", "--no-mu", "--batch-size", 16)
    run("score", "posterior", "new.npz", "--out", "scores.csv", "--no-mu")
    table = parquet.read_table("scores.parquet")
    assert [str(field.type) for field in table.schema] == ["string", "float", "float", "double", "double", "bool"]
    rows = read("scores.csv")
    assert table.column_names == list(rows[0])
    for name in ("kappa", "novelty"):
        # Batches change nothing but rounding.
        np.testing.assert_allclose(table[name].to_numpy(), column(rows, name), rtol=1e-5)


def test_without_a_calibration_the_columns_that_need_it_are_left_out(run: Run) -> None:
    run("fit", "train.npz", "--out", "plain")
    result = run("score", "plain", "new.npz", "--out", "scores.csv", "--json")
    found = json.loads(result.stdout)
    assert list(read("scores.csv")[0])[-2:] == ["kappa", "uncertainty"]
    assert not found["calibrated"]
    assert any("contrastive-curvature calibrate plain SOURCE" in text for text in found["warnings"])


def test_a_saved_posterior_is_calibrated_for_another_site(run: Run) -> None:
    before, x = open_posterior(Path("posterior"))[0], torch.from_numpy(np.load("new.npz")["features"])
    p = before(x).p_value
    line = run("calibrate", "posterior", "train.npz", "--out", "site", "--score", "uncertainty", "--by-class").stdout
    assert "300 inputs, score uncertainty by class" in line
    before.calibrate([torch.from_numpy(np.load("train.npz")["features"])], score="uncertainty", by_class=True)
    assert torch.equal(open_posterior(Path("site"))[0](x).p_value, before(x).p_value)
    assert "of uncertainty by class, from 300 inputs" in run("info", "site").stdout
    assert torch.equal(open_posterior(Path("posterior"))[0](x).p_value, p), "another folder is as it was"
    run("score", "site", "new.npz", "--out", "scores.csv", "--alpha", 0.1)
    np.testing.assert_array_equal(column(read("scores.csv"), "p_value"), before(x).p_value.numpy())
    about = read_info("posterior").about
    run("calibrate", "posterior", "validation.npz", "--score", "uncertainty")
    assert read_info("posterior").about == about
    assert open_posterior(Path("posterior"))[0].known.calibration.score.name == "uncertainty"
    assert "--overwrite" in error_of(run("calibrate", "posterior", "validation.npz", "--out", "site", code=2))


def test_a_level_below_the_smallest_p_value(run: Run) -> None:
    np.savez("few.npz", **points(30, 5))
    run("fit", "train.npz", "--out", "few", "--calibrate", "few.npz")
    # 1 / 31 is the smallest p-value of 30 inputs.
    for words, got in (((), "got the default 0.01"), (("--alpha", 0.01), "got 0.01")):
        error = error_of(run("score", "few", "new.npz", "--out", "none.csv", *words, code=2))
        assert got in error
        assert "99" in error
    assert not Path("none.csv").exists()
    run("score", "few", "new.npz", "--out", "some.csv", "--alpha", 1 / 31)
    assert list(read("some.csv")[0])[-1] == "known"


def test_a_table_on_stdout_is_that_of_the_file_and_nothing_else(run: Run) -> None:
    run("score", "posterior", "new.npz", "--out", "scores.csv", "--batch-size", 16)
    for words, about in (((), "40 inputs"), (("--json",), '"inputs": 40')):
        result = run("score", "posterior", "new.npz", "--out", "-", "--batch-size", 16, *words)
        assert result.stdout == Path("scores.csv").read_text(encoding="utf-8")
        assert about in result.stderr
    assert not Path("-").exists()


def test_a_row_that_is_not_finite_is_named(run: Run) -> None:
    found = points(5, 6)["features"]
    found[3, 2] = np.nan
    np.savez("nan.npz", features=found)
    assert "row 3" in error_of(run("score", "posterior", "nan.npz", "--out", "scores.csv", code=2))
    assert not Path("scores.csv").exists()


@each(
    "wanted, words",
    [
        (".csv or .parquet", ("--out", "scores.txt")),
        ("nowhere", ("--out", "nowhere/scores.csv")),
        ("a folder", ("--out", "posterior.csv")),
        ("pip install", ("--out", "scores.parquet")),
        ("'--alpha'", ("--out", "scores.csv", "--alpha", "0")),
        ("'--alpha'", ("--out", "scores.csv", "--alpha", "inf")),
    ],
)
def test_options_that_do_not_fit_are_refused_first(run, monkeypatch, wanted, words) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("posterior.csv").mkdir(exist_ok=True)
    assert wanted in error_of(run("score", "posterior", "new.npz", *words, code=2))

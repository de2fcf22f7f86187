"""The benchmark runs, and its pairwise algorithm is an oracle of the listed pairs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from benchmark_data_files import write_mnist
from benchmark_methods import fit, make_data, make_setting
from torch import nn

import contrastive_curvature as cc
from benchmarks import backends, lam_cost
from benchmarks.curvature import main
from benchmarks.pairwise import pairwise_curvature

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_names_every_benchmark():
    printed = subprocess.run(["make", "-s", "help"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    named = printed.split("benchmarks: ")[1].split()
    scripts = [path.stem for path in PROJECT.glob("benchmarks/*.py") if "\nif __name__ ==" in path.read_text()]
    packages = [path.parent.name for path in PROJECT.glob("benchmarks/*/__main__.py")]
    assert sorted(named) == sorted([*scripts, *packages])
    refused = subprocess.run(["make", "-n", "bench", "BENCH=retrieval"], cwd=PROJECT, capture_output=True, text=True)
    assert "BENCH: expected one of" in refused.stdout


@pytest.mark.parametrize("distance", ["arccos", "euclidean"])
@pytest.mark.parametrize("pd_fix", ["fixed", "positive", "full"])
@pytest.mark.parametrize("entries", [3, 4])
@pytest.mark.parametrize("weight", [0.5, 0.3])
def test_pairwise_is_ggn(distance, pd_fix, entries, weight):
    layer = nn.Linear(5, 3).double()
    x = torch.rand(9, 5, dtype=torch.float64)
    z = layer(x).detach()
    pairs = tuple(torch.randint(0, 9, (60,)) for _ in range(entries))  # more than there are pairs: some repeat
    u = z / z.norm(dim=1, keepdim=True)
    anchors = pairs[0] if entries == 3 else pairs[2]
    margin = float((u[anchors] - u[pairs[-1]]).norm(dim=1).median()) + 1e-6
    kind = {"distance": distance, "pd_fix": pd_fix, "margin": margin, "negative_weight": weight}
    got = cc.ggn(layer, x, pairs=pairs, normalization="sum", subset_of_weights="last_layer", clamp=False, **kind)
    for options in ({}, {"chunk": 7}, {"folded": True}):
        wanted = pairwise_curvature(x, z, pairs, **kind, **options)
        assert (got - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_quick_benchmark(tmp_path, capsys):
    main(["--quick", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "curvature.json").read_text())
    assert {case["case"] for case in results["cases"]} == {"pairwise", "wide", "dataset"}
    assert all(case["error"]["float64"] < 1e-10 for case in results["cases"] if "error" in case)
    assert (tmp_path / "curvature.md").read_text() in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_quick_backends_benchmark(tmp_path, capsys):
    backends.main(["--quick", "--out", str(tmp_path)])
    cases = json.loads((tmp_path / "backends.json").read_text())["cases"]
    assert {case["backend"] for case in cases} == set(backends.HOSTS)
    measured = [case for case in cases if "ratio" in case["psd"]]
    assert {(case["backend"], case["structure"]) for case in measured} >= {
        ("ContrastiveGGN", "diag"),
        ("ContrastiveGGN", "full"),
        ("BackPackContrastiveGGN", "kron"),
        ("CurvlinopsContrastiveGGN", "kron"),
    }
    assert all("seconds" in case[fix] for case in cases for fix in backends.FIXES)
    assert (tmp_path / "backends.md").read_text() in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::contrastive_curvature.progress.LongRunWarning")  # on a busy machine
def test_lam_cost(tmp_path, capsys):
    for name in ("FashionMNIST", "MNIST"):
        write_mnist(tmp_path, name, {"train": 60, "t10k": 20})
    sizes = ["--train-size", "60", "--test-size", "20", "--epochs", "1", "--rounds", "1", "--n-samples", "1000"]
    lam_cost.main(["--data-root", str(tmp_path), "--dims", "3", *sizes, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "lam_cost.json").read_text())["dims"]["3"]
    assert found["steps"]["deterministic"]["ratio"] == 1
    assert len(found["steps"]) == 11
    assert found["prediction"]["ratio"] > 0
    for part in ("inside", "outside"):
        # Twenty random images after one step all look alike to the encoder, so their order is that of the sampling.
        assert all(-1 <= value <= 1 for value in found["prediction"][part].values())
    assert (tmp_path / "lam_cost.md").read_text() in capsys.readouterr().out


def test_the_uncertainty_of_sampled_networks_is_that_of_the_closed_form(tmp_path):
    data = make_data()
    method = fit("laplace_posthoc", make_setting(), tmp_path, data)
    drawn = lam_cost.sampled_uncertainty(method.posterior, data.test, 3000)
    torch.testing.assert_close(drawn, method.predict(data.test).uncertainty, rtol=0.06, atol=0)

"""The benchmark runs, and its pairwise algorithm is an oracle of the listed pairs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tables import covering
from torch import nn

import contrastive_curvature as cc
from benchmarks import backends, fast_path, match, steps
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


@covering(2, distance=["arccos", "euclidean"], pd_fix=["fixed", "positive", "full"], entries=[3, 4], weight=[0.5, 0.3])
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
    for options in ({}, {"chunk": 7}):
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


@pytest.mark.filterwarnings("ignore")
def test_quick_fast_path_benchmark(tmp_path, capsys):
    fast_path.main(["--quick", "--out", str(tmp_path)])
    cases = json.loads((tmp_path / "fast_path.json").read_text())["cases"]
    assert [case["network"] for case in cases] == ["tiny", "transformer", "resnet", "linear"]
    assert all(("ratio" in case["psd"]) == (case["beside"] is not None) for case in cases)
    assert (tmp_path / "fast_path.md").read_text() in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_quick_match_benchmark(tmp_path, capsys):
    pytest.importorskip("faiss")
    match.main(["--quick", "--out", str(tmp_path)])
    *pairs, search = json.loads((tmp_path / "match.json").read_text())["cases"]
    assert [case["kind"] for case in pairs] == ["diagonal", "axes", "dense"]
    assert search["same"] > 0
    assert (tmp_path / "match.md").read_text() in capsys.readouterr().out


def test_quick_steps_benchmark(tmp_path, capsys):
    steps.main(["--quick", "--out", str(tmp_path)])
    online, *others = json.loads((tmp_path / "steps.json").read_text())["cases"]
    assert online["calls"]["deterministic"]["ratio"] == 1
    assert len(online["calls"]) == 11
    assert {case["kind"] for case in others} == {"layer", "output"}
    assert (tmp_path / "steps.md").read_text() in capsys.readouterr().out

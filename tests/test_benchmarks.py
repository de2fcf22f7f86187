"""The benchmark runs, and its pairwise algorithm is an oracle of the listed pairs."""

import json

import pytest
import torch
from torch import nn

import contrastive_curvature as cc
from benchmarks.curvature import main
from benchmarks.pairwise import pairwise_curvature


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

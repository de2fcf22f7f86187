"""Every script runs in small and writes what it measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tables import covering
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks import (
    all_weights,
    backends,
    curvature,
    drift_delay,
    drift_picture,
    fast_path,
    influence,
    machine,
    output_products,
    products,
    research,
    scale,
    serving,
    steps,
    threshold,
    thresholds,
)
from benchmarks.gpu import fractions, rates
from benchmarks.pairwise import pairwise_curvature
from benchmarks.transfer.feature_file import FeatureFile, Pairs, save_features
from benchmarks.transfer.fitted import DEFAULT, Fitted

WIDTH, DIM = 10, 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "script", [all_weights, curvature, backends, fast_path, output_products, products, steps, serving]
)
def test_a_script_of_cases_runs_in_small(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = script.__name__.split(".")[-1]
    script.main(["--quick", "--out", str(tmp_path)])
    cases = json.loads((tmp_path / f"{name}.json").read_text())["cases"]
    assert (tmp_path / f"{name}.md").read_text() in capsys.readouterr().out
    if script is curvature:
        assert {case["case"] for case in cases} == {"pairwise", "wide", "dataset"}
        assert all(case["error"]["float64"] < 1e-10 for case in cases if "error" in case)
    if script is backends:
        assert {case["backend"] for case in cases} == set(backends.HOSTS)
        assert all("seconds" in case[fix] for case in cases for fix in backends.FIXES)
    if script is fast_path:
        assert all(("ratio" in case["psd"]) == (case["beside"] is not None) for case in cases)
    if script is all_weights:
        assert abs(cases[0]["scatter"] / cases[0]["stated"] - 1) < 0.5
        assert min(cases[0]["memory"].values()) >= 0
    if script is steps:
        assert cases[0]["calls"]["deterministic"]["ratio"] == 1
        assert len(cases[0]["calls"]) == 11
    if script is serving:
        assert max(cases[0]["difference"].values()) < 1e-5


def test_a_case_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    prints = "import json, os, sys\nprint('first')\nprint(json.dumps([sys.argv[1:], os.environ['A']]))"
    (tmp_path / "of_case.py").write_text(prints)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine.run_apart("of_case", {"n": 3}, A="b") == [["--case", '{"n": 3}'], "b"]


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


def test_rates_and_fractions(device: str, tmp_path: Path) -> None:
    rates.main(["--device", device, "--quick", "--out", str(tmp_path)])
    assert len(json.loads((tmp_path / "rates.json").read_text())["kernels"]) == 6
    rows = [{"structure": "diag", "samples": samples, "n": 10, "seconds": 2.0} for samples in (5, None)]
    (tmp_path / "scale.json").write_text(json.dumps({"rows": rows}))
    fractions.main([str(tmp_path)])
    made = json.loads((tmp_path / "fractions.json").read_text())
    # Three products of 10 points with 512 features and 128 dimensions, and the pair sums.
    assert [row["flop"] for row in made["rows"]] == [2 * 10 * (3 * 512 * 128 + m * 257) for m in (5, 10)]
    shares = rates.fractions_of(10.0, 4.0, 8.0, {"float32": 5.0, "bandwidth": 1.0})
    assert (shares["of_flops"], shares["of_bandwidth"], shares["of_floor"]) == (10 / 8 / 5, 4 / 8, 4 / 8)
    layer, x = torch.nn.Linear(3, 5, bias=False, device=device), torch.randn(7, 3, device=device)
    assert machine.count_flop(lambda: layer(x)) == 2 * 7 * 3 * 5


def test_a_fit_of_many_points(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "run_apart", lambda _, case: scale.measure(case))
    monkeypatch.setattr(scale, "CLASSES", 5)
    monkeypatch.setattr(scale, "FEATURES", 64)
    monkeypatch.setattr(scale, "SAMPLES", 100)
    rows = scale.run([300], ["kron"], tmp_path, "cpu")
    assert [(row["samples"], "error" in row) for row in rows] == [(100, True), (None, False)]
    assert 0 < rows[0]["error"] < 0.2
    rows.append({**rows[0], "n": 3000, "seconds": 10 * rows[0]["seconds"]})
    monkeypatch.setattr(scale, "PARTS", 3)
    parts = scale.run_parts(tmp_path, "cpu", most=300)
    assert [row["classes"] for row in parts] == [5, 100]
    text = scale.render({"machine": machine.describe("cpu"), "rows": rows, "parts": parts})
    assert "to the power 1.00" in text


def make_content(*, calibration: bool = False, seed: int = 0) -> FeatureFile:
    g = np.random.default_rng(seed)
    centres = 2 * g.normal(size=(8, WIDTH))

    def draw(n: int) -> tuple[NDArray[Any], NDArray[Any]]:
        labels = np.arange(n) % 8
        size = np.exp(0.8 * g.normal(size=(n, 1)))
        return (centres[labels] + size * g.normal(size=(n, WIDTH))).astype(np.float32), labels

    def noise(*shape: int) -> NDArray[np.float32]:
        return g.normal(size=shape).astype(np.float32)

    (train, train_labels), (test, test_labels) = draw(240), draw(480)
    rows = g.permutation(480)[:48]
    content = FeatureFile(
        train,
        train_labels,
        test,
        test_labels,
        noise(DIM, WIDTH),
        np.full(DIM, 0.1, dtype=np.float32),
        unknown={"near": noise(60, WIDTH), "far": 4 * noise(60, WIDTH)},
        corrupted={("noise", k): test[rows] + 2 * k * noise(48, WIDTH) for k in (1, 2)},
        corrupted_rows=rows,
    )
    if not calibration:
        return content
    found, labels = draw(240)
    one = {"near": content.unknown["near"]}
    return replace(content, calibration_features=found, calibration_labels=labels, unknown=one)


def test_shares_flagged_are_alpha_among_known_inputs(tmp_path: Path) -> None:
    content = make_content(calibration=True)
    la = Fitted(content).posterior(DEFAULT)
    x, known = torch.from_numpy(content.test_features), torch.from_numpy(content.calibration_features)
    la.calibrate(DataLoader(TensorDataset(known), batch_size=50))
    embeddings = la(x)
    # The library counts what is equal up to rounding as equal.
    p_values = threshold.p_values(la(known).novelty, embeddings.novelty)
    assert float((p_values - embeddings.p_value).abs().max()) < 2.5 / 241
    save_features(tmp_path / "people.npz", make_content())
    save_features(tmp_path / "text.npz", content)
    here = ["--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    threshold.main(here)
    threshold.main([*here, "--only", "text"])
    encoders = json.loads((tmp_path / "out/threshold.json").read_text(encoding="utf-8"))["encoders"]
    assert set(encoders) == {"people", "text"}
    for name, found in encoders.items():
        for share, alpha, spread in zip(found["split"], threshold.ALPHAS, found["expected_deviation"], strict=True):
            # P-values from 240 inputs are multiples of 1 / 241.
            expected = int(alpha * 241 + 1e-9) / 241
            assert share == pytest.approx(expected, abs=4 * spread / threshold.SPLITS**0.5 + 1e-6)
        assert (found["validation"] is not None) == (name == "text")
        assert found["others"]["noise 2"][2] > 0.2


def test_every_decision_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "SPLITS", 10)
    monkeypatch.setattr(thresholds, "FALSE_MATCH_RATES", (0.02,))
    known = make_content()
    left, right = np.random.default_rng(0).integers(0, 480, (2, 1000))
    left, right = left[left != right], right[left != right]
    pairs = Pairs(left, right, left % 8 == right % 8, np.arange(len(left)) % 10, known.test_features)
    save_features(tmp_path / "people.npz", replace(known, test_labels=known.test_labels + 8, pairs=pairs))
    save_features(tmp_path / "text.npz", known)
    here = ["--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    thresholds.main(here)
    encoders = json.loads((tmp_path / "out/thresholds.json").read_text(encoding="utf-8"))["encoders"]
    assert [one["unseen_classes"] for one in encoders.values()] == [True, False]
    text = {name: found["observed"] for name, found in encoders["text"]["decisions"].items()}
    assert len(text) == 11
    assert len(encoders["people"]["decisions"]) == 14
    for score in ("novelty", "uncertainty", "distance"):
        assert text[f"known flagged, {score}"] == pytest.approx(0.05, rel=0.3)
    assert text["worst class, by class"] < text["worst class"]
    assert text["FMR 0.02, cosine"] == pytest.approx(0.02, rel=0.3)
    for unseen in (False, True):
        encoder = thresholds.Encoder(replace(known, test_labels=known.test_labels + 8 * unseen))
        first, second = next(encoder.halves(np.arange(480)))
        assert len(first) == len(second) == 240
        assert bool(set(encoder.labels[first]) & set(encoder.labels[second])) is not unseen


def test_the_delay_of_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIMULATED", "STREAMS"):
        monkeypatch.setattr(drift_delay, name, 5)
    monkeypatch.setattr(drift_delay, "BEFORE", (0,))
    save_features(tmp_path / "text.npz", make_content())
    drift_delay.main(["--cache", str(tmp_path), "--only", "text", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "drift_delay.json").read_text(encoding="utf-8"))
    assert found["simulated"][-1]["delays"][0] <= found["simulated"][0]["delays"][0]
    assert set(found["encoders"]["text"]) == {"noise 1", "noise 2"}


def test_the_picture_of_drift_is_of_the_page(tmp_path: Path) -> None:
    drift_picture.main(["--out", str(tmp_path / "drift.png")])
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore")
def test_research_is_measured_and_drawn_in_small(tmp_path: Path) -> None:
    research.main(["--quick", "--out", str(tmp_path), "--picture", str(tmp_path / "research.png")])
    cases = json.loads((tmp_path / "research.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 6
    assert all(case["ours"] > 0 and case["autograd"] > 0 for case in cases)
    assert (tmp_path / "research.png").read_bytes().startswith(b"\x89PNG")


def test_influence_adds_a_column_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"POINTS": 40, "FEATURES": 6, "DIM": 4, "RETRAININGS": 5, "SPARE": 2, "LEFT_OUT": 3, "QUERIES": 10}
    for name, number in small.items():
        monkeypatch.setattr(influence, name, number)
    try:
        for kind in ("soft", "contrastive"):
            influence.main(["digits", kind, "--out", str(tmp_path)])
    finally:
        torch.set_default_dtype(torch.float32)
    columns = json.loads((tmp_path / "influence.json").read_text())["columns"]
    assert set(columns) == {"digits, soft", "digits, contrastive"}
    for column in columns.values():
        assert column["rows"]["all terms, exact Hessian"][0] > 0.8
        assert max(column["newton"]) < 1

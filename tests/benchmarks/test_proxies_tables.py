"""``benchmarks.proxies``: its diversities against loops, its figures against the method's, its tables."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from benchmark_methods import make_data, make_setting
from torch import Tensor

from benchmarks import proxies
from benchmarks.experiments import figures
from benchmarks.experiments.data.split import RetrievalData
from benchmarks.experiments.methods.proxies import Proxies
from benchmarks.experiments.methods.proxy_step import DISTANCES
from contrastive_curvature.errors import InputError


def sphere(rows: int, dim: int, seed: int) -> Tensor:
    points = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(points, dim=1)


def test_cluster_diversity_is_that_of_a_loop() -> None:
    u = sphere(20, 4, 0)
    labels = torch.tensor([3] * 8 + [-1] * 9 + [5] * 2 + [6])
    variances = []
    for label in (3, -1):
        members = [row for row, one in enumerate(labels.tolist()) if one == label]
        distances = [float((u[a] - u[b]).norm()) for a, b in combinations(members, 2)]
        mean = sum(distances) / len(distances)
        variances.append(sum((d - mean) ** 2 for d in distances) / len(distances))
    assert figures.cluster_diversity(u, labels) == pytest.approx(sum(variances) / 2, rel=1e-5)


def test_cluster_diversity_of_an_equilateral_class_is_zero() -> None:
    corners = torch.eye(5)
    assert figures.cluster_diversity(corners, torch.zeros(5, dtype=torch.long)) == pytest.approx(0, abs=1e-12)


def test_spectral_decay_by_hand() -> None:
    """Rows of a scaled identity have the scales as singular values."""
    values = torch.tensor([4.0, 1.0, 3.0])
    matrix = torch.cat([torch.diag(values), torch.zeros(2, 3)])
    wanted = sum(math.log((1 / 3) / (v / 8)) / 3 for v in values.tolist())
    assert figures.spectral_decay(matrix) == pytest.approx(wanted)
    assert figures.feature_diversity(matrix) == pytest.approx((4 * 1 * 3) ** (1 / 3) / (8 / 3))
    assert figures.spectral_decay(torch.cat([torch.eye(4), -torch.eye(4)])) == pytest.approx(0, abs=1e-12)
    line = sphere(9, 1, 0) * torch.tensor([[1.0, 0.0]])
    assert figures.spectral_decay(line) == math.inf
    assert figures.feature_diversity(line) == 0


def test_diversities_refuse_what_has_none() -> None:
    with pytest.raises(InputError, match="labels: expected a class of 3 images or more"):
        figures.cluster_diversity(sphere(4, 3, 0), torch.tensor([0, 0, 1, 1]))
    with pytest.raises(InputError, match=r"u and labels: expected shapes \(N, D\) and \(N,\)"):
        figures.cluster_diversity(sphere(4, 3, 0), torch.zeros(5))
    with pytest.raises(InputError, match=r"u: expected shape \(N, D\) with N >= D"):
        figures.spectral_decay(sphere(3, 4, 0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Proxies, RetrievalData]:
    data, method = make_data(), Proxies(make_setting(), "el_vmf")
    method.fit(data, 0, tmp_path_factory.mktemp("fit"))
    return method, data


def test_figures_are_those_of_a_loop(trained: tuple[Proxies, RetrievalData]) -> None:
    method, data = trained
    found, z = proxies.measure(method, data), method.outputs(data.test)
    u = torch.nn.functional.normalize(z, dim=1)
    labels = data.test.targets
    for name, distances in (("cosine", -u @ u.T), ("euclidean", torch.cdist(z, z))):
        nearest = distances.fill_diagonal_(math.inf).argmin(1)
        assert found[f"recall_{name}"] == pytest.approx(float((labels[nearest] == labels).float().mean()))
    inside = method.predict(data.train).mean
    assert found["cluster_diversity"] == pytest.approx(figures.cluster_diversity(inside, data.train.targets))
    assert found["feature_diversity"] == pytest.approx(math.exp(-found["spectral_decay"]))
    assert found["kappa_low"] < found["kappa"] < found["kappa_high"]
    assert found["kappa"] == pytest.approx(float(z.norm(dim=1).median()), rel=0.05)
    assert found["temperature"] == pytest.approx(method.proxies["log_temperature"].exp().item())


def test_diversity_is_of_plain_images(trained: tuple[Proxies, RetrievalData]) -> None:
    method, data = trained
    other = dataclasses.replace(data, train=data.test, train_plain=data.train)
    assert proxies.measure(method, other) == proxies.measure(method, data)


def test_runs_and_writes_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--epochs", "1", "--dim", "3", "--train-size", "60", "--test-size", "40"]
    proxies.main([*small, "--seeds", "0", "1", "--distances", "cosine", "el_nivmf", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "proxies_digits.json").read_text())
    text = (tmp_path / "proxies_digits.md").read_text()
    assert text in capsys.readouterr().out
    assert result["seeds"] == [0, 1]
    assert [len(one) for one in result["distances"].values()] == [2, 2]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| Cos", "| EL-nivMF"))]
    recall = [one["recall_euclidean"] for one in result["distances"]["el_nivmf"]]
    assert rows[1][2].startswith(f"{sum(recall) / 2:.3f} ± ")
    assert rows[1][3:5] == ["63.69 ± 0.56", "76.37 ± 5.32"]
    mean = {name: sum(one["cluster_diversity"] for one in many) / 2 for name, many in result["distances"].items()}
    change = f"{100 * (mean['el_nivmf'] / mean['cosine'] - 1):+.1f} %".replace("-", "−")
    assert rows[3][1:4] == [f"{mean['el_nivmf']:.4f}", change, "+25 % / +31 %"]


def test_every_distance_has_the_documents_figure() -> None:
    assert set(proxies.DOCUMENT_RECALL) == set(DISTANCES)


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path, capsys):
    assert proxies.main(["--data-root", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()

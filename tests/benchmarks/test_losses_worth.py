"""``benchmarks.losses_worth`` on a small made-up feature file: its judge, its tables, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.losses_worth import __main__ as command
from benchmarks.losses_worth import curvatures, votes
from benchmarks.losses_worth import judge as judging
from benchmarks.losses_worth.baselines import FeatureCovariance
from benchmarks.losses_worth.encoder import Encoder, proxies_beside, read_encoder, training_loss, views_beside
from benchmarks.losses_worth.judge import judge
from benchmarks.losses_worth.numbers import family, mean_over_families
from benchmarks.losses_worth.table import markdown
from benchmarks.transfer.feature_file import FeatureFile, save_features
from benchmarks.transfer.fitted import Fitted
from benchmarks.transfer.recipes.two_views import TwoViews
from benchmarks.transfer.train import Training, order_of_epoch, train
from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics import retrieval_votes

CLASSES, WIDTH, DIM = 3, 6, 4
MACHINE = {"cpu": "a processor", "threads": 1, "torch": "2.0"}


def make_content(unknown: bool = True) -> FeatureFile:
    """Three classes, each around a direction of its own; unknown inputs are far out in another one."""
    rng = np.random.default_rng(0)
    centres = 3 * np.eye(WIDTH)[:CLASSES]

    def draw(count: int) -> tuple[Any, Any]:
        labels = rng.integers(0, CLASSES, count)
        return centres[labels] + rng.normal(size=(count, WIDTH)), labels

    features, labels = draw(80)
    test, test_labels = draw(30)
    other = 6 * np.eye(WIDTH)[-1] + rng.normal(size=(30, WIDTH))
    weight, bias = rng.normal(size=(DIM, WIDTH)), rng.normal(size=DIM)
    return FeatureFile(features, labels, test, test_labels, weight, bias, {"other": other} if unknown else {})


@pytest.fixture(autouse=True)
def few_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "NETWORKS", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cache")
    for loss in ("supcon", "ntxent", "proxies"):
        save_features(made / f"data-4-{loss}.npz", make_content())
    rng = np.random.default_rng(1)
    np.save(views_beside(made / "data-4-ntxent.npz"), rng.normal(size=(2, 140, WIDTH)).astype(np.float16))
    np.save(proxies_beside(made / "data-4-proxies.npz"), rng.normal(size=(CLASSES, DIM)))
    return made


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(votes, "NETWORKS", 4)
        return {name: judge(read_encoder(folder / f"{name}.npz")) for name in ("data-4-supcon", "data-4-ntxent")}


def test_every_loss_is_judged(results: dict[str, Any]) -> None:
    found = results["data-4-supcon"]["curvatures"]["kron_lowrank"]
    expected = {"pair", "infonce/psd_parts", "proxies/psd_parts", "triplet/psd_parts"}
    assert expected | {f"supcon/{fix}" for fix in curvatures.FIXES} == found.keys()
    assert not results["data-4-supcon"]["left_out"]
    for figures in found.values():
        assert all(0 <= figures[score]["auroc"] <= 1 for score in ("novelty", "angle"))
        assert 0 <= figures["ece"] <= 1
        assert figures["ece_best"] <= min(figures["ece"], figures["ece_at_1"])
    assert "full" in results["data-4-supcon"]["curvatures"]


def test_another_curvature_gives_another_temperature(results: dict[str, Any]) -> None:
    found = results["data-4-supcon"]["curvatures"]["diag"]
    assert found["pair"]["temperature"] != found["supcon/psd_parts"]["temperature"]


def test_centres_are_the_same_for_every_curvature(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(la: Any, *_: Any) -> dict[str, Any]:
        seen.append(la.class_centres)
        return {}

    monkeypatch.setattr(judging, "_of_posterior", spy)
    monkeypatch.setattr(judging, "POOLED", 0)
    monkeypatch.setattr(judging, "FEW_WEIGHTS", 0)
    judge(read_encoder(folder / "data-4-proxies.npz"))
    assert len(seen) > 2
    assert all(torch.allclose(centres.sums, seen[0].sums) for centres in seen)


def test_a_fit_has_the_loss_that_was_asked_for(folder: Path) -> None:
    encoder = read_encoder(folder / "data-4-proxies.npz")
    la, seconds = curvatures.fit(encoder, Fitted(encoder.content), "proxies", "diag", "psd")
    assert seconds >= 0
    assert str(la.backend.loss.pd_fix) == "psd"
    assert la.backend.loss.scale == curvatures.SCALE
    assert torch.equal(la.backend.loss.proxies, encoder.proxies)


def test_views_without_labels_have_two_losses(results: dict[str, Any]) -> None:
    found = results["data-4-ntxent"]["curvatures"]["diag"]
    assert found.keys() == {"pair"} | {f"infonce/{fix}" for fix in curvatures.FIXES}


def test_the_tables_hold_the_figures(results: dict[str, Any]) -> None:
    stored = json.loads(json.dumps(results))
    text = markdown(stored, MACHINE)
    own = stored["data-4-supcon"]["curvatures"]["kron_lowrank"]
    gap = own[f"supcon/{curvatures.CHOSEN_FIX}"]["novelty"]["auroc"] - own["pair"]["novelty"]["auroc"]
    assert f"| supcon | 1 | {gap:+.3f} |" in text
    assert all(f"| {fix} | 2 |" in text for fix in curvatures.FIXES)
    assert "nan" not in text


def test_means_count_families_once() -> None:
    values = {"a-3-supcon": 1.0, "a-32-ntxent": 3.0, "faces": 5.0, "b-c-2-triplet-seed1": 6.0}
    assert family("b-c-2-triplet-seed1") == "b-c"
    assert mean_over_families(values) == pytest.approx((2 + 5 + 6) / 3)


@pytest.mark.parametrize("count", [4, 40])
def test_the_regression_without_a_loss_is_its_closed_form(count: int) -> None:
    """With fewer and with more points than features."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, 12, generator=generator, dtype=torch.float64)
    points = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    found = FeatureCovariance(features)
    precision = features.T @ features + found.prior * torch.eye(12, dtype=torch.float64)
    exact = torch.einsum("nf,fg,ng->n", points, precision.inverse(), points)
    torch.testing.assert_close(found(points), exact, rtol=1e-9, atol=0)


def test_votes_are_those_of_the_library() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(3, 50, 4, generator=generator)
    labels = torch.randint(0, 5, (50,), generator=generator)
    found = torch.stack([labels[votes._nearest(sample)] for sample in samples])
    assert torch.equal(found, retrieval_votes(samples, labels))


def test_names_say_the_loss() -> None:
    assert training_loss("cifar10-paper-128-contrastive") == "contrastive"
    assert training_loss("omniglot-64-ntxent-seed2") == "ntxent"
    assert training_loss("faces") == "arcface"
    assert training_loss("my_encoder") is None


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "data-4-ntxent", "data-4-proxies"):
        save_features(tmp_path / f"{name}.npz", make_content())
    with pytest.raises(InputError, match="name"):
        read_encoder(tmp_path / "mine.npz")
    with pytest.raises(InputError, match=r"views\.npy"):
        read_encoder(tmp_path / "data-4-ntxent.npz")
    with pytest.raises(InputError, match=r"proxies\.npy"):
        read_encoder(tmp_path / "data-4-proxies.npz")
    np.save(proxies_beside(tmp_path / "data-4-proxies.npz"), np.ones((CLASSES, DIM + 1)))
    with pytest.raises(InputError, match="shape"):
        read_encoder(tmp_path / "data-4-proxies.npz")
    save_features(tmp_path / "data-4-supcon.npz", make_content(unknown=False))
    options = ["--cache", str(tmp_path), "--only", "data-4-supcon", "--out", str(tmp_path / "out")]
    assert command.main(options) == 2
    assert "unknown_NAME" in capsys.readouterr().err


def test_identities_of_few_images_have_no_proxy(tmp_path: Path) -> None:
    content = make_content()
    labels = content.train_labels.copy()
    labels[:2] = 7
    parts = {name: getattr(content, name) for name in content.__dataclass_fields__} | {"train_labels": labels}
    save_features(tmp_path / "faces.npz", FeatureFile(**parts))
    encoder: Encoder = read_encoder(tmp_path / "faces.npz")
    assert encoder.proxies.shape == (CLASSES, DIM)
    assert set(encoder.content.train_labels.tolist()) == set(range(CLASSES))
    outputs = torch.from_numpy(encoder.content.outputs(encoder.content.train_features))
    mine = torch.nn.functional.normalize(outputs[encoder.content.train_labels == 1]).sum(0)
    torch.testing.assert_close(encoder.proxies[1], mine, rtol=1e-4, atol=1e-4)


def test_the_command_writes_results(folder: Path, tmp_path: Path) -> None:
    options = ["--cache", str(folder), "--only", "data-4-proxies", "--out", str(tmp_path)]
    assert command.main(options) == 0
    stored = json.loads((tmp_path / "losses_worth.json").read_text(encoding="utf-8"))
    assert stored["encoders"].keys() == {"data-4-proxies"}
    assert "pd_fix" in (tmp_path / "losses_worth.md").read_text(encoding="utf-8")


def test_views_are_crops_in_the_range_of_pixels() -> None:
    images = np.full((5, 12, 12, 1), 200, np.uint8)
    rows = torch.tensor([0, 3, 4])
    drawn = TwoViews(images, 0, mirrored=True)(rows)
    assert drawn.shape == (6, 1, 12, 12)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1
    # Two views of one image differ, and another object with this seed draws the same.
    assert not torch.equal(drawn[:3], drawn[3:])
    assert torch.equal(drawn, TwoViews(images, 0, mirrored=True)(rows))


def test_training_learns_the_weights_of_classes_and_repeats_labels_for_views() -> None:
    seen = []

    class Spy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proxies = torch.nn.Parameter(torch.eye(2))

        def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.append(y)
            return torch.nn.functional.cross_entropy(z @ self.proxies.T, y % 2)

    network, loss = torch.nn.Linear(3, 2), Spy()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    history = train(network, lambda rows: x[rows].repeat(2, 1), torch.arange(16), loss, Training(2, batch=8), 0)
    assert all(torch.equal(*y.chunk(2)) for y in seen)
    assert not torch.equal(loss.proxies, torch.eye(2))
    assert len(history) == 2
    assert all(math.isfinite(value) for value in history)


def test_an_epoch_holds_inputs_of_one_class_together() -> None:
    labels = torch.arange(5).repeat_interleave(6)
    rows = order_of_epoch(labels, 4, torch.Generator().manual_seed(0))
    assert len(rows) == len(rows.unique()) == 20
    assert bool((labels[rows].view(-1, 4).diff(dim=1) == 0).all())

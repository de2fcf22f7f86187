"""``benchmarks.transfer.choose``: the compact numbers against the library, rules and choices against loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.transfer import compact as compact_module
from benchmarks.transfer.choose import main
from benchmarks.transfer.compact import Compact, compact_of
from benchmarks.transfer.feature_file import FeatureFile, save_features
from benchmarks.transfer.fitted import Fitted, default_structure
from benchmarks.transfer.gaps import Question
from benchmarks.transfer.judge import judge
from benchmarks.transfer.leave_out import Figures, auroc, choose, family, mean_gap, references
from benchmarks.transfer.results import VERSION, write_result
from benchmarks.transfer.rows import all_rows
from benchmarks.transfer.rules import LIBRARY_KNOWN, LIBRARY_MATCH, Encoder, density_rules, known_rules, match_rules
from contrastive_curvature import metrics
from tests.benchmarks.test_transfer_judge import make_content

NAMES = ("faces", "data-trunk-4-supcon")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two feature files with the judge's results."""
    folder = tmp_path_factory.mktemp("cache")
    rows = [row for row in all_rows() if row.name.startswith(default_structure()) or row.name in ("norm", "vmf")]
    for seed, name in enumerate(NAMES):
        content = make_content(width=20, seed=seed)
        save_features(folder / f"{name}.npz", content)
        heading = {"name": name, "title": name.title(), "version": VERSION, "key": ""}
        write_result(folder / "results" / "transfer" / f"{name}.json", {**heading, **judge(content, rows).figures})
    return folder


@pytest.fixture(scope="module")
def numbers(cache: Path) -> Compact:
    return compact_of(cache / "faces.npz", cache / "faces")


def fitted(content: FeatureFile, **options: Any) -> Any:
    la: Any = Laplace(Fitted(content).encoder, likelihood="contrastive", **options)
    data = TensorDataset(torch.tensor(content.train_features), torch.tensor(content.train_labels))
    la.fit(DataLoader(data, batch_size=50))
    return la


def test_compact_numbers_are_those_of_the_library(numbers: Compact) -> None:
    content = make_content(width=20)
    assert set(numbers) == {"train", "test", "unknown_far", "unknown_near", "harmed_noise"}
    features = torch.tensor(content.harmed["noise", 5])
    wanted = {f"V {strength:g}": (strength, {}) for strength in (0.01, 0.1, 1.0)}
    for name, (strength, options) in {**wanted, "V rank 16": (0.1, {"backend_kwargs": {"rank": 16}})}.items():
        la = fitted(content, **options)
        la.optimize_prior_precision(strength=strength)
        covariance, mean = la(features).covariance.double(), la(features).mean.double()
        u = mean / mean.norm(dim=1, keepdim=True)
        radial = torch.einsum("bd,bde,be->b", u, covariance, u)
        expected = covariance.diagonal(dim1=1, dim2=2).sum(1) - radial
        np.testing.assert_allclose(numbers["harmed_noise"][name], expected.numpy(), rtol=1e-4)
    np.testing.assert_allclose(numbers["harmed_noise"]["phi"], np.linalg.norm(content.harmed["noise", 5], axis=1))
    outputs = content.outputs(content.test_features)
    np.testing.assert_allclose(numbers["test"]["n"], np.linalg.norm(outputs, axis=1), rtol=1e-5)
    assert set(np.unique(numbers["test"]["right"])) <= {0.0, 1.0}


def test_compact_numbers_are_kept_until_the_feature_file_changes(
    cache: Path, numbers: Compact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(compact_module, "compact", lambda _: made.append(1) or numbers)
    found = compact_of(cache / "faces.npz", cache / "faces")
    assert made == []
    np.testing.assert_array_equal(found["unknown_far"]["V 0.1"], numbers["unknown_far"]["V 0.1"])
    compact_of(cache / "data-trunk-4-supcon.npz", tmp_path)
    save_features(cache / "third.npz", make_content(seed=7))
    compact_of(cache / "third.npz", tmp_path)
    (cache / "third.npz").unlink()
    assert made == [1, 1]


def test_the_librarys_rules_are_the_librarys_scores(numbers: Compact) -> None:
    content = make_content(width=20)
    la = fitted(content)
    la.optimize_prior_precision()
    encoder = Encoder("faces", numbers)
    out = la(torch.tensor(content.test_features))
    for made in (match_rules, known_rules):
        assert len({rule.name for rule in made()}) == len(list(made()))
    rules = {rule.name: rule for rule in (*match_rules(), *known_rules())}
    order = out.uncertainty.argsort().numpy()
    assert (np.diff(rules[LIBRARY_MATCH].score(encoder)("test")[order]) > -1e-4).all()
    novelty = rules[LIBRARY_KNOWN].score(encoder)("test")
    np.testing.assert_allclose(novelty, out.novelty.numpy(), atol=1e-3)


def test_rules_by_hand(numbers: Compact) -> None:
    encoder = Encoder("faces", numbers)
    rules = {rule.name: rule for rule in (*match_rules(), *known_rules(), *density_rules())}
    one = numbers["unknown_far"]
    added = rules["(3 median V + V)/n^2, strength 1"].score(encoder)("unknown_far")
    np.testing.assert_allclose(added, (3 * np.median(numbers["train"]["V 1"]) + one["V 1"]) / one["n"] ** 2)
    powers = rules["V/n^4, strength 0.01"].score(encoder)("unknown_far")
    np.testing.assert_allclose(np.exp(powers), one["V 0.01"] / one["n"] ** 4)

    def standardised(of: Any) -> np.ndarray:
        train = np.sort(np.log(of(numbers["train"])))
        # The lower median, as torch has it.
        middle = train[(len(train) - 1) // 2]
        scale = 1.4826 * np.sort(np.abs(train - middle))[(len(train) - 1) // 2]
        return np.asarray((np.log(of(one)) - middle) / scale)

    z = np.stack([standardised(lambda s: s["V 0.1"] / (s["n"] * s["phi"])), standardised(lambda s: 1 / s["n"])], axis=1)
    by_hand = {
        "max": z.max(1),
        "soft max": np.log(np.exp(2 * z).sum(1)) / 2,
        "sum": z.sum(1),
        "squares": (np.maximum(z, 0) ** 2).sum(1) + 1e-3 * z.sum(1),
    }
    for how, expected in by_hand.items():
        found = rules[f"{how} of V/(n |phi|), 1/n, strength 0.1"].score(encoder)("unknown_far")
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    logs = {k: np.log(np.stack([v["V 0.1"], v["n"], v["phi"]], axis=1)) for k, v in numbers.items()}
    left = logs["unknown_far"] - logs["train"].mean(0)
    expected = (left @ np.linalg.inv(np.cov(logs["train"].T, ddof=0)) * left).sum(1)
    name = next(name for name in rules if name.startswith("Mahalanobis"))
    np.testing.assert_allclose(rules[name].score(encoder)("unknown_far"), expected, rtol=1e-6)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_auroc_with_ties(known: list[int], unknown: list[int]) -> None:
    a, b = np.sort(np.array(known, float)), np.array(unknown, float)
    expected = roc_auc_score(np.r_[np.zeros(len(a)), np.ones(len(b))], np.r_[a, b])
    assert auroc(a, b) == pytest.approx(expected)
    assert auroc(a, b) == pytest.approx(metrics.auroc(torch.tensor(a), torch.tensor(b)))


def test_references_are_the_best_gallery_free_figures_that_count() -> None:
    needs = {"a": "nothing", "b": "classes", "c": "gallery"}
    asked = [
        Question("one", "match", "", {"a": 0.4, "b": 0.5, "c": 0.9}, needs),
        Question("one", "unknown", "x", {"a": 0.7, "b": 0.8, "c": 0.9}, needs),
        Question("one", "unknown", "seen by nothing", {"a": 0.3, "b": 0.6, "c": 0.9}, needs),
        Question("one", "harm", "blur 5", {"a": 0.9, "b": 0.8}, needs),
    ]
    assert references(asked) == {"one": {"match": 0.5, "unknown_x": 0.8, "harmed_blur": 0.9}}


def test_families_share_data_set_and_trunk() -> None:
    assert family("cifar10-resnet56-128-supcon") == family("cifar10-resnet56-16-triplet-seed3") == "cifar10-resnet56"
    assert len({family(name) for name in ("cifar10-resnet-16-supcon", "cifar10-paper-16-supcon", "faces")}) == 3


def of(figure: float, best: float = 1.0) -> Figures:
    return Figures(figure=figure, gap=best - figure, largest=best - figure)


def test_an_encoder_has_no_say_in_the_rule_that_it_is_judged_by() -> None:
    gaps = {
        # The three of one family agree on a rule that no other family likes.
        "theirs": {**{f"big-{dim}-supcon": of(0.95) for dim in (2, 3, 4)}, "small": of(0.6), "other": of(0.6)},
        "ours": {**{f"big-{dim}-supcon": of(0.7) for dim in (2, 3, 4)}, "small": of(0.8), "other": of(0.7)},
    }
    # Means over encoders: 0.81 and 0.72; over families: 0.717 and 0.733.
    assert mean_gap(gaps["theirs"]) == pytest.approx(1 - (0.95 + 0.6 + 0.6) / 3)
    assert mean_gap(gaps["theirs"], "big") == pytest.approx(0.4)
    found = {choice.encoder: choice for choice in choose(gaps, "ours", "gap")}
    assert {name: choice.rule for name, choice in found.items()} == {
        "big-2-supcon": "ours",
        "big-3-supcon": "ours",
        "big-4-supcon": "ours",
        "small": "theirs",
        "other": "theirs",
    }
    assert found["big-2-supcon"].best_rule == "theirs"
    assert found["small"].figures == pytest.approx({"chosen": 0.6, "library": 0.8, "best": 0.8, "reference": 1.0})


def test_the_command_writes_both_files(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cache", str(cache), "--results", str(cache / "results")]
    assert main(options) == 0
    text = (cache / "results" / "transfer_choice.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    before = ""
    for shown in text.splitlines():
        assert before.count("|") in (0, shown.count("|")) or not shown
        before = shown if shown.startswith("|") else ""
    found = json.loads((cache / "results" / "transfer_choice.json").read_text(encoding="utf-8"))
    assert set(found["match"]["choices"]["gap"]) == set(found["known"]["choices"]["largest"]) == set(NAMES)
    assert LIBRARY_MATCH in found["match"]["rules"]
    assert LIBRARY_KNOWN in found["known"]["rules"]
    judged = json.loads((cache / "results" / "transfer" / "faces.json").read_text(encoding="utf-8"))
    row = judged["rows"][f"{judged['default']}/uncertainty"]
    assert found["match"]["choices"]["gap"]["faces"]["figures"]["library"] == pytest.approx(row["r_auroc"], abs=2e-3)


def test_one_family_is_not_enough(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache", str(cache), "--results", str(tmp_path)]) == 2
    assert "python -m benchmarks.transfer" in capsys.readouterr().err
    folder = tmp_path / "transfer"
    folder.mkdir()
    (folder / "faces.json").write_bytes((cache / "results" / "transfer" / "faces.json").read_bytes())
    assert main(["--cache", str(cache), "--results", str(tmp_path)]) == 2
    assert "two families" in capsys.readouterr().err
    assert not (tmp_path / "transfer_choice.md").exists()

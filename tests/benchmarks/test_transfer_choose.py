"""``benchmarks.transfer.choose``: compact numbers and rules against the library, and what is written."""

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
from benchmarks.transfer.compact import Compact, compact, compact_of
from benchmarks.transfer.feature_file import FeatureFile, save_features
from benchmarks.transfer.fitted import Fitted, default_structure
from benchmarks.transfer.gaps import Question
from benchmarks.transfer.judge import judge
from benchmarks.transfer.quantities import Encoder
from benchmarks.transfer.results import VERSION, write_result
from benchmarks.transfer.rows import all_rows
from benchmarks.transfer.rules import (
    LIBRARY_CLASSES,
    LIBRARY_KNOWN,
    LIBRARY_LOWER,
    LIBRARY_MATCH,
    NO_CLASSES,
    class_rules,
    known_rules,
    match_rules,
)
from benchmarks.transfer.study import auroc, references
from contrastive_curvature import metrics
from contrastive_curvature.fit import class_centres
from contrastive_curvature.laplace.prior import STRENGTH
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
    wanted = {f"V {strength:g}": (strength, {}) for strength in (0.001, 0.01, 0.1, 1.0)}
    for name, (strength, options) in {**wanted, "V rank 16": (STRENGTH, {"backend_kwargs": {"rank": 16}})}.items():
        la = fitted(content, **options)
        la.optimize_prior_precision(strength=strength)
        covariance, mean = la(features).covariance.double(), la(features).raw_mean.double()
        u = mean / mean.norm(dim=1, keepdim=True)
        radial = torch.einsum("bd,bde,be->b", u, covariance, u)
        expected = covariance.diagonal(dim1=1, dim2=2).sum(1) - radial
        np.testing.assert_allclose(numbers["harmed_noise"][name], expected.numpy(), rtol=1e-4)
    np.testing.assert_allclose(numbers["harmed_noise"]["phi"], np.linalg.norm(content.harmed["noise", 5], axis=1))
    outputs = content.outputs(content.test_features)
    np.testing.assert_allclose(numbers["test"]["n"], np.linalg.norm(outputs, axis=1), rtol=1e-5)
    assert set(np.unique(numbers["test"]["right"])) <= {0.0, 1.0}
    labels, units = content.train_labels, unit_vectors(content.outputs(content.train_features))
    centres = unit_vectors(np.stack([units[labels == label].sum(0) for label in np.unique(labels)]))
    for name, points in (("test", content.test_features), ("unknown_far", content.unknown["far"])):
        distances = np.linalg.norm(unit_vectors(content.outputs(points))[:, None] - centres, axis=2)
        distances.sort(axis=1)
        np.testing.assert_allclose(numbers[name]["ratio"], distances[:, 0] / distances[:, 1], rtol=1e-4)


def unit_vectors(v: np.ndarray) -> np.ndarray:
    return np.asarray(v / np.linalg.norm(v, axis=1, keepdims=True))


def test_without_class_centres_no_class_part_changes_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_centres, "MOST_NUMBERS", 1)
    numbers = compact(make_content())
    assert all((values["ratio"] == 1).all() for values in numbers.values())
    encoder = Encoder("faces", numbers)
    scores = {name: rule.score(encoder)("test") for name, rule in class_rules().items()}
    for score in scores.values():
        np.testing.assert_array_equal(score.argsort(), scores[NO_CLASSES].argsort())


def test_compact_numbers_are_kept_until_the_feature_file_or_the_strength_changes(
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
    # Other ranks are at the default strength.
    monkeypatch.setattr(compact_module, "STRENGTH", 2 * STRENGTH)
    compact_of(cache / "data-trunk-4-supcon.npz", tmp_path)
    assert made == [1, 1, 1]


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
    same = {name for name, rule in rules.items() if (np.diff(rule.score(encoder)("test")[order]) > -1e-4).all()}
    # No other rule has this order, so that the library cannot have changed unseen.
    assert same == {LIBRARY_MATCH}
    novelty = rules[LIBRARY_KNOWN].score(encoder)("test")
    np.testing.assert_allclose(novelty, out.novelty.numpy(), atol=1e-3)


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
    assert found["match"]["strength"]["library"] == found["known"]["strength"]["library"] == f"{STRENGTH:g}"
    assert found["known"]["lower"]["library"] == LIBRARY_LOWER
    classes, own = found["match"]["classes"], found["match"]["rules"][LIBRARY_MATCH]
    assert classes["library"] == LIBRARY_CLASSES
    for part, rule in ((classes, LIBRARY_CLASSES), (found["match"]["strength"], f"{STRENGTH:g}")):
        assert part["candidates"][rule]["mean"]["gap"] == own["gap"]
    simple = f"V/n^3, strength {STRENGTH:g}"
    assert classes["candidates"][NO_CLASSES]["mean"]["gap"] == found["match"]["rules"][simple]["gap"]
    assert "classes" not in found["known"]
    for part, rule in ((found["known"]["lower"], LIBRARY_LOWER), (found["known"]["strength"], f"{STRENGTH:g}")):
        own = found["known"]["rules"][LIBRARY_KNOWN]
        assert part["candidates"][rule]["mean"]["gap"] == own["gap"]
        assert set(part["choices"]["gap"]["families"]) == {"faces", "data-trunk"}
    assert text.count("### The lower side alone") == text.count("### The class part alone") == 1
    assert text.count("### The strength of the prior alone") == 2
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

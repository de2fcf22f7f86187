"""The judge of ``benchmarks.transfer``: figures against sklearn, scipy and loops; resuming; errors."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.transfer import baselines, figures, gaps, results, run, tables
from benchmarks.transfer.cli import main
from benchmarks.transfer.feature_file import FeatureFile, Pairs, save_features
from benchmarks.transfer.figures import best_threshold
from benchmarks.transfer.fitted import Fitted
from benchmarks.transfer.judge import Judgement, judge
from benchmarks.transfer.recipes.recipe import Recipe
from benchmarks.transfer.rows import ANSWERS, Needs, Row, all_rows
from contrastive_curvature import FeatureNormWarning, metrics
from contrastive_curvature.errors import InputError, UnsupportedError


def make_content(
    n: int = 120, m: int = 60, width: int = 12, dim: int = 4, classes: int = 4, seed: int = 0
) -> FeatureFile:
    g = np.random.default_rng(seed)
    centres = 2 * g.normal(size=(classes, width))
    labels, test_labels = g.integers(0, classes, n), g.integers(0, classes, m)
    test = centres[test_labels] + g.normal(size=(m, width))
    rows = g.permutation(m)[: m // 2]
    return FeatureFile(
        np.maximum(centres[labels] + g.normal(size=(n, width)), 0),
        labels,
        np.maximum(test, 0),
        test_labels,
        g.normal(size=(dim, width)),
        np.full(dim, 0.1),
        unknown={"far": np.abs(3 * g.normal(size=(25, width))), "near": np.abs(g.normal(size=(40, width)))},
        corrupted={("noise", k): np.maximum(test[rows] + k * g.normal(size=(m // 2, width)), 0) for k in range(1, 6)},
        corrupted_rows=rows,
        pairs=Pairs(np.arange(m - 1), np.arange(1, m), test_labels[:-1] == test_labels[1:], np.arange(m - 1) % 5),
    )


@pytest.fixture(scope="module")
def content() -> FeatureFile:
    return make_content()


@pytest.fixture(scope="module")
def judged(content: FeatureFile) -> Judgement:
    return judge(content)


@pytest.fixture
def file(tmp_path: Path, content: FeatureFile) -> Path:
    path = tmp_path / "mine.npz"
    save_features(path, content)
    return path


# Scores


def test_scores_are_those_of_the_library(content: FeatureFile, judged: Judgement) -> None:
    layer = nn.Linear(12, 4)
    layer.load_state_dict({"weight": torch.tensor(content.weight), "bias": torch.tensor(content.bias)})
    data = TensorDataset(torch.tensor(content.train_features), torch.tensor(content.train_labels))
    for structure in ("diag", "kron_lowrank"):
        la: Any = Laplace(layer, likelihood="contrastive", hessian_structure=structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FeatureNormWarning)
            la.fit(DataLoader(data, batch_size=50))
        la.optimize_prior_precision()
        for name, features in (("test", content.test_features), ("unknown_far", content.unknown["far"])):
            out = la(torch.tensor(features))
            expected = {
                "uncertainty": out.uncertainty,
                "novelty": out.novelty,
                "angle": out.tangential_variance,
                "variance": out.tangential_variance * out.raw_mean.norm(dim=1) ** 2,
                "lost_length": out.tangential_variance * out.raw_mean.norm(dim=1) / 2,
            }
            for score, value in expected.items():
                found = judged.scores[f"{structure}/{score}"][name]
                torch.testing.assert_close(found, value.double(), rtol=2e-3, atol=1e-9)
            # The title of the row says so.
            angle = judged.scores[f"{structure}/angle"][name]
            assert torch.equal(angle.argsort(), (1 / out.kappa).argsort())


def test_every_row_scores_every_set(content: FeatureFile, judged: Judgement) -> None:
    sizes = {"test": 60, "unknown_far": 25, "unknown_near": 40, **{f"corrupted_noise_{k}": 30 for k in range(1, 6)}}
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)
    assert set(judged.scores) | set(judged.figures["skipped"]) == set(names)
    assert {"diag/uncertainty", "norm", "vmf", "mahalanobis", "residual", "knn_features", "match", "gated"} <= set(
        judged.scores
    )
    for scores in judged.scores.values():
        assert {name: len(score) for name, score in scores.items()} == sizes
    outputs = torch.tensor(content.outputs(content.test_features))
    torch.testing.assert_close(judged.scores["norm"]["test"], -outputs.norm(dim=1).double(), rtol=1e-5, atol=0)
    assert ANSWERS["gallery"] in names


def test_calibration_inputs_are_scored_and_set_the_gate() -> None:
    content = make_content()
    known = replace(
        content, calibration_features=content.test_features[:20], calibration_labels=content.test_labels[:20]
    )
    both = {"plain": Fitted(content), "calibrated": Fitted(known)}
    row = {row.name: row for row in all_rows()}["gated"]
    scores = {name: row.score(fitted, fitted.test) for name, fitted in both.items()}
    assert not torch.equal(scores["plain"], scores["calibrated"])
    assert len(judge(known, [row]).scores["gated"]["calibration"]) == 20


@pytest.mark.parametrize(
    ("n", "width", "limit"), [(120, 12, 2048), (120, 4, 2048), (40, 60, 2048), (40, 60, 50), (200, 60, 30)]
)
def test_class_gaussians_are_those_of_sklearn(n: int, width: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.covariance import ledoit_wolf

    monkeypatch.setattr(baselines, "_RANK", limit)
    g = torch.Generator().manual_seed(n)
    labels = torch.arange(n) % 4
    labels[-1] = 9  # a class of one, without a spread of its own
    features = torch.randn(n, width, generator=g) * torch.rand(width, generator=g) + labels.unsqueeze(1)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    chosen = order[:limit] if width > limit else torch.arange(n)
    means = torch.stack([features[labels == label].mean(0) for label in labels.unique()])
    own = means[torch.searchsorted(labels.unique(), labels)]
    left = (features - own)[chosen[chosen != n - 1]].double().numpy()
    precision = torch.tensor(np.linalg.inv(ledoit_wolf(left, assume_centered=True)[0]))
    queries = 2 * torch.randn(15, width, generator=g)
    moved = queries.double().unsqueeze(1) - means.double()
    expected = torch.einsum("mcf,fg,mcg->mc", moved, precision, moved).amin(1)
    gaussians = baselines.ClassGaussians(features, labels)
    torch.testing.assert_close(gaussians(queries), expected, rtol=1e-4, atol=1e-4)
    # The covariance of all inputs is the sum of those within and between the classes.
    spread = own.double() - features.double().mean(0)
    whole = torch.linalg.inv(torch.linalg.inv(precision) + spread.T @ spread / n)
    centred = queries.double() - features.double().mean(0)
    expected -= torch.einsum("mf,fg,mg->m", centred, whole, centred)
    torch.testing.assert_close(gaussians.relative(queries), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("n", "width", "limit"), [(90, 12, 2048), (40, 60, 2048), (40, 60, 30)])
def test_residual_is_outside_of_the_principal_space(
    n: int, width: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_RANK", limit)
    g = torch.Generator().manual_seed(n)
    features, queries = (torch.randn(k, width, generator=g) * torch.arange(width) + 3 for k in (n, 7))
    weight, bias = torch.randn(5, width, generator=g), torch.randn(5, generator=g)
    origin, axes = baselines.principal_space(features, weight, bias)
    torch.testing.assert_close(weight @ origin + bias, torch.zeros(5), rtol=0, atol=1e-4)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    left = (features - origin)[order[:limit] if width > limit else order].double()
    vectors = np.linalg.svd(left.numpy())[2]
    expected = np.linalg.norm((queries - origin).double().numpy() @ vectors[min(width // 2, limit) :].T, axis=1)
    np.testing.assert_allclose(baselines.residual(queries, origin, axes).numpy(), expected, rtol=1e-4)


def test_feature_neighbors_are_those_of_sklearn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.neighbors import NearestNeighbors

    g = torch.Generator().manual_seed(1)
    gallery, queries = torch.randn(50, 6, generator=g), torch.randn(20, 6, generator=g)
    gallery[3], queries[2] = 0, 0
    some = np.delete(gallery.numpy(), 3, 0)
    search = NearestNeighbors(n_neighbors=10, metric="cosine", algorithm="brute").fit(some)
    expected = search.kneighbors(queries.numpy())[0].mean(1)
    expected[2] = 1  # sklearn takes a zero vector for at right angles too
    np.testing.assert_allclose(baselines.FeatureNeighbors(gallery)(queries).numpy(), expected, atol=1e-5)
    monkeypatch.setattr(baselines, "_FEATURES", 6 * 20)
    part = baselines.FeatureNeighbors(gallery)
    assert 19 <= len(part.gallery) <= 20
    with pytest.raises(InputError, match="at least 10"):
        baselines.FeatureNeighbors(gallery[:10])


def test_match_distance_leaves_the_query_out() -> None:
    g = torch.Generator().manual_seed(2)
    gallery = torch.randn(12, 3, generator=g)
    gallery[5] = 2 * gallery[4]  # the same direction twice
    u = gallery / gallery.norm(dim=1, keepdim=True)
    distance = (1 - u.double() @ u.double().T).fill_diagonal_(9)
    found = baselines.match_distance(gallery, gallery, torch.arange(12))
    torch.testing.assert_close(found.double(), distance.amin(1), rtol=0, atol=1e-6)
    queries, rows = torch.randn(4, 3, generator=g), torch.tensor([3, 3, 0, 11])
    v = queries / queries.norm(dim=1, keepdim=True)
    distance = 1 - v.double() @ u.double().T
    free = baselines.match_distance(queries, gallery, None)
    torch.testing.assert_close(free.double(), distance.amin(1), rtol=0, atol=1e-6)
    distance[torch.arange(4), rows] = 9
    held = baselines.match_distance(queries, gallery, rows)
    torch.testing.assert_close(held.double(), distance.amin(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("alone", [True, False])
def test_match_votes_are_counted_one_by_one(alone: bool) -> None:
    g = torch.Generator().manual_seed(3)
    gallery, labels = torch.randn(14, 3, generator=g), torch.randint(3, (14,), generator=g)
    u = gallery.double() / gallery.double().norm(dim=1, keepdim=True)
    found = baselines.match_votes(gallery, gallery, labels, None if alone else torch.arange(14))
    for i, cosines in enumerate((u @ u.T).tolist()):
        near = sorted((j for j in range(14) if alone or j != i), key=lambda j, c=cosines: -c[j])[:10]
        assert float(found[i]) == -sum(int(labels[j] == labels[near[0]]) for j in near) / 10
    with pytest.raises(InputError, match="k"):
        baselines.match_votes(gallery, gallery[:9], labels[:9], None)


# Figures


def test_retrieval_is_leave_one_out_among_those_with_a_partner(content: FeatureFile, judged: Judgement) -> None:
    labels = np.array([0, 0, 1, 1, 2])
    outputs = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.1], [-1.0, 0.0]])
    found = figures.retrieve(outputs, torch.tensor(labels))
    torch.testing.assert_close(found.right, torch.tensor([1, 1, 0, 0, torch.nan]).double(), equal_nan=True)
    assert found.map_at_1 == 0.5
    z = content.outputs(content.test_features)
    cosine = (z / np.linalg.norm(z, axis=1, keepdims=True)) @ (z / np.linalg.norm(z, axis=1, keepdims=True)).T
    np.fill_diagonal(cosine, -2)
    right = content.test_labels[cosine.argmax(1)] == content.test_labels
    np.testing.assert_array_equal(judged.retrieval.right.numpy(), right)
    with pytest.raises(InputError, match="test_labels"):
        figures.retrieve(outputs, torch.arange(5))


def test_match_figures_by_hand() -> None:
    from sklearn.metrics import roc_auc_score

    g = torch.Generator().manual_seed(3)
    score, right = torch.rand(50, generator=g), (torch.rand(50, generator=g) > 0.3).double()
    found = figures.match_figures(
        torch.cat([score, torch.tensor([5.0])]), torch.cat([right, torch.tensor([torch.nan])])
    )
    assert found["r_auroc"] == pytest.approx(roc_auc_score(1 - right.numpy(), score.numpy()))
    assert found["ausc"] == pytest.approx(metrics.ausc(score, right))
    certain_first = right[score.argsort()]
    assert found["error_at"] == pytest.approx(
        [1 - float(certain_first[:45].mean()), 1 - float(certain_first[:40].mean())]
    )
    assert figures.match_figures(score, torch.ones(50))["r_auroc"] is None
    assert figures.match_figures(score[:1], torch.ones(1))["error_at"] == [0.0, 0.0]


def test_unknown_and_corruption_figures_are_those_of_sklearn_and_scipy(content: FeatureFile, judged: Judgement) -> None:
    from scipy.stats import spearmanr
    from sklearn.metrics import average_precision_score, roc_auc_score

    for name in ("norm", "mahalanobis", "knn_features"):
        row, scores = judged.figures["rows"][name], judged.scores[name]
        for unknown, size in (("far", 25), ("near", 40)):
            truth = np.r_[np.zeros(60), np.ones(size)]
            both = torch.cat([scores["test"], scores[f"unknown_{unknown}"]]).numpy()
            assert row["unknown"][unknown]["auroc"] == pytest.approx(roc_auc_score(truth, both))
            assert row["unknown"][unknown]["auprc"] == pytest.approx(average_precision_score(truth, both))
        assert content.corrupted_rows is not None
        clean = scores["test"].numpy()[content.corrupted_rows]
        levels = [clean, *(scores[f"corrupted_noise_{level}"].numpy() for level in range(1, 6))]
        expected = spearmanr(np.repeat(np.arange(6), 30), np.concatenate(levels)).statistic
        assert row["corruption"]["noise"]["spearman"] == pytest.approx(expected)
        for level in range(1, 6):
            auroc = roc_auc_score(np.r_[np.zeros(30), np.ones(30)], np.r_[clean, levels[level]])
            assert row["corruption"]["noise"]["auroc"][str(level)] == pytest.approx(auroc)
    assert figures.corruption_figures(torch.ones(4), {1: torch.ones(4)}) == {"spearman": 0.0, "auroc": {"1": 0.5}}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12))
def test_best_threshold_makes_the_fewest_errors(pairs: list[tuple[int, bool]]) -> None:
    cosine = torch.tensor([c / 5 for c, _ in pairs], dtype=torch.float64)
    same = torch.tensor([s for _, s in pairs])

    def errors(threshold: float) -> int:
        return int(((cosine >= threshold) != same).sum())

    least = min(errors(threshold) for threshold in np.linspace(-0.1, 1.1, 13))
    assert errors(best_threshold(cosine, same)) == least


def test_verification_by_hand(content: FeatureFile, judged: Judgement) -> None:
    pairs = content.pairs
    assert pairs is not None
    z = torch.tensor(content.outputs(content.test_features)).double()
    cosine = torch.nn.functional.cosine_similarity(z[pairs.left], z[pairs.right]).numpy()
    right = np.zeros(len(cosine))
    for fold in range(5):
        mine = pairs.fold == fold
        candidates = np.concatenate([[-2], np.sort(cosine[~mine]), [2]])
        middles = (candidates[1:] + candidates[:-1]) / 2
        counts = [((cosine[~mine] >= middle) != pairs.same[~mine]).sum() for middle in middles]
        right[mine] = (cosine[mine] >= middles[int(np.argmin(counts))]) == pairs.same[mine]
    assert judged.verified is not None
    np.testing.assert_array_equal(judged.verified.right.numpy(), right)
    folds = [right[pairs.fold == fold].mean() for fold in range(5)]
    assert judged.figures["pairs"]["accuracy"] == pytest.approx(np.mean(folds))
    norm = judged.scores["norm"]["test"]
    for name, value in (("sum", norm[:-1] + norm[1:]), ("max", torch.maximum(norm[:-1], norm[1:]))):
        torch.testing.assert_close(judged.pairs["norm"][name], value)
        expected = figures.match_figures(value, torch.tensor(right))
        assert judged.figures["rows"]["norm"]["pairs"][name]["ausc"] == pytest.approx(expected["ausc"])


# What is refused


def test_a_row_that_fails_is_left_out_and_none_at_all_is_an_error(content: FeatureFile) -> None:
    def broken(fitted: Fitted, points: Any) -> Tensor:
        return torch.full((len(points),), torch.nan)

    def refused(fitted: Fitted, points: Any) -> Tensor:
        msg = "not for this one"
        raise UnsupportedError(msg)

    bad = [Row("nan", "NaN", Needs.NOTHING, broken), Row("no", "no", Needs.NOTHING, refused)]
    norm = [row for row in all_rows() if row.name == "norm"]
    out = judge(content, [*bad, *norm])
    assert list(out.scores) == ["norm"]
    assert "60 finite scores" in out.figures["skipped"]["nan"]
    assert out.figures["skipped"]["no"] == "not for this one"
    with pytest.raises(InputError, match="not for this one"):
        judge(content, bad)


# Files, and resuming


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in all_rows() if row.name in ("norm", "diag/uncertainty", "match")]
    made: list[str] = []
    judged: list[list[str]] = []

    def make(name: str, _root: Path, _folder: Path, seed: int) -> FeatureFile:
        if name == "missing":
            raise FileNotFoundError("no such data")
        made.append(f"{name}{seed}")
        return make_content(n=40, m=20, seed=seed)

    def count(content: FeatureFile, wanted: list[Row] | None) -> Judgement:
        judged.append([row.name for row in wanted or rows])
        return judge(content, wanted or rows)

    recipes = {name: Recipe(name, name.title(), partial(make, name)) for name in ("one", "two", "missing")}
    monkeypatch.setattr(run, "judge", count)
    monkeypatch.setattr(run, "draw_all", lambda *_: [])
    for module in (run, results):
        monkeypatch.setattr(module, "all_rows", lambda: list(rows))
    monkeypatch.setattr("benchmarks.transfer.recipes.RECIPES", recipes)
    options = ["--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "results")]
    for _ in range(2):
        assert main(options) == 0
        assert (made, len(judged)) == (["one0", "two0"], 2)
    assert "missing" not in (tmp_path / "results" / "transfer.md").read_text(encoding="utf-8")
    # Another feature file, a damaged result, and --again: each is judged, and no more.
    save_features(tmp_path / "cache" / "one.npz", make_content(n=40, m=20, seed=5))
    (tmp_path / "results" / "transfer" / "two.json").write_text("{", encoding="utf-8")
    assert main(options) == 0
    assert (made, len(judged)) == (["one0", "two0"], 4)
    assert main([*options, "--again", "--seed", "1", "--only", "one"]) == 0
    assert (made, len(judged)) == (["one0", "two0", "one1"], 5)
    assert main([*options, "--only", "missing"]) == 1
    # A row that is new, under another title or named: it alone is judged, and the others stay as they were.
    path = tmp_path / "results" / "transfer" / "two.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    gone = before["rows"].pop("norm")
    before["rows"]["match"]["title"], before["rows"]["old"] = "another", gone
    before["rows"]["diag/uncertainty"]["ausc"] = 2.0
    path.write_text(json.dumps(before), encoding="utf-8")
    only = [*options, "--only", "two"]
    assert main(only) == main([*only, "--again", "norm"]) == main(only) == 0
    assert judged[5:] == [["norm", "match"], ["norm"]]
    after = json.loads(path.read_text(encoding="utf-8"))
    assert list(after["rows"]) == [row.name for row in rows]
    assert (after["rows"]["norm"], after["rows"]["diag/uncertainty"]["ausc"]) == (gone, 2.0)
    assert after["rows"]["match"]["title"] != "another"
    # One that cannot be computed any more leaves with a reason, which holds until it is asked for again.
    rows[-1] = replace(rows[-1], score=lambda *_: torch.zeros(0))
    assert main([*only, "--again", "norm", "match"]) == main(only) == 0
    after = json.loads(path.read_text(encoding="utf-8"))
    assert (list(after["skipped"]), "match" in after["rows"], len(judged)) == (["match"], False, 8)
    with pytest.raises(SystemExit):
        main([*only, "--again", "nothing"])


def test_a_file_of_anybodys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = file.parent / "out"
    assert main(["--features", str(file), "--name", "theirs", "--output", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "minus norm" in shown
    assert (folder / "theirs.md").read_text(encoding="utf-8") in shown
    found = json.loads((folder / "theirs.json").read_text(encoding="utf-8"))
    assert found["sizes"]["unknown_near"] == 40
    assert found == results.read_result(folder / "theirs.json")
    assert found["rows"]["norm"]["unknown"]["far"]["auroc"] == round(
        found["rows"]["norm"]["unknown"]["far"]["auroc"], 4
    )
    drawn = {path.stem for path in (folder / "theirs").glob("*.png")}
    assert drawn == {"corruption", "rejection", "rejection_pairs_sum", "rejection_pairs_max"}
    with np.load(folder / "theirs" / "scores.npz") as scores:
        assert scores["norm:unknown_far"].shape == (25,)


# Tables and plots


def row(needs: Needs, r_auroc: float | None, far: float, blur: float) -> dict[str, Any]:
    return {
        "title": f"a {needs} one",
        "needs": str(needs),
        "r_auroc": r_auroc,
        "ausc": 0.5,
        "error_at": [0.1, 0.1],
        "unknown": {"far": {"auroc": far, "auprc": far}},
        "corruption": {"blur": {"spearman": 0.1, "auroc": {"1": 0.5, "3": 0.55, "5": blur}}},
    }


def result(name: str, rows: dict[str, Any]) -> dict[str, Any]:
    sizes = {"train": 9, "classes": 2, "test": 5, "features": 3, "dim": 2}
    machine = {"cpu": "a processor", "threads": 1, "torch": "2"}
    heading = {"name": name, "title": name.title(), "sizes": sizes, "default": "diag", "map_at_1": 0.5}
    return {
        **heading,
        "skipped": {"kron/angle": "too wide."},
        "warned": {"diag": "norm"},
        "machine": machine,
        "rows": rows,
    }


@pytest.fixture
def two_results() -> list[dict[str, Any]]:
    free, classes, gallery, labels = Needs.NOTHING, Needs.CLASSES, Needs.GALLERY, Needs.LABELS
    first = {
        "diag/uncertainty": row(free, 0.6, 0.9, 0.5),
        "diag/novelty": row(free, 0.55, 0.94, 0.5),
        "vmf": row(classes, 0.7, 0.95, 0.55),
        "match": row(gallery, 0.8, 0.99, 0.9),
        "gated": row(gallery, 0.79, 0.9, 0.9),
        "knn_votes": row(labels, 0.85, 0.5, 0.5),
        "gated_labels": row(labels, 0.84, 0.91, 0.9),
    }
    second = {
        "diag/uncertainty": row(free, None, 0.5, 0.8),
        "diag/novelty": row(free, None, 0.4, 0.79),
        "vmf": row(classes, None, 0.58, 0.7),
    }
    first["gated"]["title"], first["gated_labels"]["title"] = "gated", "gated with labels"
    return [result("first", first), result("second", second)]


def test_gaps_are_to_the_best_gallery_free_row(two_results: list[dict[str, Any]]) -> None:
    asked = [question for one in two_results for question in gaps.questions(one)]
    match = gaps.summarise(asked, "diag/uncertainty", "match")
    assert match is not None
    assert (match.asked, match.where) == (1, "first")
    assert match.worst == pytest.approx(0.1)
    # 0.58 is the best that `second` can do with `far`: nothing to be seen, so it does not count.
    unknown = gaps.summarise(asked, "match", "unknown")
    assert unknown is not None
    assert (unknown.asked, unknown.gap) == (1, pytest.approx(-0.04))
    corruption = gaps.summarise(asked, "vmf", "corruption")
    assert corruption is not None
    assert (corruption.asked, corruption.worst, corruption.where) == (1, pytest.approx(0.1), "second blur 5")
    assert gaps.summarise(asked, "knn_embedding", "match") is None


def test_targets_are_shown_line_by_line(two_results: list[dict[str, Any]]) -> None:
    whole = tables.summary(two_results)
    about = "`uncertainty` | right matches"
    assert f"| {about} | gallery-free | <= 0.01 | 0 of 1 | 0.100 | 0.100 | first |" in whole
    assert f"| {about} | that keeps nothing | <= 0.01 | 1 of 1 | 0.000 | 0.000 | first |" in whole
    assert f"| {about} | that keeps classes | <= 0.01 | 0 of 1 | 0.100 | 0.100 | first |" in whole
    assert f"| {about} | chance | >= 0.5 | 1 of 1 |  |  |  |" in whole
    # 0.8 - 0.79 is a little more than 0.01 in floating point.
    gated, labelled = "| `RetrievalUncertainty`", "| `RetrievalUncertainty` with labels"
    assert f"{gated} | right matches | without gallery labels | <= 0.01 | 1 of 1 | 0.010 | 0.010 | first |" in whole
    assert f"{labelled} | right matches | of all | <= 0.01 | 1 of 1 | 0.010 | 0.010 | first |" in whole
    assert "| `novelty` | unknown inputs | gallery-free | <= 0.02 | 1 of 1 | 0.010 | 0.010 | first far |" in whole
    assert f"{labelled} | unknown inputs | of all | <= 0.01 | 0 of 1 | 0.080 | 0.080 | first far |" in whole
    assert "| `novelty` | corrupted inputs | gallery-free | <= 0.02 | 1 of 1 | 0.010 | 0.010 | second blur 5 |" in whole
    assert "`RetrievalUncertainty` | corrupted inputs" not in whole
    two_results[0]["rows"]["diag/uncertainty"]["r_auroc"] = 0.45
    assert "| >= 0.5 | 0 of 1 |  |  | first (0.450) |" in tables.summary(two_results)

"""The judge of ``benchmarks.transfer``: figures against sklearn, scipy and loops; a file of anybody's."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from tables import covering

from benchmarks.transfer import baselines, figures, results
from benchmarks.transfer.corruption import KINDS, LEVELS, corrupt
from benchmarks.transfer.feature_file import FeatureFile, Pairs, save_features
from benchmarks.transfer.figures import best_threshold
from benchmarks.transfer.judge import Judgement, judge
from benchmarks.transfer.rows import all_rows
from benchmarks.transfer.run import main
from contrastive_curvature import metrics


@pytest.fixture(scope="module")
def content() -> FeatureFile:
    n, m, width, dim, classes = 120, 60, 12, 4, 4
    g = np.random.default_rng(0)
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
def judged(content: FeatureFile) -> Judgement:
    return judge(content)


@pytest.fixture
def file(tmp_path: Path, content: FeatureFile) -> Path:
    path = tmp_path / "mine.npz"
    save_features(path, content)
    return path


def test_every_row_scores_every_set(content: FeatureFile, judged: Judgement) -> None:
    sizes = {"test": 60, "unknown_far": 25, "unknown_near": 40, **{f"corrupted_noise_{k}": 30 for k in range(1, 6)}}
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)
    assert set(judged.scores) | set(judged.figures["skipped"]) == set(names)
    assert {"diag/uncertainty", "norm", "vmf", "mahalanobis", "residual", "knn_features", "match"} <= set(judged.scores)
    for scores in judged.scores.values():
        assert {name: len(score) for name, score in scores.items()} == sizes
    outputs = torch.tensor(content.outputs(content.test_features))
    torch.testing.assert_close(judged.scores["norm"]["test"], -outputs.norm(dim=1).double(), rtol=1e-5, atol=0)


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
def test_residual_is_outside_of_the_principal_space(n, width, limit, monkeypatch) -> None:
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
    z = torch.tensor(content.outputs(content.test_features)).double()
    cosine = torch.nn.functional.cosine_similarity(z[pairs.left], z[pairs.right]).numpy()
    right = np.zeros(len(cosine))
    for fold in range(5):
        mine = pairs.fold == fold
        candidates = np.concatenate([[-2], np.sort(cosine[~mine]), [2]])
        middles = (candidates[1:] + candidates[:-1]) / 2
        counts = [((cosine[~mine] >= middle) != pairs.same[~mine]).sum() for middle in middles]
        right[mine] = (cosine[mine] >= middles[int(np.argmin(counts))]) == pairs.same[mine]
    np.testing.assert_array_equal(judged.verified.right.numpy(), right)
    folds = [right[pairs.fold == fold].mean() for fold in range(5)]
    assert judged.figures["pairs"]["accuracy"] == pytest.approx(np.mean(folds))
    norm = judged.scores["norm"]["test"]
    for name, value in (("sum", norm[:-1] + norm[1:]), ("max", torch.maximum(norm[:-1], norm[1:]))):
        torch.testing.assert_close(judged.pairs["norm"][name], value)
        expected = figures.match_figures(value, torch.tensor(right))
        assert judged.figures["rows"]["norm"]["pairs"][name]["ausc"] == pytest.approx(expected["ausc"])


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


def pictures(shape, seed=0):
    """Blots of several pixels over the whole range of grey."""
    rough = np.random.default_rng(seed).standard_normal(shape)
    smooth = ndimage.gaussian_filter(rough, [0, 2, 2] + [0] * (len(shape) - 3))
    low, high = smooth.min(), smooth.max()
    return np.rint(255 * (smooth - low) / (high - low)).astype(np.uint8)


@covering(1, kind=KINDS, shape=[(60, 28, 28), (40, 24, 40, 3)])
def test_more_corruption_is_further_from_the_image(kind, shape):
    images = pictures(shape)
    far = [np.abs(corrupt(images, kind, level, 3).astype(int) - images).mean() for level in LEVELS]
    assert far[0] > 0
    assert all(less < more for less, more in pairwise(far))

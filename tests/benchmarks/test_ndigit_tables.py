"""The tables on N-digit MNIST: their figures, their options, and a run on digits of a few pixels."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sklearn.metrics import average_precision_score
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from benchmarks.experiments.data.ndigit import compose_ndigit
from benchmarks.experiments.data.split import TensorSplit
from benchmarks.experiments.networks import make_network
from benchmarks.ndigit import ceiling, cli, config, figures, run
from benchmarks.ndigit.cli import main, parse
from benchmarks.ndigit.document import SCORES, TAUS
from benchmarks.ndigit.judge import PARTS
from benchmarks.ndigit.markdown import markdown
from benchmarks.ndigit.rows import ROWS, rows_of
from benchmarks.ndigit.scoring import auroc, draw_pairs, knn_right, knn_right_by_match, tau
from contrastive_curvature.errors import InputError
from contrastive_curvature.hedged import match_probability


def points(n, seed=0, classes=4):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(n) % classes
    return torch.randn(n, 2, generator=generator) + 2 * targets[:, None] * torch.tensor([1.0, -1.0]), targets


class TestPairs:
    @given(classes=st.integers(2, 6), each=st.integers(2, 9), seed=st.integers(0, 99))
    def test_half_match_and_none_is_with_itself(self, classes, each, seed):
        targets = torch.arange(classes).repeat(each)
        i, j = draw_pairs(targets, 60, seed)
        same = targets[i] == targets[j]
        assert same[:30].all()
        assert not same[30:].any()
        assert not (i == j).any()
        again = draw_pairs(targets, 60, seed)
        assert torch.equal(i, again[0])
        assert torch.equal(j, again[1])

    def test_every_partner_is_as_likely(self):
        targets = torch.tensor([0, 0, 0, 1, 1, 2])  # the last one has no partner
        i, j = draw_pairs(targets, 60_000, 0)
        assert not (i[:30_000] == 5).any()
        first = torch.bincount(i[:30_000] * 6 + j[:30_000], minlength=36).view(6, 6)
        # 5 images with partners; of 0, 1, 2 each has two of them, of 3, 4 one.
        wanted = torch.zeros(6, 6).double()
        wanted[:3, :3], wanted[3:5, 3:5] = 1 / 10, 1 / 5
        wanted.fill_diagonal_(0)
        assert torch.allclose(first.double() / 30_000, wanted, atol=0.01)
        apart = torch.bincount(i[30_000:] * 6 + j[30_000:], minlength=36).view(6, 6).double() / 30_000
        others = (targets[:, None] != targets).double()
        assert torch.allclose(apart, others / others.sum(1, keepdim=True) / 6, atol=0.01)

    def test_refused(self):
        with pytest.raises(InputError, match="even number"):
            draw_pairs(torch.arange(4) % 2, 7, 0)


class TestNeighbours:
    def test_the_vote_is_that_of_scikit_learn(self):
        mean, targets = points(80)
        right, distance = knn_right(mean, targets)
        for row in range(80):
            rest = np.arange(80) != row
            judge = KNeighborsClassifier(5).fit(mean[rest].numpy(), targets[rest].numpy())
            far, near = judge.kneighbors(mean[row : row + 1].numpy())
            votes = np.bincount(targets[rest].numpy()[near[0]], minlength=4)
            assert distance[row].item() == pytest.approx(far[0, 0], rel=1e-4)
            if np.sum(votes == votes.max()) == 1:
                assert right[row].item() == (votes.argmax() == targets[row])
            else:
                tied = np.flatnonzero(votes == votes.max())
                first = next(label for label in targets[rest].numpy()[near[0]] if label in tied)
                assert right[row].item() == (first == targets[row])

    def test_an_images_own_twin_is_left_out(self):
        mean, targets = points(80)
        right, distance = knn_right(mean, targets)
        twins, their = knn_right(mean, targets, mean.clone())
        assert torch.equal(right, twins)
        assert torch.allclose(distance, their, atol=1e-6)
        # Far from its own twin, an image loses no neighbour to it.
        moved = mean.clone()
        moved[0] += 100
        assert knn_right(mean, targets, moved)[0].shape == (80,)

    def test_by_match_is_the_loop_over_pairs(self):
        mean, targets = points(30)
        generator = torch.Generator().manual_seed(1)
        draws = [mean[:, None] + 0.5 * torch.randn(30, 4, 2, generator=generator) for _ in range(2)]
        found = knn_right_by_match(*draws, targets, 2.0, 1.0)
        for row in range(30):
            chance = torch.stack([match_probability(draws[0][row], draws[1][k], 2.0, 1.0) for k in range(30)])
            chance[row] = -1
            labels = targets[chance.topk(5).indices].tolist()
            winner = max(labels, key=lambda label: (labels.count(label), -labels.index(label)))
            assert found[row].item() == (winner == targets[row])

    def test_samples_without_spread_vote_as_their_means(self):
        mean, targets = points(60)
        alone = mean[:, None]
        assert torch.equal(knn_right_by_match(alone, alone, targets, 2.0, 1.0), knn_right(mean, targets)[0])


class TestTau:
    def test_is_kendalls_over_bins_with_the_sign_turned(self):
        generator = torch.Generator().manual_seed(0)
        score = torch.rand(400, generator=generator)
        right = torch.rand(400, generator=generator) > score
        bins = right[score.argsort()].double().view(20, 20).mean(1)
        assert tau(score, right) == pytest.approx(-kendalltau(range(20), bins).statistic)
        assert tau(score, right) > 0.5
        assert tau(-score, right) < -0.5

    def test_of_pairs_is_that_of_average_precision(self):
        generator = torch.Generator().manual_seed(0)
        score, same = torch.rand(800, generator=generator), torch.arange(800) % 2 == 0
        match = same + 2 * score * torch.randn(800, generator=generator)
        order = score.argsort().view(20, 40)
        found = [average_precision_score(same[rows], match[rows]) for rows in order]
        assert tau(score, same, match) == pytest.approx(-kendalltau(range(20), found).statistic)
        assert tau(score, same, match) > 0.5

    def test_without_a_value(self):
        assert tau(torch.rand(40), torch.ones(40, dtype=torch.bool)) is None
        assert tau(torch.arange(40.0), torch.arange(40) < 2, torch.rand(40)) is None


def test_auroc_is_one_where_the_score_is_larger():
    assert auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1
    assert auroc(torch.tensor([0.5]), torch.tensor([0.0, 1.0])) == 0.5


def test_the_documents_figures():
    assert SCORES[2, 2]["hedged"] == {"ap": (0.989, 0.907), "knn": (0.879, 0.760)}
    assert TAUS[2, 2]["hedged_mixture"] == {"ap": (0.43, 0.79), "knn": (0.57, 0.43)}
    known = {row.key for row in ROWS}
    for table in (SCORES, TAUS):
        assert set(table) == {(2, 2), (3, 3), (3, 2)}
        for rows in table.values():
            assert set(rows) <= known
            assert all(0 < value < 1 for row in rows.values() for pair in row.values() for value in pair)


def small_mnist(seed, each):
    """Digits of which each has a bright bar at a place of its own, behind noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(10).repeat(each)
    pixels = torch.randint(1, 60, (len(labels), 1, 28, 28), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        pixels[row, 0, 2 * label + 3 : 2 * label + 6, 8:20] = 250
    return TensorSplit(pixels, labels)


@pytest.fixture
def data_root(monkeypatch, tmp_path):
    @dataclasses.dataclass
    class Parts:
        train: TensorSplit
        test: TensorSplit

    monkeypatch.setattr(config, "load_mnist", lambda *_: Parts(small_mnist(0, 8), small_mnist(1, 6)))
    return tmp_path


def options(root: Path, *more: str) -> list[str]:
    given = ["--data-root", str(root), "--out", str(root / "run"), "--iterations", "40", "--batch-size", "16"]
    return [*given, "--train-size", "140", "--test-size", "140", "--pairs", "60", "--quiet", *more]


def test_a_run_writes_tables_and_figures_and_goes_on(data_root, monkeypatch, capsys):
    methods = ("--methods", "point_soft", "hedged_mixture", "laplace_lifted")
    monkeypatch.setattr(figures, "_SHOWN", 3)
    assert main(options(data_root, *methods)) == 0
    text = capsys.readouterr().out
    assert "*0.987*" in text
    folder = data_root / "run"
    results = json.loads((folder / "results.json").read_text())
    cells = {cell["row"]: cell["figures"] for cell in results["cells"]}
    assert list(cells) == list(methods[1:])
    for found in cells.values():
        for part in PARTS:
            assert 0 <= found[part]["ap"] <= 1
            assert 0 <= found[part]["knn"] <= 1
    assert set(cells["hedged_mixture"]["seen_clean"]) >= {"knn_by_match", "ap_of_means"}
    assert set(cells["laplace_lifted"]["detection"]) == {"nearest", "uncertainty", "novelty", "lam_mismatch"}
    assert "knn_clean_gallery" in cells["point_soft"]["seen_corrupt"]
    assert (folder / "results.md").read_text() == markdown(results)
    names = {path.name for path in (folder / "seed0").glob("*.png")}
    assert names == {f"{key}_{what}.png" for key in methods[1:3] for what in ("embeddings", "centroids")}
    # What is finished is neither judged nor drawn again.
    monkeypatch.setattr(run, "judge", lambda *_: pytest.fail("judged again"))
    monkeypatch.setattr(figures, "draw_embeddings", lambda *_: pytest.fail("drawn again"))
    assert main(options(data_root, *methods)) == 0
    assert main(options(data_root, *methods, "--lr", "0.01")) == 2
    assert "lr = 0.003" in capsys.readouterr().err


def test_a_row_is_judged_again_from_its_model(data_root, monkeypatch):
    monkeypatch.setattr(figures, "draw_all", lambda *_: None)
    assert main(options(data_root, "--methods", "point_hard")) == 0
    path = data_root / "run" / "seed0" / "point_hard.json"
    before = json.loads(path.read_text())
    path.unlink()
    assert main(options(data_root, "--methods", "point_hard")) == 0
    after = json.loads(path.read_text())
    assert before["figures"] == after["figures"]
    assert "match" not in after["figures"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--iterations", "100"), "--iterations"),
        (("--batch-size", "18"), "--batch-size"),
        (("--pairs", "41"), "--pairs"),
        (("--lr", "nan"), "--lr"),
        (("--kl-weight", "-1"), "--kl-weight"),
        (("--dim", "1"), "--dim"),
        (("--seeds", "1", "1"), "--seeds"),
        (("--methods", "hedged", "hedged"), "--methods"),
        (("--methods", "triplet"), "--methods"),
        (("--methods", "laplace_lifted"), "point_soft"),
        (("--threads", "0"), "--threads"),
        (("--device", "cuda:99"), "--device"),
        (("--test-size", "139"), "seen_size"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(data_root, capsys, more, named):
    assert main(options(data_root, *more)) == 2
    assert named in capsys.readouterr().err
    assert not (data_root / "run").exists()


def test_a_folder_with_something_else_is_refused(data_root, capsys):
    (data_root / "run").mkdir()
    (data_root / "run" / "letter.txt").write_text("dear")
    assert main(options(data_root)) == 2
    assert "something else" in capsys.readouterr().err


def test_defaults_and_validation_digits(data_root):
    given = parse(["--n", "3"])
    assert (given.dim, given.network, given.out) == (3, "hidden", Path("runs/ndigit-n3-d3"))
    assert config.setting_of(given).network == "ndigit3_hidden"
    assert config.setting_of(dataclasses.replace(given, network="document")).network == "ndigit3"
    assert [row.key for row in rows_of(None)] == [row.key for row in ROWS if row.key != "hedged_mixture4"]
    # Of 80 training digits, the last 30 are held out; no test digit is seen.
    asked = dataclasses.replace(parse(options(data_root)), validate=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_HELD_OUT", 30)
        data = config.read_data(asked)
    assert len(data.train.digits) == 50
    assert torch.equal(data.seen_clean.digits, small_mnist(0, 8).pixels[50:, 0])
    sizes = [len(getattr(data, part)) for part in PARTS]
    assert all(a == b for a, b in pairwise(sizes))


def test_interrupted(data_root, monkeypatch, capsys):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_data", stop)
    assert main(options(data_root)) == 130
    assert "same options" in capsys.readouterr().err


@pytest.mark.parametrize(("n", "features"), [(2, 32 * 4 * 11), (3, 32 * 4 * 18)])
def test_the_networks_are_the_documents(n, features):
    convolutions = (25 + 1) * 16 + (16 * 25 + 1) * 32
    plain, hidden = (make_network(f"ndigit{n}{more}", 2, dropout=0.1) for more in ("", "_hidden"))
    count = [sum(p.numel() for p in network.parameters()) for network in (plain, hidden)]
    assert count == [convolutions + 2 * (features + 1), convolutions + 256 * (features + 1) + 2 * 257]
    for network in (plain, hidden):
        assert isinstance(network.head, nn.Linear)
        assert network(torch.rand(3, 1, 28, 28 * n)).shape == (3, 2)


class TestCeiling:
    DATA = compose_ndigit(small_mnist(0, 8), small_mnist(1, 6), 2, train_size=140, seen_size=210, novel_size=60)

    def test_a_reader_of_single_digits_is_right_about_clean_images(self):
        class Reader(nn.Module):
            """Looks at one pixel of each bar: a digit whose pixel is hidden can be any of ten."""

            def forward(self, x):
                return 50 * x[:, 0, [2 * label + 4 for label in range(10)], 10].round()

        found = ceiling.measure(Reader(), self.DATA)
        assert list(found) == ["0", "0.2", "0.5", "1"]
        assert found["0"] == {"digits": 1.0, "accuracy": 1.0, "ap": 1.0}
        # A third of the places of a patch, on average, hide a pixel in the middle: the rest is told.
        assert found["0.2"]["accuracy"] > found["0.5"]["accuracy"] > found["1"]["accuracy"] > 0.05
        assert found["1"]["ap"] < 1

    def test_the_classifier_learns_its_digits(self):
        network = ceiling.train_classifier(self.DATA, 40, seed=0)
        clean, _, _, hidden = ceiling.measure(network, self.DATA).values()
        assert clean["digits"] > 0.8
        assert clean["digits"] > hidden["digits"] > 0.15

    def test_refused(self, capsys, tmp_path):
        assert ceiling.main(["--iterations", "0"]) == 2
        assert ceiling.main(["--data-root", str(tmp_path)]) == 2
        assert "MNIST" in capsys.readouterr().err

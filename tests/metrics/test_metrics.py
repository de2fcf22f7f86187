"""Neighbours, recall, precision and metrics of one uncertainty per query; votes of sampled networks, calibration."""

import importlib.util
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors
from tables import covering, refused, refuses
from torchmetrics.functional.classification import binary_auroc, binary_average_precision, binary_calibration_error
from torchmetrics.functional.retrieval import retrieval_average_precision

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError

BACKENDS = ["sklearn"] + (["faiss"] if importlib.util.find_spec("faiss") else [])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_neighbors(queries: torch.Tensor, gallery: torch.Tensor | None, k: int) -> torch.Tensor:
    unit = torch.nn.functional.normalize
    similarity = unit(queries.double(), dim=1) @ unit((queries if gallery is None else gallery).double(), dim=1).T
    if gallery is None:
        similarity.fill_diagonal_(-2)
    return similarity.topk(k, dim=1).indices


@covering(2, backend=BACKENDS, dtype=[torch.float16, torch.float32, torch.float64])
def test_neighbors_agree_with_the_full_similarity_matrix(backend: str, dtype: torch.dtype, device: str) -> None:
    # float16 inputs are compared as what they are, so no neighbour changes; gaps between random cosines exceed 1e-6
    queries = torch.randn(60, 5, generator=generator(0)).to(device, dtype)
    gallery = torch.randn(40, 5, generator=generator(1)).to(device, dtype)
    for held in (None, gallery):
        found = metrics.nearest_neighbors(queries, held, k=4, backend=backend)
        assert (found.dtype, found.device) == (torch.int64, queries.device)
        assert torch.equal(found, naive_neighbors(queries, held, 4))


@covering(1, backend=BACKENDS, metric=["cosine", "euclidean"], spread__clusters=[(0.001, 1), (1e-4, 10), (0.0, 10)])
def test_close_points_are_told_apart(backend: str, metric: str, spread: float, clusters: int) -> None:
    """As scikit-learn's brute force in float64 does; float32 inner products lose ``1 - cosine``."""
    g = generator(0)
    points = torch.randn(clusters, 3, generator=g)[torch.arange(3000) % clusters]
    points = points / points.norm(dim=1, keepdim=True) + spread * torch.randn(3000, 3, generator=g)
    queries, gallery = points[:300].double(), points[300:].double()
    if metric == "cosine":
        queries, gallery = (x / x.norm(dim=1, keepdim=True) for x in (queries, gallery))
    brute = NearestNeighbors(n_neighbors=10, algorithm="brute").fit(gallery.numpy())
    truth = torch.from_numpy(brute.kneighbors(queries.numpy(), return_distance=False))
    found = metrics.nearest_neighbors(points[:300], points[300:], k=10, backend=backend, metric=metric)
    apart = [(gallery[rows] - queries[:, None]).norm(dim=2) for rows in (found, truth)]
    # Equal points in any order.
    assert bool(((found == truth) | ((apart[0] - apart[1]).abs() < 1e-9)).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_leave_one_out_with_duplicates(backend: str) -> None:
    points = torch.ones(6, 3).repeat(1, 1)
    points[5] = torch.tensor([1.0, -1.0, 0.0])
    for k in (1, 3, 5):
        found = metrics.nearest_neighbors(points, k=k, backend=backend)
        assert found.shape == (6, k)
        assert not bool((found == torch.arange(6)[:, None]).any())
        assert all(len(set(row)) == k for row in found.tolist())
        if k < 5:
            assert 5 not in found[:5]


def test_backend_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from contrastive_curvature.metrics import neighbors

    assert neighbors._choose_backend("auto", double=True) == "sklearn"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert neighbors._choose_backend("auto", double=False) == "sklearn"
    refused(lambda: neighbors._choose_backend("faiss", double=False), "pip install faiss-cpu", kind=UnsupportedError)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert neighbors._choose_backend("auto", double=False) == "faiss"
    refused(lambda: neighbors._choose_backend("annoy", double=False), "backend")


def test_average_precision_by_hand() -> None:
    relevant = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]).bool()
    ranking = metrics.Ranking(relevant, torch.tensor([5, 5, 5, 1, 4, 0]))
    at_3 = metrics.average_precision_at_k(ranking, 3)
    expected = torch.tensor([(1 + 2 / 3) / 3, (1 / 3) / 3, 1, 1, 0, math.nan], dtype=torch.float64)
    torch.testing.assert_close(at_3, expected, rtol=1e-15, atol=0, equal_nan=True)
    # the query without positives is left out
    assert metrics.map_at_k(ranking, 3) == pytest.approx(expected[:5].mean().item(), rel=1e-15)
    assert metrics.recall_at_k(ranking, 3) == pytest.approx(4 / 5)
    assert metrics.recall_at_k(ranking, 1) == metrics.map_at_k(ranking, 1) == pytest.approx(3 / 5)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 4))
def test_average_precision_agrees_with_torchmetrics(seed: int, k: int, missed: int) -> None:
    relevant = torch.rand(20, 12, generator=generator(seed)) < 0.3
    relevant[0, 0] = True
    counts = relevant.sum(1) + missed
    ours = metrics.average_precision_at_k(metrics.Ranking(relevant, counts), k)
    # positive, because torchmetrics drops items with a score <= 0
    scores = torch.arange(12, 0, -1).float()
    for row, total, value in zip(relevant, counts, ours, strict=True):
        theirs = retrieval_average_precision(scores, row, top_k=k).item()
        retrieved = row[:k].sum().item()
        if total == 0:
            assert math.isnan(value.item())
        else:
            # torchmetrics computes in float32
            assert value.item() == pytest.approx(theirs * retrieved / min(k, total.item()), rel=1e-5)


def test_ranking_by_labels_counts_positives(device: str) -> None:
    labels = torch.tensor([7, 7, 7, -1, 2], device=device)
    own = metrics.rank_by_labels(torch.tensor([[1], [0], [3], [0], [1]], device=device), labels)
    assert own.n_positives.tolist() == [2, 2, 2, 0, 0]
    assert own.relevant.flatten().tolist() == [True, True, False, False, False]
    held = torch.tensor([2, 9, 2, 7], device=device)
    other = metrics.rank_by_labels(torch.tensor([[3], [0], [1], [2], [2]], device=device), labels, held)
    assert other.n_positives.tolist() == [1, 1, 1, 0, 2]
    assert other.relevant.flatten().tolist() == [True, False, False, False, True]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_auroc_is_the_chance_to_rank_right(inside: list[float], outside: list[float]) -> None:
    a, b = torch.tensor(inside, dtype=torch.float64), torch.tensor(outside, dtype=torch.float64)
    direct = ((b[:, None] > a).double() + (b[:, None] == a).double() / 2).mean().item()
    assert metrics.auroc(a, b) == pytest.approx(direct, abs=1e-12)
    assert metrics.auroc(b, a) == pytest.approx(1 - direct, abs=1e-12)


def test_auroc_and_auprc_agree_with_torchmetrics(device: str) -> None:
    # in [0, 1], where torchmetrics leaves scores as they are
    a, b = torch.rand(50, generator=generator(4)).to(device), torch.rand(30, generator=generator(5)).to(device) ** 0.5
    scores, target = torch.cat([a, b]), torch.cat([torch.zeros(50), torch.ones(30)]).long().to(device)
    assert metrics.auroc(a, b) == pytest.approx(binary_auroc(scores, target).item(), abs=1e-6)
    assert metrics.auprc(a, b) == pytest.approx(binary_average_precision(scores, target).item(), abs=1e-6)


def test_large_uncertainties_do_not_tie() -> None:
    # a sigmoid, which torchmetrics applies to such scores, is 1 for both
    assert metrics.auroc(torch.tensor([100.0]), torch.tensor([101.0])) == 1
    assert metrics.auprc(torch.tensor([100.0, 99.0]), torch.tensor([101.0])) == 1


def test_sparsification_agrees_with_removing_one_by_one(device: str) -> None:
    uncertainty = torch.rand(20, generator=generator(6)).to(device)
    performance = torch.rand(20, generator=generator(7)).to(device)
    order = uncertainty.argsort(descending=True)
    means = torch.stack([performance[order[n:]].double().mean() for n in range(20)])
    torch.testing.assert_close(metrics.sparsification_curve(uncertainty, performance).performance, means)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=20), st.randoms())
def test_ties_do_not_depend_on_the_order(pairs: list[tuple[int, float]], random) -> None:
    def area(rows: list[tuple[int, float]]) -> float:
        uncertainty, performance = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
        return metrics.ausc(uncertainty, performance)

    shuffled = pairs.copy()
    random.shuffle(shuffled)
    assert area(pairs) == pytest.approx(area(shuffled), abs=1e-12)
    values = [p for _, p in pairs]
    assert min(values) - 1e-12 <= area(pairs) <= max(values) + 1e-12


def test_queries_without_positives_leave_the_curve() -> None:
    full = metrics.ausc(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([math.nan, 1.0, 0.0]))
    assert full == metrics.ausc(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))


ONES = torch.ones(3, 2)


LABELS = torch.tensor([0, 0, 1])


FIRST, OTHERS = torch.ones(3, 1).long(), torch.tensor([[1], [2], [0]])


RANKING = metrics.Ranking(torch.tensor([[True, False]]), torch.tensor([1]))


test_refusals = refuses(
    InputError,
    (lambda: metrics.nearest_neighbors(ONES, k=3), "k: expected between 1 and 2"),
    (lambda: metrics.nearest_neighbors(ONES, k=1.0), "k: expected a positive whole number"),
    (lambda: metrics.nearest_neighbors(ONES.long(), k=1), "queries: expected a floating", InputTypeError),
    (lambda: metrics.nearest_neighbors(ONES[0], k=1), r"queries: expected shape \(N, D\)"),
    (lambda: metrics.nearest_neighbors(ONES * torch.nan, k=1), "queries: expected finite"),
    (lambda: metrics.nearest_neighbors(ONES * 0, k=1), "3 zero rows"),
    (lambda: metrics.nearest_neighbors(ONES, torch.ones(3, 5), k=1), "gallery: expected D = 2"),
    (lambda: metrics.rank_by_labels(FIRST, LABELS.float()), "labels: expected", InputTypeError),
    (lambda: metrics.rank_by_labels(FIRST.float(), LABELS), "neighbors: expected an integer", InputTypeError),
    (lambda: metrics.rank_by_labels(FIRST[:2], LABELS), r"neighbors: expected shape \(3, K\)"),
    (lambda: metrics.rank_by_labels(FIRST + 2, LABELS), r"indices in \[0, 3\)"),
    (lambda: metrics.rank_by_labels(0 * FIRST, LABELS), "no query among its own"),
    (lambda: metrics.rank_by_labels(OTHERS, torch.arange(3)), "a positive for some query"),
    (lambda: metrics.recall_at_k(RANKING, 3), "Only 2 neighbours"),
    (lambda: metrics.Ranking(ONES[:1].bool(), torch.ones(1).long()), "at least the positives"),
    (lambda: metrics.auroc(ONES[0] * torch.nan, ONES[0]), "uncertainty_id: expected finite"),
    (lambda: metrics.auroc(torch.ones(1), torch.ones(0)), "uncertainty_ood: expected shape"),
    (lambda: metrics.auprc([1.0], torch.ones(1)), "uncertainty_id: expected a torch.Tensor", InputTypeError),
    (lambda: metrics.ausc(torch.ones(2), torch.ones(3)), "one per query"),
    (lambda: metrics.ausc(torch.ones(2), torch.full((2,), torch.nan)), "NaN for all"),
    (lambda: metrics.nearest_neighbors(ONES, k=1, metric="manhattan"), "metric: expected one of 'cosine'"),
)


def distances(queries: torch.Tensor, gallery: torch.Tensor | None) -> torch.Tensor:
    held = queries if gallery is None else gallery
    found = (queries.double()[:, None] - held.double()).square().sum(2).sqrt()
    return found.fill_diagonal_(torch.inf) if gallery is None else found


@given(
    st.sampled_from(BACKENDS),
    st.integers(0, 10**6),
    st.sampled_from([torch.float16, torch.float32, torch.float64]),
    st.booleans(),
    st.integers(1, 6),
    st.sampled_from([0.0, 3.0]),
)
def test_neighbors_are_those_of_all_distances(device, backend, seed, dtype, leave_one_out, dim, shift) -> None:
    queries = (torch.randn(12, dim, generator=generator(seed)) + shift).to(device, dtype)
    gallery = None if leave_one_out else (torch.randn(9, dim, generator=generator(seed + 1)) + shift).to(device, dtype)
    found = metrics.nearest_neighbors(queries, gallery, k=4, backend=backend, metric="euclidean")
    every = distances(queries.cpu(), None if gallery is None else gallery.cpu())
    wanted = every.sort(dim=1).values[:, :4]
    # neighbours may change places where their distances differ by less than float32 tells: squares of norms up to 8
    torch.testing.assert_close(every.gather(1, found.cpu()).square(), wanted.square(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_decide_and_zero_is_a_point(backend: str) -> None:
    line = torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [7.0, 0.0]])
    found = metrics.nearest_neighbors(line, k=1, backend=backend, metric="euclidean")
    assert found.flatten().tolist() == [1, 0, 1, 2]
    refused(lambda: metrics.nearest_neighbors(line, k=1, backend=backend), "zero rows")


def test_votes_and_calibration_follow_the_metric() -> None:
    line = torch.tensor([[1.0, 0.1], [1.2, 0.0], [5.0, 0.4], [6.0, 0.1]])
    labels = torch.tensor([0, 0, 1, 1])
    samples = line.repeat(3, 1, 1)
    by_distance = metrics.retrieval_votes(samples, labels, metric="euclidean")
    assert by_distance.tolist() == [[0, 0, 1, 1]] * 3
    by_angle = metrics.retrieval_votes(samples, labels)
    assert by_angle.tolist() != by_distance.tolist()
    assert metrics.retrieval_ece(samples, labels, metric="euclidean") == 0
    assert metrics.retrieval_brier(samples, labels, metric="euclidean") == 0
    assert metrics.retrieval_brier(samples, labels) > 0


def naive_shares(votes: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(votes, classes).double().mean(0)


def test_votes_by_hand(device: str) -> None:
    # in the first sample 0 pairs with 1 and 2 with 3, in the second 0 with 2 and 1 with 3
    east, north, near = [1.0, 0.0], [0.0, 1.0], 0.1
    first = torch.tensor([east, [1.0, near], north, [near, 1.0]], device=device)
    samples = torch.stack([first, first[[0, 2, 1, 3]]])
    labels = torch.tensor([10, 10, 20, 30], device=device)
    votes = metrics.retrieval_votes(samples, labels)
    assert votes.tolist() == [[10, 10, 30, 20], [20, 30, 10, 10]]
    assert votes.device == labels.device
    held = torch.tensor([5, 6], device=device)
    gallery = metrics.retrieval_votes(samples, labels, torch.tensor([east, north], device=device), held)
    assert gallery.tolist() == [[5, 5, 6, 6], [5, 6, 5, 6]]


def test_a_stack_an_iterator_and_single_samples_agree() -> None:
    samples, gallery = torch.randn(4, 15, 3, generator=generator(0)), torch.randn(4, 9, 3, generator=generator(1))
    labels, held = torch.randint(3, (15,), generator=generator(2)), torch.randint(3, (9,), generator=generator(3))
    stack = metrics.retrieval_votes(samples, labels, gallery, held)
    assert torch.equal(stack, metrics.retrieval_votes((s for s in samples), labels, iter(gallery), held))
    assert metrics.retrieval_ece(samples, labels) == metrics.retrieval_ece(list(samples), labels)
    votes = metrics.retrieval_votes(samples, labels)
    assert metrics.retrieval_ece(samples, labels, n_bins=5) == pytest.approx(
        metrics.calibration_bins(votes, labels, 5).expected_calibration_error
    )
    assert metrics.retrieval_brier(iter(samples), labels) == metrics.brier_score(votes, labels)


def test_calibration_by_hand() -> None:
    # confidences 1, 0.75, 0.5 (a tie, which the smaller label wins), right, wrong, right
    votes = torch.tensor([[3, 3, 4], [3, 3, 4], [3, 3, 9], [3, 1, 9]])
    labels = torch.tensor([3, 1, 4])
    bins = metrics.calibration_bins(votes, labels, 4)
    assert bins.count.tolist() == [0, 1, 1, 1]
    nan = math.nan
    torch.testing.assert_close(bins.confidence, torch.tensor([nan, 0.5, 0.75, 1]).double(), equal_nan=True)
    torch.testing.assert_close(bins.accuracy, torch.tensor([nan, 1.0, 0.0, 1.0]).double(), equal_nan=True)
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert bins.expected_calibration_error == pytest.approx((0.5 + 0.75 + 0) / 3)
    # Brier: 0; (3/4)^2 + (3/4)^2; (1/2)^2 + (1/2)^2
    assert metrics.brier_score(votes, labels) == pytest.approx((0 + 9 / 8 + 1 / 2) / 3)


@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 20), st.integers(1, 5), st.integers(1, 12))
def test_bins_and_brier_agree_with_a_table_of_shares(seed: int, s: int, n: int, classes: int, n_bins: int) -> None:
    votes = torch.randint(classes, (s, n), generator=generator(seed))
    labels = torch.randint(classes, (n,), generator=generator(seed + 1))
    shares = naive_shares(votes, classes)
    target = torch.nn.functional.one_hot(labels, classes)
    assert metrics.brier_score(votes, labels) == pytest.approx(
        (shares - target).square().sum(1).mean().item(), abs=1e-12
    )
    bins = metrics.calibration_bins(votes, labels, n_bins)
    assert int(bins.count.sum()) == n
    held = bins.count > 0
    assert bool((bins.confidence[held] > bins.edges[:-1][held] - 1e-12).all())
    assert bool((bins.confidence[held] <= bins.edges[1:][held] + 1e-12).all())
    prediction = shares.argmax(1)  # the first of equals
    right = (prediction == labels).double().mean().item()
    assert (bins.count * bins.accuracy.nan_to_num()).sum().item() / n == pytest.approx(right)
    assert 0 <= bins.expected_calibration_error <= 1


@given(st.integers(0, 10**6), st.integers(1, 10))
def test_ece_agrees_with_torchmetrics(seed: int, n_bins: int) -> None:
    # torchmetrics bins [low, high), we (low, high]: confidences on an edge are kept out
    votes = torch.randint(2, (16, 60), generator=generator(seed))
    labels = torch.randint(2, (60,), generator=generator(seed + 1))
    shares = naive_shares(votes, 2)
    inside = (shares.max(1).values * n_bins % 1 > 1e-9).nonzero().flatten()
    if len(inside) == 0:
        return
    votes, labels, shares = votes[:, inside], labels[inside], shares[inside]
    right = (shares.argmax(1) == labels).long()
    theirs = binary_calibration_error(shares.max(1).values.float(), right, n_bins=n_bins, norm="l1")
    # torchmetrics computes in float32
    ours = metrics.calibration_bins(votes, labels, n_bins).expected_calibration_error
    assert ours == pytest.approx(theirs.item(), abs=1e-5)


POINTS = torch.tensor([0, 0, 1])
SAMPLES = torch.ones(2, 3, 2)


test_refusals_of_votes = refuses(
    InputError,
    (lambda: metrics.retrieval_votes(SAMPLES[0], POINTS), r"samples: expected shape \(S, N, D\)"),
    (lambda: metrics.retrieval_votes([], POINTS), "at least one sample"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS[:2]), "N = 2 points"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS.float()), "labels: expected an integer", InputTypeError),
    (lambda: metrics.retrieval_votes(SAMPLES * torch.nan, POINTS), "samples: expected finite"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES), "both or neither"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES[:1], POINTS), "shorter", ValueError),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS, metric="l1"), "metric: expected one of 'cosine'"),
    (lambda: metrics.retrieval_ece(SAMPLES, POINTS, n_bins=0), "n_bins: expected a positive"),
    (lambda: metrics.calibration_bins(torch.ones(2, 3), POINTS), "votes: expected an integer", InputTypeError),
    (lambda: metrics.brier_score(torch.ones(2, 0).long(), POINTS[:0]), "not empty"),
)

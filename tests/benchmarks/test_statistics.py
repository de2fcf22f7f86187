"""The statistics that the experiments rest on, against closed forms and loops."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal

from benchmarks.experiments import figures, plan
from benchmarks.experiments.methods.pfe import mutual_likelihood_score
from contrastive_curvature import metrics


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, float("nan")])), min_size=1, max_size=30))
def test_r_auroc_counts_pairs_of_wrong_and_right(queries):
    uncertainty, precision = (torch.tensor(column) for column in zip(*queries, strict=True))
    wrong = [u for u, p in queries if p == 0]
    right = [u for u, p in queries if p == 1]
    got = figures.r_auroc(uncertainty, precision)
    if not wrong or not right:
        assert got is None
    else:
        wins = sum((w > r) + (w == r) / 2 for w in wrong for r in right)
        assert got == pytest.approx(wins / len(wrong) / len(right))


@given(st.integers(0, 2**32 - 1), st.integers(2, 25), st.integers(2, 12))
def test_released_ece_differs_in_the_bins_alone(seed, n_points, n_samples):
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randint(3, (n_samples, n_points), generator=generator)
    labels = torch.randint(3, (n_points,), generator=generator)
    bins = {}
    for point in range(n_points):
        values, counts = votes[:, point].unique(return_counts=True)
        agree, mode = int(counts.max()), int(values[counts.argmax()])
        if agree < n_samples:
            bins.setdefault(10 * agree // n_samples, []).append((int(mode == labels[point]), agree / n_samples))
    kept = sum(map(len, bins.values()))
    got = figures.ece_released(votes, labels)
    if not kept:
        assert got is None
    else:
        wanted = sum(abs(sum(right - share for right, share in points)) for points in bins.values()) / kept
        assert got == pytest.approx(wanted)


@given(st.integers(0, 999), st.integers(12, 20))
def test_released_map_counts_queries_without_a_positive(seed, n):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(n // 2, (n,), generator=generator)
    z = torch.randn(n, 3, generator=generator)
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(z, k=10), labels)
    alone = (labels.bincount()[labels] == 1).double().mean().item()
    for k, counted in ((1, 0.0), (5, 1.0), (10, 1.0)):
        own = metrics.map_at_k(ranking, k) if alone < 1 else 0.0
        assert figures.map_released(ranking, k) == pytest.approx((1 - alone) * own + alone * counted, abs=1e-6)


def test_released_ausc_adds_the_neighbour():
    correct = torch.tensor([False, True] * 50)
    own, neighbor = torch.zeros(100), correct.logical_not().double()
    # the neighbours alone know that the first of each pair is wrong: after half is removed all are right
    wanted = [0.5 * 100 / (100 - i) if i < 50 else 1.0 for i in range(99)]
    area = sum((a + b) / 2 for a, b in pairwise(wanted)) / 99
    assert figures.ausc_released(own, correct, neighbor) == pytest.approx(area)
    assert figures.ausc_released(own, torch.ones(100), own) == pytest.approx(98 / 99)


def test_trapezoid_of_the_precision_recall_curve():
    inside, outside = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])
    # points (recall, precision): (0, 1), (1/2, 1), (1/2, 1/2), (1, 2/3), (1, 1/2)
    assert figures.auprc_released(inside, outside) == pytest.approx(0.5 + 0.25 * (0.5 + 2 / 3))
    assert metrics.auprc(inside, outside) == pytest.approx(0.5 + 1 / 3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=17, unique=True))
def test_ensembles_share_no_encoder_and_are_planned_when_their_seeds_are_done(seeds):
    groups = plan.ensembles(seeds)
    members = [seed for group in groups for seed in group]
    assert len(set(members)) == len(members) == 5 * max(1, len(seeds) // 5)
    assert members[: len(seeds)] == sorted(seeds)[: len(members)]
    cells = plan.plan_cells(plan.table_rows(2), seeds)
    assert len({(cell.row.key, cell.seed) for cell in cells}) == len(cells) == 15 * len(seeds) + 2 * len(groups)
    place = {cell.seed: number for number, cell in enumerate(cells) if cell.row.key == plan.BASE}
    for number, cell in enumerate(cells):
        assert cell.row.is_ensemble == bool(cell.members)
        assert all(place[seed] < number for seed in cell.members if seed in place)


@given(st.integers(1, 9), st.integers(0, 999))
def test_mutual_likelihood_is_that_of_one_latent_code(dim, seed):
    torch.manual_seed(seed)
    a, b = torch.randn(2, 6, dim, dtype=torch.float64)
    var_a, var_b = torch.rand(2, 6, dim, dtype=torch.float64) + 0.01
    found = mutual_likelihood_score(a, var_a, b, var_b)
    # the difference of two independent Gaussians, at zero
    torch.testing.assert_close(found, Normal(a - b, (var_a + var_b).sqrt()).log_prob(torch.zeros(())).sum(1))
    torch.testing.assert_close(found, mutual_likelihood_score(b, var_b, a, var_a))

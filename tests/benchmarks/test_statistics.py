"""The statistics that the experiments rest on, against closed forms and loops."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal

from benchmarks.experiments import evaluate, plan
from benchmarks.experiments.methods.hedged import choose_pairs
from benchmarks.experiments.methods.pfe import mutual_likelihood_score
from benchmarks.experiments.methods.scores import VMFMixture
from benchmarks.experiments.methods.triplet import (
    FORMS,
    MARGIN,
    TEMPERATURES,
    BayesianStep,
    TripletStep,
    calibrated_temperature,
    gaussians,
    mine_triplets,
)
from benchmarks.experiments.training import spread_of, unit
from contrastive_curvature import metrics, triplet, vmf
from contrastive_curvature.metrics import brier_score, retrieval_votes

close = torch.testing.assert_close


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, float("nan")])), min_size=1, max_size=30))
def test_r_auroc_counts_pairs_of_wrong_and_right(queries):
    uncertainty, precision = (torch.tensor(column) for column in zip(*queries, strict=True))
    wrong = [u for u, p in queries if p == 0]
    right = [u for u, p in queries if p == 1]
    got = evaluate.r_auroc(uncertainty, precision)
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
    got = evaluate.ece_released(votes, labels)
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
        assert evaluate.map_released(ranking, k) == pytest.approx((1 - alone) * own + alone * counted, abs=1e-6)


def test_released_ausc_adds_the_neighbour():
    correct = torch.tensor([False, True] * 50)
    own, neighbor = torch.zeros(100), correct.logical_not().double()
    # the neighbours alone know that the first of each pair is wrong: after half is removed all are right
    wanted = [0.5 * 100 / (100 - i) if i < 50 else 1.0 for i in range(99)]
    area = sum((a + b) / 2 for a, b in pairwise(wanted)) / 99
    assert evaluate.ausc_released(own, correct, neighbor) == pytest.approx(area)
    assert evaluate.ausc_released(own, torch.ones(100), own) == pytest.approx(98 / 99)


def test_trapezoid_of_the_precision_recall_curve():
    inside, outside = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])
    # points (recall, precision): (0, 1), (1/2, 1), (1/2, 1/2), (1, 2/3), (1, 1/2)
    assert evaluate.auprc_released(inside, outside) == pytest.approx(0.5 + 0.25 * (0.5 + 2 / 3))
    assert metrics.auprc(inside, outside) == pytest.approx(0.5 + 1 / 3)


def test_retrieval_leaves_the_query_out():
    z, labels = torch.randn(30, 4), torch.randint(4, (30,))
    similarity = torch.nn.functional.cosine_similarity(z.unsqueeze(1), z, dim=2).fill_diagonal_(-2)
    same = (labels.unsqueeze(1) == labels) & ~torch.eye(30, dtype=torch.bool)
    order = similarity.argsort(1, descending=True)[:, :10]
    ranking, nearest = evaluate.retrieve(z, labels)
    assert torch.equal(ranking.relevant, same.gather(1, order))
    assert torch.equal(ranking.n_positives, same.sum(1))
    assert torch.equal(nearest, order[:, 0])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=17, unique=True))
def test_ensembles_share_no_encoder_and_are_planned_when_their_seeds_are_done(seeds):
    groups = plan.ensembles(seeds)
    members = [seed for group in groups for seed in group]
    assert len(set(members)) == len(members) == 5 * max(1, len(seeds) // 5)
    assert members[: len(seeds)] == sorted(seeds)[: len(members)]
    cells = plan.plan_cells(plan.table_rows("2"), seeds)
    assert len({(cell.row.key, cell.seed) for cell in cells}) == len(cells) == 17 * len(seeds) + 2 * len(groups)
    place = {cell.seed: number for number, cell in enumerate(cells) if cell.row.key == plan.BASE}
    for number, cell in enumerate(cells):
        assert (cell.row.method == "deep_ensemble") == bool(cell.members)
        assert all(place[seed] < number for seed in cell.members if seed in place)


@given(st.integers(2, 30), st.integers(2, 9), st.sampled_from([1e-2, 0.1, 1.0, 100.0]), st.integers(0, 999))
def test_sums_give_what_all_samples_give(n_samples, dim, noise, seed):
    torch.manual_seed(seed)
    samples = torch.randn(5, dim) + noise * torch.randn(n_samples, 5, dim)
    samples = torch.nn.functional.normalize(samples, dim=2)
    found = spread_of(samples)
    mu, kappa = vmf.fit(samples.double())
    assert torch.allclose(found.mean, mu.float(), atol=1e-5)
    assert torch.allclose(1 / found.uncertainty, kappa.float(), rtol=1e-2)
    assert torch.allclose(found.variants["sum_std"], samples.double().std(0).sum(1).float(), rtol=1e-2)


@given(st.integers(1, 9), st.integers(0, 999))
def test_mutual_likelihood_is_that_of_one_latent_code(dim, seed):
    torch.manual_seed(seed)
    a, b = torch.randn(2, 6, dim, dtype=torch.float64)
    var_a, var_b = torch.rand(2, 6, dim, dtype=torch.float64) + 0.01
    found = mutual_likelihood_score(a, var_a, b, var_b)
    # the difference of two independent Gaussians, at zero
    close(found, Normal(a - b, (var_a + var_b).sqrt()).log_prob(torch.zeros(())).sum(1))
    close(found, mutual_likelihood_score(b, var_b, a, var_a))


@given(st.integers(2, 6), st.integers(0, 999))
def test_mixture_is_the_sum_of_its_classes(dim, seed):
    torch.manual_seed(seed)
    labels = torch.randint(4, (30,)) * 10
    labels[0] = 99  # the only image of its class
    u = unit(torch.randn(30, dim, dtype=torch.float64))
    mixture = VMFMixture.fit(u, labels)
    queries = unit(torch.randn(7, dim, dtype=torch.float64))
    terms, several = [], []
    for number, label in enumerate(sorted(set(labels.tolist()))):
        rows = u[labels == label]
        if len(rows) > 1:
            several.append((rows - rows.mean(0)).square().sum(1))
            mu, kappa = vmf.fit(rows)
        else:
            mu, kappa = rows[0], mixture.kappa[number]
        terms.append(vmf.log_prob(queries, mu, kappa) + math.log(len(rows) / 30))
    close(mixture.log_prob(queries), torch.stack(terms).logsumexp(0))
    rbar = (1 - torch.cat(several).mean()).sqrt()
    assert torch.isclose(mixture.kappa, vmf.concentration(rbar, dim), rtol=1e-6).any()


def points(seed=0, n=14, dim=3, classes=4):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return z, torch.randint(classes, (n,), generator=generator)


def by_loop(z, labels, margin):
    found = set()
    for a in range(len(z)):
        for p in range(len(z)):
            for n in range(len(z)):
                if a == p or labels[a] != labels[p] or labels[a] == labels[n]:
                    continue
                near, far = ((z[a] - z[other]).square().sum() for other in (p, n))
                if far < near + margin:
                    found.add((a, p, n))
    return found


@pytest.mark.parametrize("margin", [0.0, 0.5, 1e9])
def test_triplets_are_those_of_a_loop(device, margin):
    z, labels = points()
    mined = mine_triplets(z.to(device), labels.to(device), margin, None)
    listed = list(zip(*(part.tolist() for part in mined), strict=True))
    wanted = by_loop(z, labels, margin)
    assert set(listed) == wanted
    assert len(listed) == len(wanted)
    assert 0 < len(wanted) <= len(by_loop(z, labels, 1e9))


def test_the_triplet_loss_is_the_mean_of_what_is_above_zero():
    z, labels = points()
    u = z / z.norm(dim=1, keepdim=True)
    terms = [
        (u[a] - u[p]).square().sum() - (u[a] - u[n]).square().sum() + MARGIN for a, p, n in by_loop(u, labels, MARGIN)
    ]
    torch.testing.assert_close(TripletStep(torch.nn.Identity(), negatives=None)(z, labels), torch.stack(terms).mean())


@pytest.mark.parametrize("name", FORMS)
def test_the_bayesian_loss_is_the_packages_over_the_triplets(name):
    form = FORMS[name]
    raw, labels = points(dim=4)
    mean, variance = gaussians(raw, form)
    assert variance.shape == (len(raw), 1)
    listed = sorted(by_loop(mean, labels, form.mining_margin))
    a, p, n = ((mean[list(part)], variance[list(part)]) for part in zip(*listed, strict=True))
    kind = {"prior_variance": 1.0} if name == "gaussian" else {"moments": "gaussian"}
    wanted = triplet.bayesian_triplet_loss(a, p, n, 0.0, distribution=name, kl_weight=form.kl_weight, **kind)
    torch.testing.assert_close(BayesianStep(torch.nn.Identity(), form, negatives=None)(raw, labels), wanted)


def test_the_temperature_has_the_best_votes():
    """Two overlapping clouds, with the votes' probabilities known but for their sampling."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100) % 2
    clouds = torch.stack([labels + 0.6 * torch.randn(100, generator=generator), torch.zeros(100)], 1)

    def draw(temperature):
        g = torch.Generator().manual_seed(1)
        return [clouds + (2 * temperature) ** 0.5 * torch.randn(clouds.shape, generator=g) for _ in range(30)]

    scores = {t: brier_score(retrieval_votes(draw(t), labels, metric="euclidean"), labels) for t in TEMPERATURES}
    chosen = calibrated_temperature(draw, labels, "euclidean")
    assert chosen == min(TEMPERATURES, key=scores.get)
    # Neither chance, whose score is about 1/2, nor votes that are all the same.
    assert scores[chosen] < min(scores[4.0] - 0.1, scores[1 / 1024] - 0.02)
    assert calibrated_temperature(lambda _: [labels.float().unsqueeze(1)] * 2, labels, "euclidean") == 4.0


def test_pairs_of_a_batch():
    targets = torch.tensor([0, 0, 1, 2, 1, 1, 0, 3])
    i, j, weight = choose_pairs(targets, 100)
    same = targets[i] == targets[j]
    assert set(zip(i.tolist(), j.tolist(), strict=True)) == {(x, y) for y in range(8) for x in range(y)}
    assert int(same.sum()) == 6
    assert weight[same].sum() == pytest.approx(0.5)
    assert torch.allclose(weight[~same], torch.full((22,), 0.5 / 22))
    i, j, weight = choose_pairs(targets, 5)
    assert len(set(zip(i.tolist(), j.tolist(), strict=True))) == 11
    assert weight[targets[i] != targets[j]].sum() == pytest.approx(0.5)
    for alone in ([4, 4, 4, 4], [0, 1, 2, 3]):
        assert choose_pairs(torch.tensor(alone), 10)[2].sum() == pytest.approx(1.0)

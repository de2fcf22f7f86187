"""The stated rates of ``cc.Retriever``, over many draws of held-out queries; and what its parts compute."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression

from benchmarks.promises import CASES, World, answered, simulated
from contrastive_curvature.decisions.retrieval_threshold import RetrievalThreshold
from contrastive_curvature.retriever.evidence import COLUMNS, evidence
from contrastive_curvature.retriever.rule import PRESENT, RIGHT, Rates, Regression, certified


def above(broken: list[bool], wanted: float) -> bool:
    """Whether a share of the draws is above one that is promised, beyond what chance does once in ten thousand."""
    return bool(binom.sf(sum(broken) - 1, len(broken), wanted) < 1e-4)


@pytest.mark.parametrize("splits", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_each_rate_is_kept(splits: int) -> None:
    for case in CASES if splits > 30 else CASES[5:8]:
        found = simulated(case, splits)
        assert not above(found.broken.tolist(), 0.1), case.title
        # With half of the matches wrong, a ninth is answered.
        assert found.answered.mean() > 0.1, case.title
        for observed, wanted in ((found.matches, case.false_matches), (found.alarms, 0.05)):
            assert wanted is None or observed.mean() < wanted + 4 * observed.std() / splits**0.5, case.title
        # Without ties it is tight up to 1 / (n + 1).
        tight = 0.05 - 1 / (case.held_out + 1) - 4 * found.alarms.std() / splits**0.5
        assert case.digits is not None or found.alarms.mean() > tight, case.title


def test_a_gallery_grown_tenfold_keeps_its_false_matches_with_new_limits_alone() -> None:
    world = World.of(1000, 12, 1, 3000, noise=(0.05, 0.15))
    held = torch.arange(1500)
    old, new = [], []
    for classes in (100, 1000):
        # Queries of the first 100 classes; whoever else asks finds no match in either gallery.
        own = world._replace(gallery=world.gallery[:classes], classes=world.classes[:classes])
        every, absent = own.searched()
        asked = Rates(None, 0.05, None, 0.9)
        rule = certified(asked, every[held.numpy()], absent[:1500])
        for kept, limits in ((old, old[0][0] if old else rule), (new, rule)):
            kept.append((limits, answered(limits, absent[1500:]).mean()))
    assert old[1][1] > 0.15  # 0.05 was asked
    # The standard error of both halves is 0.008.
    assert abs(new[1][1] - 0.05) < 0.032
    assert abs(new[0][1] - 0.05) < 0.032


def test_feedback_on_answered_queries_only_lowers_a_limit() -> None:
    every, absent = World.of(20, 8, 10).searched()
    asked = Rates(0.5 * float(1 - every.right.mean()), None, 0.05, 0.9)
    rng = np.random.default_rng(2)
    broken: dict[str, list[bool]] = {"naive": [], "fed": []}
    for _ in range(20):
        drawn, others = np.split(rng.permutation(len(every.right)), [300])
        held = every[drawn]
        first = certified(asked, held, absent[drawn])
        found = others[answered(first, every[others])]
        fed, unseen = found[:1000], every[others]
        both = np.concatenate([drawn, fed])
        rules = {
            # As if they were drawn as the held-out ones: wrong answers seem rarer than they are.
            "naive": certified(asked, every[both], absent[both]),
            "fed": certified(asked, held, absent[drawn], every[fed], first.limit),
        }
        assert rules["fed"].limit <= first.limit
        for name, rule in rules.items():
            now = answered(rule, unseen)
            broken[name].append(bool(now.any() and (~unseen.right[now]).mean() > asked.wrong_answers))
    assert not above(broken["fed"], 0.1)
    assert np.mean(broken["naive"]) > 0.6
    # Bad news is heard: of so many answers, half were wrong.
    wrong = replace(every[fed], right=np.arange(1000) % 2 == 0)
    assert certified(asked, held, absent[drawn], wrong, first.limit).answered < first.answered / 2


def test_as_many_held_out_queries_as_are_said_to_be_needed_mostly_suffice() -> None:
    every, absent = World.of(20, 8, 10).searched()
    asked = Rates(0.05, None, 0.05, 0.9)
    rng = np.random.default_rng(3)
    needed, enough = [], []
    for _ in range(40):
        order = rng.permutation(len(every.right))
        reasons = certified(asked, every[order[:60]], absent[order[:60]]).reasons
        if found := re.search("It takes about ([0-9,]+) held-out queries", reasons.get("wrong_answers", "")):
            needed.append(int(found[1].replace(",", "")))
            more = order[60 : 60 + needed[-1]]
            enough.append(certified(asked, every[more], absent[more]).answered > 0)
    assert len(needed) > 10
    assert np.mean(enough) > 0.5
    assert np.median(needed) < 1000  # and not by asking for too many


def test_limits_are_those_of_scores_from_other_folds() -> None:
    """That of P(right) by ``RetrievalThreshold``, of what the k-th smallest score without its class leaves."""
    every, absent = World.of(20, 8, 10, 400).searched()
    fold = np.random.default_rng(0).permutation(400) % 5
    score, near, lacking = np.empty((3, 400))
    for k in range(5):
        others = fold != k
        right, present = (
            Regression.fitted(every.evidence[others], every.right[others], absent.evidence[others], *how)
            for how in (RIGHT, PRESENT)
        )
        score[~others], near[~others] = right(every.evidence[~others]), present(every.evidence[~others])
        lacking[~others] = present(absent.evidence[~others])
    alone = certified(Rates(0.2, None, None, 0.9), every, absent)
    assert alone.limit == RetrievalThreshold(0.2).fit(score, every.right).threshold
    assert alone.answered == (score <= alone.limit).mean()
    both = certified(Rates(0.2, 0.1, None, 0.9), every, absent)
    assert both.present_limit == np.sort(lacking)[40 - 1]  # floor(0.1 * 401)
    left = near <= both.present_limit
    assert both.limit == RetrievalThreshold(0.2).fit(score[left], every.right[left]).threshold
    assert both.answered == (left & (score <= both.limit)).mean() < alone.answered
    # A query that is called unknown is not answered anyway.
    alarmed = certified(Rates(None, 0.1, 0.3, 0.9), every, absent)
    known = alarmed.p_value(every.novelty) > 0.3
    assert alarmed.present_limit == np.sort(np.where(known, lacking, np.inf))[40 - 1] != both.present_limit


@pytest.mark.parametrize("without", [False, True])
def test_evidence_against_a_search_by_hand(without: bool) -> None:
    world = World.of(4, 5, 4, 30)
    truth = world.truth if without else None
    columns, match = evidence(world.queries, world.gallery, world.classes, truth)
    labels = world.classes.numpy()
    for row, query in enumerate(world.queries.directions.double().numpy()):
        there = np.flatnonzero(labels != int(world.truth[row])) if without else np.arange(len(labels))
        cosine = world.gallery.double().numpy()[there] @ query
        order = np.argsort(-cosine)[:10]
        own = labels[there] == labels[there][order[0]]
        assert match[row] == there[order[0]]
        near, mean = cosine[order[0]], cosine[order].mean()
        far, between, other = np.log(1 - np.array([near, mean, cosine[~own].max()]) + 1e-6)
        wanted = [far, between, own[order].mean(), far - other]
        np.testing.assert_allclose(columns[row, :4], wanted, rtol=1e-6, atol=1e-6)
        alone = np.log([world.queries.uncertainty[row], world.queries.novelty[row]])
        np.testing.assert_allclose(columns[row, 4:], alone)


def test_evidence_where_the_gallery_has_no_other_class() -> None:
    world = World.of(1, 5, 3, 6)
    columns, _ = evidence(world.queries, world.gallery, world.classes)
    np.testing.assert_allclose(columns[:, 3], columns[:, 0] - np.log(2 + 1e-6))
    columns, _ = evidence(world.queries, world.gallery, world.classes, world.truth)
    np.testing.assert_allclose(columns[:, :4], [[np.log(2 + 1e-6), np.log(2 + 1e-6), 0, 0]] * 6)


def test_weights_are_those_of_scikit_learn_where_no_sign_binds() -> None:
    rng = np.random.default_rng(0)
    signs = np.array(list(COLUMNS.values()))
    present, absent = rng.normal(size=(400, 6)) + signs / 2, rng.normal(size=(400, 6)) - signs / 2
    right = rng.random(400) < 1 / (1 + np.exp(-present @ signs))
    ridge = np.ones(6)
    fitted = Regression.fitted(present, right, absent, 0.1, ridge)
    standard = (np.vstack([present, absent]) - present.mean(0)) / present.std(0)
    labels, weights = np.append(right, np.zeros(400)), np.repeat([1, 0.1], 400)
    oracle = LogisticRegression(C=1, tol=1e-8, max_iter=1000).fit(standard, labels, weights)
    np.testing.assert_allclose(fitted.weights, np.append(oracle.coef_, oracle.intercept_), atol=2e-3)
    np.testing.assert_allclose(fitted(present), -oracle.decision_function(standard[:400]), atol=5e-3)
    # A column that says the opposite of what it may say has no weight; one that is constant has none either.
    turned = present * np.array([-1, 1, 1, 1, 1, 0])
    weights = Regression.fitted(turned, right, absent * np.array([-1, 1, 1, 1, 1, 0]), 0.1, ridge).weights
    assert weights[0] == 0
    assert weights[5] == 0
    assert (weights[:-1] * signs >= 0).all()


def test_confidence_is_calibrated_with_one_absent_class_in_eleven() -> None:
    every, absent = World.of(20, 8, 10).searched()
    rule = certified(Rates(None, None, None, 0.9), every[np.arange(1000)], absent[:1000])
    new = np.vstack([every.evidence[1000:], absent.evidence[1000:1500]])  # one in eleven
    right = np.append(every.right[1000:], np.zeros(500))
    sure = 1 / (1 + np.exp(rule.right(new)))
    bins = np.minimum((sure * 10).astype(int), 9)
    error = sum((bins == b).mean() * abs(sure[bins == b].mean() - right[bins == b].mean()) for b in set(bins.tolist()))
    assert error < 0.05

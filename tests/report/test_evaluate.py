"""The numbers of an evaluation are those of the metrics; what there is no data for says why."""

import json
import math

import pytest
import torch
from devices import DEVICES
from report_cases import fitted, inputs, loader
from tables import each

from contrastive_curvature import OptimisticPValueWarning, metrics
from contrastive_curvature.apps.report import Data, Missing, evaluate
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError

pytestmark = pytest.mark.parametrize("device", DEVICES)


def both(device):
    la = fitted(device)
    x, labels = inputs(150, seed=3)
    return la, x, labels, inputs(90, seed=4, unknown=True)[0]


def test_numbers_are_those_of_the_metrics(device):
    la, x, labels, other = both(device)
    found = evaluate(la, loader(x, labels), unknown=loader(other), ks=(1, 5), alphas=(0.05, 0.2), n_samples=7)

    known, unknown = la(x.to(device)), la(other.to(device))
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(known.mu.cpu(), k=5), labels)
    right = metrics.average_precision_at_k(ranking, 1)
    uncertainty, novelty = known.uncertainty.cpu().double(), known.novelty.cpu()
    samples = la.predictive_samples(
        x.to(device), n_samples=7, joint=True, generator=torch.Generator(device).manual_seed(0)
    ).cpu()
    wanted = {
        "recall@1": metrics.recall_at_k(ranking, 1),
        "recall@5": metrics.recall_at_k(ranking, 5),
        "map@1": metrics.map_at_k(ranking, 1),
        "map@5": metrics.map_at_k(ranking, 5),
        "ausc": metrics.ausc(uncertainty, right),
        "r_auroc": metrics.auroc(uncertainty[right == 1], uncertainty[right == 0]),
        "ece": metrics.retrieval_ece(samples, labels),
        "brier": metrics.retrieval_brier(samples, labels),
        "auroc": metrics.auroc(novelty, unknown.novelty.cpu()),
        "auprc": metrics.auprc(novelty, unknown.novelty.cpu()),
        "flagged_known@0.05": float((~known.is_known(0.05)).double().mean()),
        "flagged_unknown@0.05": float((~unknown.is_known(0.05)).double().mean()),
        "flagged_known@0.2": float((~known.is_known(0.2)).double().mean()),
        "flagged_unknown@0.2": float((~unknown.is_known(0.2)).double().mean()),
    }
    assert found.metrics.keys() == wanted.keys()
    # In float32, another size of the batch may exchange two scores that are equal up to rounding.
    assert found.metrics == pytest.approx(wanted, abs=1e-4)
    assert not found.missing
    assert found.counts == {"test": 150, "unknown": 90, "gallery": 0, "classes": 4}
    # The case would prove little if everything were right, or nothing found.
    assert 0 < wanted["flagged_unknown@0.05"] < 1
    assert 0.5 < wanted["recall@1"] < 1


def test_gallery(device):
    la, x, labels, _ = both(device)
    gx, gl = inputs(60, seed=5)
    found = evaluate(la, loader(x, labels), gallery=loader(gx, gl), ks=(3,), n_samples=4)
    mu, gallery = la(x.to(device)).mu.cpu(), la(gx.to(device)).mu.cpu()
    cosine = mu.double() @ gallery.double().T
    hits = (gl[cosine.topk(3).indices] == labels.unsqueeze(1)).any(1)
    assert found.metrics["recall@3"] == pytest.approx(float(hits.double().mean()))
    assert found.retrieval.gallery_size == found.counts["gallery"] == 60
    assert not isinstance(found.reliability, Missing)


def test_inputs_that_find_themselves_are_noticed(device):
    la, x, labels, _ = both(device)
    with pytest.warns(UserWarning, match="in the gallery too"):
        found = evaluate(la, loader(x, labels), gallery=loader(x, labels, 7), n_samples=0)
    assert found.metrics["recall@1"] == 1


def test_batches_do_not_matter(device):
    la, x, labels, other = both(device)
    one, many = (
        evaluate(la, loader(x, labels, size), unknown=loader(other, batch_size=size), n_samples=5) for size in (150, 13)
    )
    assert one.metrics == pytest.approx(many.metrics, abs=1e-4)
    for group, same in zip(one.groups, many.groups, strict=True):
        assert [card.name for card in group.cards] == [card.name for card in same.cards]


def test_every_step_of_the_slider(device):
    la, x, labels, other = both(device)
    steps = evaluate(la, loader(x, labels), unknown=loader(other), n_samples=0).thresholds.steps
    known, unknown = la(x.to(device)), la(other.to(device))
    novelty = torch.cat([known.novelty, unknown.novelty]).cpu()
    flagged_share = []
    for step in steps:
        flagged = torch.cat([~known.is_known(step.alpha), ~unknown.is_known(step.alpha)]).cpu()
        assert step.known == pytest.approx(float(flagged[:150].double().mean()))
        assert step.unknown == pytest.approx(float(flagged[150:].double().mean()))
        if step.novelty is not None:
            assert bool(((novelty > step.novelty) == flagged).all())
        flagged_share.append(float(flagged.double().mean()))
    assert steps[0].alpha >= 1 / 301
    assert steps[-1].alpha == 0.5
    assert flagged_share == sorted(flagged_share)
    assert len(set(flagged_share)) > 10


def test_groups_hold_the_extremes(device):
    la, x, labels, other = both(device)
    found = evaluate(la, loader(x, labels), unknown=loader(other), n_shown=5, n_samples=0, class_names=list("abcd"))
    predicted, unknown = la(x.to(device)), la(other.to(device))
    groups = {group.title: group for group in found.groups}
    order = predicted.uncertainty.argsort().tolist()
    assert [int(card.name) for card in groups["Most certain"].cards] == order[:5]
    assert [int(card.name) for card in groups["Least certain"].cards] == order[::-1][:5]
    assert [int(c.name) for c in groups["Known, but unusual"].cards] == predicted.novelty.argsort().tolist()[::-1][:5]
    assert [int(c.name) for c in groups["Unknown, but usual"].cards] == unknown.novelty.argsort().tolist()[:5]
    neighbours = metrics.nearest_neighbors(predicted.mu, k=1).squeeze(1).cpu()
    for card in groups["Least certain"].cards:
        row = int(card.name)
        assert torch.equal(card.item, x[row])
        assert card.label == "abcd"[labels[row]]
        assert card.match == "abcd"[labels[neighbours[row]]]
        assert card.right == (card.label == card.match)


def test_without_anything_but_inputs(device):
    la, x, _, _ = both(device)
    found = evaluate(la, [x[:40], x[40:]])
    assert set(found.missing) == {"retrieval", "errors", "reliability", "detection"}
    assert set(found.metrics) == {"flagged_known@0.01", "flagged_known@0.02", "flagged_known@0.05", "flagged_known@0.1"}
    json.loads(found.to_json())


@pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")
def test_without_a_calibration(device):
    _, x, labels, other = both(device)
    la = fitted(device, calibrated=0)
    found = evaluate(la, loader(x, labels), unknown=loader(other), n_samples=0)
    assert not found.thresholds.calibrated
    assert found.thresholds.n_compared == 200
    assert found.thresholds.steps[0].deviation is None
    state = la.state_dict()
    assert "auroc" in found.metrics
    assert state is not None


def test_uncalibrated_is_said(device):
    _, x, labels, _ = both(device)
    fitted.cache_clear()
    with pytest.warns(OptimisticPValueWarning):
        evaluate(fitted(device, calibrated=0), loader(x, labels), n_samples=0)


def test_posterior_that_knows_no_inputs(device):
    from laplace import Laplace

    _, x, labels, other = both(device)
    la = Laplace(
        fitted(device).model.model, likelihood="contrastive", subset_of_weights="all", hessian_structure="diag"
    )
    la.fit(loader(*inputs(40, seed=1)))
    la.optimize_prior_precision()
    found = evaluate(la, loader(x, labels), unknown=loader(other), n_samples=3)
    assert {"detection", "thresholds"} <= set(found.missing)
    assert "calibrate" in found.missing["thresholds"]
    assert {"recall@1", "ece"} <= set(found.metrics)
    assert [group.title for group in found.groups] == ["Most certain", "Least certain"]


def test_few_points(device):
    la, x, labels, _ = both(device)
    found = evaluate(la, loader(x[:4], torch.tensor([0, 0, 1, 1])), ks=(1, 3, 5), alphas=(0.0001, 0.5), n_samples=2)
    assert set(found.retrieval.recall) == {1, 3}
    assert "recall@5, map@5" in found.missing
    assert "flagged_known@0.0001" in found.missing
    alone = evaluate(la, loader(x[:1], labels[:1]), n_samples=2)
    assert "no neighbour" in alone.missing["retrieval"]
    strangers = evaluate(la, loader(x[:4], torch.arange(4)), n_samples=2)
    assert "nothing right to find" in strangers.missing["retrieval"]


def test_one_class_and_all_wrong(device):
    la, x, labels, _ = both(device)
    same = evaluate(la, loader(x[:20], torch.zeros(20, dtype=torch.int64)), n_samples=2)
    assert same.metrics["recall@1"] == 1
    assert "is right" in same.missing["r_auroc"]
    # Two points of each of two classes at one place, with the labels exchanged.
    places = inputs(2, seed=3)[0]
    labels = torch.tensor([0, 1])
    wrong = evaluate(
        la,
        loader(places, labels),
        gallery=loader(torch.cat([places + 0.01, places + 9]), torch.tensor([1, 0, 0, 1])),
        n_samples=2,
    )
    assert wrong.metrics["recall@1"] == 0
    assert "is wrong" in wrong.missing["r_auroc"]
    assert json.loads(wrong.to_json())["missing"] == wrong.missing


def test_gaussian_process_does_not_vote(device):
    from laplace import Laplace

    la = Laplace(
        fitted(device).model.model,
        likelihood="contrastive",
        hessian_structure="gp",
        n_subset=20,
        backend_kwargs={"pd_fix": "psd"},
    )
    la.fit(loader(*inputs(40, seed=1)))
    found = evaluate(la, loader(*inputs(30, seed=3)))
    assert "gp" in found.missing["reliability"]
    assert "recall@1" in found.metrics


def test_too_many_samples_are_left_out(device, monkeypatch):
    monkeypatch.setattr("contrastive_curvature.apps.report.scored.MOST_SAMPLED", 3 * 30 * 4)
    x, labels = inputs(30, seed=3)
    assert "ece" in evaluate(fitted(device), loader(x, labels, 10), n_samples=3).metrics
    found = evaluate(fitted(device), loader(x, labels, 10), gallery=loader(*inputs(31, seed=1)), n_samples=3)
    assert "1 GiB" in found.missing["reliability"]
    assert "recall@1" in found.metrics


def test_metrics_go_into_a_model_card(device, tmp_path):
    la = fitted(device)
    found = evaluate(la, loader(*inputs(30, seed=3)), n_samples=3)
    la.save_pretrained(tmp_path / "posterior", metrics=found.metrics)
    card = (tmp_path / "posterior" / "README.md").read_text(encoding="utf-8")
    assert all(name in card for name in found.metrics)


def test_metrics_are_finite_plain_numbers(device):
    la, x, labels, other = both(device)
    found = evaluate(la, loader(x, labels), unknown=loader(other), n_samples=3)
    assert all(type(value) is float and math.isfinite(value) for value in found.metrics.values())
    plain = json.loads(found.to_json())
    assert plain["metrics"] == found.metrics
    assert plain["posterior"]["training points"] == 200
    assert len(plain["curves"]["thresholds"]["edges"]) == len(plain["curves"]["thresholds"]["known"]) + 1
    assert sum(plain["curves"]["thresholds"]["unknown"]) == pytest.approx(1, abs=1e-3)


@each(
    "options, error, names",
    [
        ({"ks": (0,)}, InputError, "ks"),
        ({"ks": 5}, InputTypeError, "ks"),
        ({"ks": ()}, InputTypeError, "ks"),
        ({"alphas": (1.5,)}, InputError, "alpha"),
        ({"alphas": "0.05"}, InputTypeError, "alphas"),
        ({"n_samples": -1}, InputError, "n_samples"),
        ({"n_shown": 2.0}, InputError, "n_shown"),
        ({"seed": True}, InputError, "seed"),
        ({"class_names": "abc"}, InputTypeError, "class_names"),
        ({"progress_bar": "no"}, InputTypeError, "progress_bar"),
        ({"unknown": []}, InputError, "unknown"),
        ({"gallery": 3}, InputTypeError, "gallery"),
        ({"unknown": [2]}, InputTypeError, "unknown: batch 0"),
    ],
)
def test_bad_options_are_named(device, options, error, names):
    x, labels = inputs(8, seed=3)
    with pytest.raises(error, match=names):
        evaluate(fitted(device), loader(x, labels), **options)


def test_bad_data_is_named(device):
    la = fitted(device)
    x, labels = inputs(8, seed=3)
    for test, names in (
        ([], "test: expected at least one input"),
        ([(x, labels[:3])], "test: batch 0"),
        ([(x, labels.float())], "labels"),
        ([(x, labels), x], "labels in every batch"),
        ([(x, labels, labels)], "batch 0"),
        (Data([(x, labels)], ids=["a"]), "test: ids"),
        (Data([(x, labels)], items=["a"] * 9), "test: items"),
    ):
        with pytest.raises(InputError, match=names):
            evaluate(la, test)
    with pytest.raises(InputTypeError, match="items"):
        Data([x], items="abc")
    with pytest.raises(InputError):
        evaluate(la, [(torch.full_like(x, torch.nan), labels)])
    with pytest.raises(InputError, match="test: batch 1"):
        evaluate(la, [(x, labels), (torch.randn(8, 3), labels)])


def test_bad_posterior_is_named(device):
    from laplace import Laplace

    x, labels = inputs(8, seed=3)
    with pytest.raises(InputTypeError, match="la"):
        evaluate(fitted(device).model, loader(x, labels))
    with pytest.raises(NotFittedError):
        evaluate(Laplace(torch.nn.Linear(4, 3).to(device), likelihood="contrastive"), loader(x, labels))


def test_two_towers_are_refused(device):
    from laplace import Laplace

    import contrastive_curvature as cc

    towers = cc.TwoTowers(torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)).to(device)
    with pytest.raises(UnsupportedError, match=r"la\.a"):
        evaluate(Laplace(towers, likelihood="contrastive", backend_kwargs={"loss": cc.InfoNCELoss()}), [])

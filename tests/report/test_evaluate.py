"""The numbers of an evaluation are those of the metrics; what there is no data for says why."""

import pytest
import torch
from report_cases import fitted, inputs, loader
from tables import each

from contrastive_curvature import OptimisticPValueWarning, metrics
from contrastive_curvature.apps.report import Data, Missing, evaluate, measure
from contrastive_curvature.embedding.known import unit_features
from contrastive_curvature.errors import InputError, InputTypeError


def both(device):
    la = fitted(device)
    x, labels = inputs(150, seed=3)
    return la, x, labels, inputs(90, seed=4, unknown=True)[0]


def all_pairs(mu, labels):
    a, b = torch.triu_indices(len(mu), len(mu), offset=1)
    return (mu[a].double() * mu[b].double()).sum(1), labels[a] == labels[b]


def test_numbers_are_those_of_the_metrics(device):
    la, x, labels, other = both(device)
    found = evaluate(la, loader(x, labels), unknown=loader(other), ks=(1, 20), alphas=(0.05, 0.2), n_samples=7)

    known, unknown = la(x.to(device)), la(other.to(device))
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(known.mu.cpu(), k=20), labels)
    right = metrics.average_precision_at_k(ranking, 1)
    uncertainty, novelty = known.uncertainty.cpu().double(), known.novelty.cpu()
    samples = la.predictive_samples(
        x.to(device), n_samples=7, joint=True, generator=torch.Generator(device).manual_seed(0)
    ).cpu()
    wanted = {
        "recall@1": metrics.recall_at_k(ranking, 1),
        "recall@20": metrics.recall_at_k(ranking, 20),
        "map@1": metrics.map_at_k(ranking, 1),
        "map@20": metrics.map_at_k(ranking, 20),
        "ausc": metrics.ausc(uncertainty, right),
        "r_auroc": metrics.auroc(uncertainty[right == 1], uncertainty[right == 0]),
        "ece": metrics.retrieval_ece(samples, labels),
        "brier": metrics.retrieval_brier(samples, labels),
        "eer": metrics.equal_error_rate(*all_pairs(known.mu.cpu(), labels)),
        "auroc": metrics.auroc(novelty, unknown.novelty.cpu()),
        "auprc": metrics.auprc(novelty, unknown.novelty.cpu()),
        "flagged_known@0.05": float((~known.is_known(0.05)).double().mean()),
        "flagged_unknown@0.05": float((~unknown.is_known(0.05)).double().mean()),
        "flagged_known@0.2": float((~known.is_known(0.2)).double().mean()),
        "flagged_unknown@0.2": float((~unknown.is_known(0.2)).double().mean()),
    }
    near = torch.cdist(known.mu.cpu(), known.mu.cpu()).fill_diagonal_(9).sort()
    far = torch.cdist(unknown.mu.cpu(), known.mu.cpu()).sort()
    votes = [(labels[i[:, :10]] != labels[i[:, :1]]).double().mean(1) for i in (near.indices, far.indices)]
    distance = [side.values[:, 0].double() for side in (near, far)]
    angles = [side.uncertainty.cpu().double() for side in (known, unknown)]
    # Of the features, the distances of their directions; the fit kept all 200 of its inputs.
    phi, of_other, trained = (la.model.model[:3](side.to(device)).detach() for side in (x, other, inputs(200, 1)[0]))
    rivals = {}
    for side, out in ((phi, known), (of_other, unknown)):
        cosines = torch.nn.functional.cosine_similarity(side[:, None], trained, dim=2)
        near = (2 - 2 * cosines).clamp(min=0).sqrt().sort().values[:, :10].mean(1).cpu()
        gaussians = (la.posterior.calibration or la.posterior.fitted.training_sample).gaussians
        distances = gaussians(unit_features(side)[0], out.raw_mean).cpu()
        for name, values in zip(("mahalanobis_outputs", "mahalanobis_relative"), distances.T, strict=True):
            rivals.setdefault(name, []).append(values)
        rivals.setdefault("knn_features", []).append(near)
    for name, sides in {**rivals, "distance": distance, "votes": votes, "uncertainty": angles}.items():
        wanted |= {f"auroc_{name}": metrics.auroc(*sides), f"auprc_{name}": metrics.auprc(*sides)}
    others = {name: sides[0] for name, sides in rivals.items()}
    others |= {"distance": distance[0], "votes": votes[0], "novelty": novelty}
    for name, scores in others.items():
        wanted[f"r_auroc_{name}"] = metrics.auroc(scores[right == 1], scores[right == 0])
    assert found.metrics.keys() == wanted.keys()
    # In float32, another size of the batch may exchange two scores that are equal up to rounding.
    assert found.metrics == pytest.approx(wanted, abs=1e-4)
    assert not found.missing
    assert found.counts == {"test": 150, "unknown": 90, "gallery": 0, "classes": 4}
    # The case would prove little if everything were right, or nothing found.
    assert 0 < wanted["flagged_unknown@0.05"] < 1
    assert 0.5 < wanted["recall@1"] < 1


def test_pairs(device, monkeypatch):
    la, x, labels, _ = both(device)
    found = evaluate(la, loader(x, labels), n_samples=0).pairs
    scores, same = all_pairs(la(x.to(device)).mu.cpu(), labels)
    assert (found.n_same, found.n_different) == (int(same.sum()), int((~same).sum()))
    _, matched, missed = metrics.det_curve(scores, same)
    of_metrics = torch.stack([matched, missed], 1)
    points = torch.tensor(found.curve, dtype=torch.float64)
    assert len(points) > 50
    assert float(torch.cdist(points, of_metrics).amin(1).max()) < 1e-3
    for k in range(2, 5):
        assert (points[:, 0] <= 0.1**k).any()
    # A sample: seeded, of both kinds, about as good.
    monkeypatch.setattr(measure, "_MOST_PAIRS", 2000)
    first, again, other = (evaluate(la, loader(x, labels), n_samples=0, seed=seed).pairs for seed in (0, 0, 1))
    assert (first.n_same, first.n_different) == (2000, 2000)
    assert first == again != other
    assert first.eer == pytest.approx(found.eer, abs=0.05)
    for those in (torch.arange(4), torch.zeros(4, dtype=torch.long)):
        missing = evaluate(la, loader(x[:4], those), n_samples=0).missing
        assert "no pairs of one class, or none of two" in missing["pairs"]


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


def test_no_novelty_marks_what_another_score_flags(device):
    la = fitted.__wrapped__(device, calibrated=0)
    la.calibrate(loader(inputs(100, seed=2)[0]), score="uncertainty")
    steps = evaluate(la, loader(*inputs(50, seed=3)), n_samples=0).thresholds.steps
    assert any(step.known for step in steps)
    assert all(step.novelty is None for step in steps)


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


def test_without_a_calibration(device):
    _, x, labels, other = both(device)
    # A posterior warns once.
    la = fitted.__wrapped__(device, calibrated=0)
    with pytest.warns(OptimisticPValueWarning):
        found = evaluate(la, loader(x, labels), unknown=loader(other), n_samples=0)
    assert not found.thresholds.calibrated
    assert found.thresholds.n_compared == 200
    assert found.thresholds.steps[0].deviation is None
    assert "auroc" in found.metrics


def test_few_points(device):
    la, x, labels, _ = both(device)
    found = evaluate(la, loader(x[:4], torch.tensor([0, 0, 1, 1])), ks=(1, 3, 4), alphas=(0.0001, 0.5), n_samples=2)
    assert set(found.retrieval.recall) == {1, 3}
    assert "recall@4, map@4" in found.missing
    assert "flagged_known@0.0001" in found.missing
    alone = evaluate(la, loader(x[:1], labels[:1]), n_samples=2)
    assert "no neighbour" in alone.missing["retrieval"]
    strangers = evaluate(la, loader(x[:4], torch.arange(4)), n_samples=2)
    assert "nothing right to find" in strangers.missing["retrieval"]
    for gallery, all_are in ((labels[:4], "right"), (labels[:4].roll(1), "wrong")):
        # Each finds itself, under its own label or another one.
        with pytest.warns(UserWarning, match="in the gallery too"):
            found = evaluate(la, loader(x[:4], labels[:4]), gallery=loader(x[:4], gallery), n_samples=0)
        assert f"Every nearest neighbour is {all_are}" in found.missing["r_auroc"]
        assert found.errors.n_wrong == 4 * (all_are == "wrong")


@each(
    "options, error, names",
    [
        ({"ks": (0,)}, InputError, "ks"),
        ({"alphas": (1.5,)}, InputError, "alpha"),
        ({"n_samples": -1}, InputError, "n_samples"),
        ({"n_shown": 2.0}, InputError, "n_shown"),
        ({"class_names": "abc"}, InputTypeError, "class_names"),
        ({"unknown": []}, InputError, "unknown"),
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
        ([(x, labels), x], "labels in every batch"),
        (Data([(x, labels)], ids=["a"]), "test: ids"),
    ):
        with pytest.raises(InputError, match=names):
            evaluate(la, test)

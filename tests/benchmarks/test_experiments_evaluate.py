"""From predictions to figures, with a method that says what it is told."""

import dataclasses

import pytest
import torch

from benchmarks.experiments import plan
from benchmarks.experiments.data import RetrievalData, TensorSplit
from benchmarks.experiments.evaluate import evaluate
from benchmarks.experiments.methods import Method, Prediction, Setting
from benchmarks.experiments.plan import OWN
from contrastive_curvature import metrics


class Told(Method):
    """Embeds and scores by lookup: an image's first pixel is its number."""

    name = "told"

    def __init__(self, table, scores, samples=None, metric="cosine"):
        super().__init__(Setting())
        self.table, self.scores, self.drawn, self.metric = table, scores, samples, metric

    def _rows(self, split):
        return split.pixels[:, 0, 0, 0].long()

    def fit(self, data, seed, folder, base=None):
        raise NotImplementedError

    def predict(self, split):
        rows = self._rows(split)
        scores = {name: score[rows] for name, score in self.scores.items()}
        more = {name: scores.pop(name, None) for name in ("novelty", "p_value")}
        return Prediction(self.table[rows], scores.pop(OWN, None), scores, seconds=1.5, metric=self.metric, **more)

    def samples(self, split, n_samples, seed):
        if self.drawn is None:
            return None
        return (sample[self._rows(split)] for sample in self.drawn[:n_samples])

    def state_dict(self):
        return {}

    def load_state_dict(self, state, data):
        pass


def split(numbers, targets):
    pixels = torch.zeros(len(numbers), 1, 8, 8, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = numbers.to(torch.uint8)
    return TensorSplit(pixels, targets)


NUMBERS = torch.arange(90)
TABLE = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
SCORES = {OWN: torch.rand(90, generator=torch.Generator().manual_seed(1)), "other": torch.arange(90.0)}
LABELS = NUMBERS % 4


def closed(**changes):
    data = RetrievalData("fake", "Fake", "Other", split(NUMBERS[:40], LABELS[:40]), split(NUMBERS[:40], LABELS[:40]))
    return dataclasses.replace(data, **{"ood": split(NUMBERS[60:], LABELS[60:])} | changes)


def test_closed_set_figures_are_those_of_the_metrics():
    samples = torch.randn(6, 90, 4)
    found = evaluate(Told(TABLE, SCORES, samples), closed(), n_votes=5, seed=0)
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(TABLE[:40], k=10), LABELS[:40])
    precision = metrics.average_precision_at_k(ranking, 1)
    wanted = {f"map_at_{k}": metrics.map_at_k(ranking, k) for k in (1, 5, 10)}
    wanted |= {f"recall_at_{k}": metrics.recall_at_k(ranking, k) for k in (1, 5, 10)}
    wanted["auroc"] = metrics.auroc(SCORES[OWN][:40], SCORES[OWN][60:])
    wanted["ausc"] = metrics.ausc(SCORES[OWN][:40], precision)
    wanted["ece"] = metrics.retrieval_ece(samples[:5, :40], LABELS[:40])
    wanted["brier"] = metrics.retrieval_brier(samples[:5, :40], LABELS[:40])
    assert {key: found.figures[key] for key in wanted} == pytest.approx(wanted)
    assert found.variants["other"]["auroc"] == 1.0
    assert found.seconds["predict"] == 3.0


def test_each_of_two_scores_stands_where_it_belongs():
    novelty = torch.rand(90, generator=torch.Generator().manual_seed(3))
    found = evaluate(Told(TABLE, {**SCORES, "novelty": novelty}), closed(), n_votes=5, seed=0)
    single = evaluate(Told(TABLE, SCORES), closed(), n_votes=5, seed=0)
    other = evaluate(Told(TABLE, {OWN: novelty}), closed(), n_votes=5, seed=0)
    ranks, detects = ("ausc", "r_auroc", "ausc_released"), ("auroc", "auprc", "auprc_released")
    assert other.variants[OWN]["auroc"] == metrics.auroc(novelty[:40], novelty[60:])
    for name, theirs in (("own", (single, other)), ("uncertainty", (single, single)), ("novelty", (other, other))):
        for group, one in zip((ranks, detects), theirs, strict=True):
            assert {key: found.variants[name][key] for key in group} == {key: one.variants[OWN][key] for key in group}
    # A score of its own right has one answer to both.
    assert found.variants["other"] == single.variants["other"]
    assert (found.figures["auroc"], found.figures["ausc"]) == (other.figures["auroc"], single.figures["ausc"])
    assert "flagged_known_0.05" not in found.figures


def test_flagged_are_the_p_values_up_to_alpha():
    p = (torch.arange(90) % 40 + 1).double() / 40
    p[60:75] = 0.05  # beside the two of 80 and 81
    held = split(NUMBERS[:30], LABELS[:30])
    told = Told(TABLE, {**SCORES, "novelty": SCORES[OWN], "p_value": p})
    found = evaluate(told, closed(calibration=held), n_votes=5, seed=0)
    # 30 images cannot say whether an image is among the most unusual hundredth.
    assert {key for key in found.figures if "flagged" in key} == {"flagged_known_0.05", "flagged_unknown_0.05"}
    assert found.figures["flagged_known_0.05"] == pytest.approx(2 / 40)
    assert found.figures["flagged_unknown_0.05"] == pytest.approx(17 / 30)
    assert torch.equal(found.p_values.outside, p[60:])
    known = evaluate(told, closed(calibration=held, ood=None), n_votes=5, seed=0)
    assert {key for key in known.figures if "flagged" in key} == {"flagged_known_0.05"}
    assert known.p_values.outside is None


def near(a, b):
    apart = torch.cdist(a, b)
    return apart <= 25, apart > 25


def places():
    positions = torch.rand(90, 2, generator=torch.Generator().manual_seed(2)).double() * 60
    return RetrievalData(
        "fake",
        "Places",
        "",
        split(NUMBERS[:40], positions[:40]),
        split(NUMBERS[:40], positions[:40]),
        gallery=split(NUMBERS[40:], positions[40:]),
        relation=near,
    )


def test_positions_with_a_gallery():
    data = places()
    found = evaluate(Told(TABLE, SCORES, torch.randn(5, 90, 4)), data, n_votes=5, seed=0)
    assert "auroc" not in found.figures
    assert "ece" not in found.figures
    nearest = metrics.nearest_neighbors(TABLE[:40], TABLE[40:], k=10)
    right = near(data.test.targets, data.gallery.targets)[0].gather(1, nearest)
    assert found.figures["recall_at_5"] == pytest.approx(float(right[:, :5].any(1).double().mean()))
    assert found.figures["ausc"] == pytest.approx(metrics.ausc(SCORES[OWN][:40], right[:, 0].double()))
    # the released code adds the uncertainty of the image that was retrieved, here from the gallery
    total = SCORES[OWN][:40].double() + SCORES[OWN][40:][nearest[:, 0]].double()
    kept = right[:, 0].double()[total.argsort(descending=True)]
    curve = torch.stack([kept[40 * i // 100 :].mean() for i in range(99)])
    assert found.variants[OWN]["ausc_released"] == pytest.approx(float(torch.trapezoid(curve) / 99))
    assert set(plan.COLUMNS[4]) <= set(found.figures)

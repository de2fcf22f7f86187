"""From predictions to figures, with a method that says what it is told."""

import dataclasses

import pytest
import torch

from benchmarks.experiments import config, demo, markdown, p_values, pictures, plan
from benchmarks.experiments.data import RetrievalData, TensorSplit
from benchmarks.experiments.evaluate import Scores, evaluate
from benchmarks.experiments.methods import Method, Prediction, Setting
from benchmarks.experiments.plan import OWN
from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, UnsupportedError


class Told(Method):
    """Embeds and scores by lookup: an image's first pixel is its number."""

    name, title = "told", "Told"

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


def test_a_euclidean_method_is_retrieved_by_distance():
    table = TABLE * torch.linspace(0.1, 5, 90)[:, None]
    samples = table + 0.3 * torch.randn(6, 90, 4, generator=torch.Generator().manual_seed(7))
    found = evaluate(Told(table, SCORES, samples, "euclidean"), closed(), n_votes=5, seed=0)
    by_angle = evaluate(Told(table, SCORES, samples), closed(), n_votes=5, seed=0)
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(table[:40], k=10, metric="euclidean"), LABELS[:40])
    assert found.figures["map_at_5"] == metrics.map_at_k(ranking, 5) != by_angle.figures["map_at_5"]
    assert found.figures["ece"] == metrics.retrieval_ece(samples[:5, :40], LABELS[:40], metric="euclidean")
    assert found.figures["ece"] != by_angle.figures["ece"]
    assert torch.equal(found.embeddings["inside"], table[:40])
    torch.testing.assert_close(by_angle.embeddings["inside"].norm(dim=1), torch.ones(40))


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


def test_the_page_has_the_binomial_error_of_what_is_flagged():
    figures = {"flagged_known_0.05": {"mean": 0.04}, "flagged_unknown_0.05": {"mean": 0.5}}
    data = {"title": "Fake", "ood_title": "Other", "test": 600, "ood": 100, "calibration": 400}
    text = demo.flagged_markdown(figures, data)
    assert "| test images, Fake | 0.040 ± 0.008 |" in text
    assert "| out of distribution, Other | 0.500 ± 0.050 |" in text
    assert "scatters around it by 0.011." in text
    assert "α = 0.01" not in text
    assert demo.flagged_markdown({}, data) == ""


@pytest.mark.parametrize("outside", [True, False])
def test_the_curve_of_p_values_is_the_share_that_is_flagged(outside):
    inside = torch.linspace(0.01, 1, 100, dtype=torch.float64)
    scores = Scores(inside, torch.full((7,), 0.01, dtype=torch.float64) if outside else None)
    figure = p_values.draw_p_values(closed(), scores, "told")
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    alphas, shares = drawn["Fake"].get_data()
    for alpha, share in zip(alphas, shares, strict=True):
        assert share == pytest.approx(float((inside <= alpha).double().mean()))
    assert ("out: Other" in drawn) == outside
    assert {"threshold α = 0.01", "threshold α = 0.05"} <= set(drawn)


def test_without_a_score_there_are_no_figures_of_one():
    found = evaluate(Told(TABLE, {}), closed(), n_votes=5, seed=0)
    assert set(found.figures) == {f"{kind}_at_{k}" for kind in ("map", "recall") for k in (1, 5, 10)}
    assert found.variants == found.scores == {}


def test_open_set_queries_have_no_calibration():
    found = evaluate(Told(TABLE, SCORES, torch.randn(5, 90, 4)), closed(open_set=True), n_votes=5, seed=0)
    assert "ece" not in found.figures
    assert found.calibration is None


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


def test_the_table_of_places_shows_recall():
    found = evaluate(Told(TABLE, SCORES), places(), n_votes=2, seed=0)
    row = {
        "figures": {key: {"mean": value, "std": None, "n": 1} for key, value in found.figures.items()},
        "variants": {},
        "seconds": {},
        "seeds": [0],
    }
    options = dict.fromkeys(
        (
            "dim",
            "epochs",
            "batch_size",
            "n_samples",
            "ece_samples",
            "lr",
            "margin",
            "memory_factor",
            "dropout_passes",
            "train_size",
        ),
        1,
    )
    options |= {"table": 4, "data": "msls", "network": "resnet50", "per_class": None, "ood": None}
    options |= dict.fromkeys(("distance", "pd_fix", "negative_weight"))
    sizes = {"title": "MSLS", "ood_title": None, "train": 40, "test": 40, "ood": None, "gallery": 50}
    text = markdown.markdown({"config": options, "data": sizes, "rows": {"pfe": row}, "cells": [], "failed": []})
    assert "|  | R@1 | R@5 | R@10 | M@5 | M@10 | AUSC | R-AUROC | runs |" in text
    assert f"| PFE | {found.figures['recall_at_1']:.3f} |" in text
    assert "| *paper, MSLS validation* | *0.77* | *0.88* | *0.90* | *0.61* | *0.56* | *0.73* |" in text


def test_images_that_do_not_suit_are_refused():
    import benchmarks.experiments.cli as cli

    options = cli.parse(["--table", "2", "--data", "digits", "--batch-size", "8"])
    config.check_data(options, closed())
    with pytest.raises(InputError, match="more than 10"):
        config.check_data(options, closed(test=split(NUMBERS[:9], LABELS[:9])))
    with pytest.raises(InputError, match="--network fashionmnist: expected images"):
        config.check_data(dataclasses.replace(options, network="fashionmnist"), closed())
    with pytest.raises(UnsupportedError, match="per_class"):
        config.check_data(dataclasses.replace(options, per_class=4), places())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8)])
@pytest.mark.parametrize("low", [0.0, -2.0])
def test_pictures_are_shown_within_the_range_of_pixels(shape, low):
    image = torch.rand(shape) * (1 - low) * 2 + low if low else torch.rand(shape)
    pixels, colours = pictures._shown(image)
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    assert (colours == "gray") == (shape[0] == 1)
    assert pixels.shape[:2] == (8, 8)
    if not low:
        assert torch.equal(torch.as_tensor(pixels).flatten().sort().values, image.flatten().sort().values)


def test_scores_keep_their_parts():
    found = evaluate(Told(TABLE, SCORES), closed(), n_votes=2, seed=0)
    assert isinstance(found.scores[OWN], Scores)
    assert torch.equal(found.scores["other"].outside, SCORES["other"][60:])

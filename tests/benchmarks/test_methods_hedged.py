"""Hedged embeddings and their points as methods, and LAM on the points."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from benchmark_methods import fit, make_data, make_images, make_setting
from torch import nn

from benchmarks.experiments.data.split import TensorSplit
from benchmarks.experiments.methods import make_method
from benchmarks.experiments.methods.hedged import Hedged, HedgedPoint
from benchmarks.experiments.methods.hedged_steps import HedgedStep, PairTraining, PointStep, choose_pairs, mixture
from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hedged import self_mismatch, vib_objective

KINDS = {
    "point_soft": (HedgedPoint, {}),
    "point_hard": (HedgedPoint, {"loss": "hard"}),
    "point_drawn": (HedgedPoint, {"pairs": "drawn"}),
    "hedged": (Hedged, {}),
    "hedged_log_drawn": (Hedged, {"average": "log", "pairs": "drawn"}),
    "mixture": (Hedged, {"components": 2, "divergence": "sampled"}),
}


def setting_of(**changes):
    return make_setting(**{"dim": 2, "epochs": 3, "lr": 0.003} | changes)


def trained(kind, folder, data=None, setting=None, **more):
    made, options = KINDS[kind]
    method = made(setting_of() if setting is None else setting, **{"batches": 20} | options | more)
    folder.mkdir(parents=True, exist_ok=True)
    method.fit(make_data() if data is None else data, 0, folder)
    return method


@pytest.fixture(scope="module", params=list(KINDS))
def fitted(request, tmp_path_factory):
    return request.param, trained(request.param, tmp_path_factory.mktemp(request.param))


def test_learns_classes_that_can_be_told_apart(fitted):
    _, method = fitted
    data = make_data()
    found = method.predict(data.test)
    assert found.metric == "euclidean"
    assert found.mean.shape == (len(data.test), 2)
    nearest = metrics.nearest_neighbors(found.mean, k=1, metric="euclidean")[:, 0]
    right = (data.test.targets[nearest] == data.test.targets).float().mean()
    assert right.item() > 0.9  # by chance, 2 of 11


def test_matches_are_likelier_than_mismatches(fitted):
    kind, method = fitted
    data = make_data()
    order = data.test.targets.argsort(stable=True)
    test = data.test.take(order)
    # Three of each of the four classes: a shift by one leaves two of three in their class, one by three none.
    near, far = (test.take(torch.arange(12).roll(-step)) for step in (1, 3))
    if kind == "point_hard":
        with pytest.raises(UnsupportedError, match="soft loss"):
            method.match_probability(test, near)
        return
    inside = test.targets == near.targets
    matching, other = method.match_probability(test, near)[inside], method.match_probability(test, far)
    assert matching.mean().item() > other.mean().item() + 0.3
    with pytest.raises(InputError, match="as many as first"):
        method.match_probability(test, near.take(torch.arange(3)))


def test_saved_and_loaded_is_the_same(fitted, tmp_path):
    kind, method = fitted
    data = make_data()
    method.save(tmp_path / "method.pt")
    made, options = KINDS[kind]
    again = made(method.setting, **options)
    again.load(tmp_path / "method.pt", data)
    assert torch.equal(method.predict(data.test).mean, again.predict(data.test).mean)
    assert torch.equal(method.draw(data.test, 8, 3), again.draw(data.test, 8, 3))
    if kind != "point_hard":
        assert method.match == again.match


@pytest.mark.parametrize("kind", ["hedged", "mixture"])
@pytest.mark.parametrize("reads", [3, 8])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(kind, reads, tmp_path):
    class Fragile(TensorSplit):
        left = math.inf

        def images(self, rows):
            if self.left <= 0:
                raise InterruptedError
            self.left -= 1
            return super().images(rows)

    data = make_data()
    data = dataclasses.replace(data, train=Fragile(data.train.pixels, data.train.targets))
    setting = setting_of(checkpoint_every=1, epochs=2)
    whole = trained(kind, tmp_path / "whole", data, setting, batches=5)
    data.train.left = reads
    with pytest.raises(InterruptedError):
        trained(kind, tmp_path / "parts", data, setting, batches=5)
    data.train.left = math.inf
    np.random.seed(5)  # noqa: NPY002  another process has other random numbers
    torch.manual_seed(5)
    resumed = trained(kind, tmp_path / "parts", data, setting, batches=5)
    assert torch.equal(whole.draw(data.test, 8, 0), resumed.draw(data.test, 8, 0))
    assert whole.match == resumed.match


@pytest.mark.parametrize("kind", ["hedged", "mixture"])
def test_scores_are_those_of_the_mixture(kind, tmp_path):
    method = trained(kind, tmp_path, setting=setting_of(epochs=1), batches=5)
    data = make_data()
    components = method.components
    mean, variance = method.mixtures(data.test)
    assert mean.shape == variance.shape == (12, components, 2)
    found = method.predict(data.test)
    assert torch.equal(found.mean, mean.mean(1))
    a, b = method.match
    many = self_mismatch(mean, variance, a, b, n_samples=2000, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(found.uncertainty, many, atol=0.2)
    assert torch.equal(found.uncertainty, method.predict(data.test).uncertainty)
    draws = torch.stack(list(method.samples(data.test, 4000, 1)), 1)
    assert draws.shape == (12, 4000, 2)
    # Independent draws of the mixture have its mean and its variance, to five standard errors.
    total = variance.mean(1) + mean.var(1, correction=0)
    assert bool(((draws.mean(1) - mean.mean(1)).abs() < 5 * (total / 4000).sqrt()).all())
    assert torch.allclose(draws.var(1).mean(1), found.variants["variance"], rtol=0.15)
    strata = method.draw(data.test, 8, 0)
    assert strata.shape == (12, 8, 2)
    assert torch.equal(strata, method.draw(data.test, 8, 0))
    assert not torch.equal(strata, method.draw(data.test, 8, 1))


def test_the_mixture_of_raw_outputs():
    raw = torch.arange(12.0).reshape(1, 12) / 10  # 3 components in 2 dimensions
    mean, variance = mixture(raw, 3, 0.01)
    assert torch.equal(mean, raw[:, :6].reshape(1, 3, 2))
    shift = math.log(math.exp(0.01) - 1)
    wanted = torch.log1p((raw[:, 6:].double() + shift).exp()).reshape(1, 3, 2) + 1e-6
    assert torch.allclose(variance.double(), wanted, rtol=1e-5)
    assert float(mixture(torch.zeros(1, 4), 1, 0.01)[1].max()) == pytest.approx(0.01, rel=1e-3)
    assert float(mixture(torch.full((1, 4), -200.0), 1, 0.01)[1].min()) == pytest.approx(1e-6)


class TestPairsOfABatch:
    TARGETS = torch.tensor([0, 0, 1, 2, 1, 1, 0, 3])

    def test_drawn_ones_are_neighbours(self):
        i, j, weight = choose_pairs(self.TARGETS, "drawn", 100)
        assert i.tolist() == [0, 2, 4, 6]
        assert j.tolist() == [1, 3, 5, 7]
        assert torch.equal(weight, torch.full((4,), 0.25))

    def test_of_a_batch_all_matches_and_some_mismatches(self):
        i, j, weight = choose_pairs(self.TARGETS, "batch", 100)
        pairs = set(zip(i.tolist(), j.tolist(), strict=True))
        assert pairs == {(x, y) for y in range(8) for x in range(y)}  # 28, of which 6 match
        same = self.TARGETS[i] == self.TARGETS[j]
        assert int(same.sum()) == 6
        assert weight[same].sum() == pytest.approx(0.5)
        assert torch.allclose(weight[~same], torch.full((22,), 0.5 / 22))
        torch.manual_seed(0)
        i, j, weight = choose_pairs(self.TARGETS, "batch", 5)
        same = self.TARGETS[i] == self.TARGETS[j]
        assert (int(same.sum()), int((~same).sum())) == (6, 5)
        assert len(set(zip(i.tolist(), j.tolist(), strict=True))) == 11
        assert weight[~same].sum() == pytest.approx(0.5)

    @pytest.mark.parametrize("targets", [[4, 4, 4, 4], [0, 1, 2, 3]])
    def test_weights_of_one_kind_only_have_the_sum_one(self, targets):
        for pairs in ("drawn", "batch"):
            assert choose_pairs(torch.tensor(targets), pairs, 10)[2].sum() == pytest.approx(1.0)


def test_the_step_is_the_packages_objective():
    # A variance of almost nothing leaves no noise, so that two sets of samples give one loss.
    targets = torch.tensor([0, 0, 1, 2])
    raw = torch.tensor([[0.0, 0.1], [0.3, 0.2], [-0.5, 1.0], [0.9, -0.4]], requires_grad=True)
    encoder = nn.Identity()
    training = PairTraining(3.0, 1.0, 2.0, "drawn", None, "adam")
    options = {
        "components": 1,
        "first_variance": 0.1,
        "kl_weight": 0.1,
        "n_samples": 4,
        "average": "probability",
        "divergence": "bound",
    }
    step = HedgedStep(encoder, training, **options)
    outputs = torch.cat([raw, torch.full((4, 2), -200.0)], 1)
    mean, variance = mixture(outputs, 1, 0.1)
    first, second = ((mean[at::2], variance[at::2]) for at in (0, 1))
    wanted = vib_objective(first, second, targets[::2] == targets[1::2], *step.match(), kl_weight=0.1, n_samples=4)
    found = step(outputs, targets)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)
    groups = step.parameter_groups(0.1)
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    assert step.optimizer is torch.optim.Adam
    point = PointStep(nn.Identity(), training, margin=1.0)(raw, targets)
    near, far = (raw[0] - raw[1]).norm() ** 2, (1 - (raw[2] - raw[3]).norm()).clamp(min=0) ** 2
    assert point.item() == pytest.approx((near + far).item() / 2)


@pytest.mark.parametrize(
    ("made", "options", "named"),
    [
        (Hedged, {"components": 0}, "components"),
        (Hedged, {"components": 3}, "n_samples"),
        (Hedged, {"first_variance": 0.0}, "first_variance"),
        (Hedged, {"kl_weight": -1.0}, "kl_weight"),
        (Hedged, {"kl_weight": math.nan}, "kl_weight"),
        (Hedged, {"n_samples": 0}, "n_samples"),
        (Hedged, {"average": "none"}, "average"),
        (Hedged, {"divergence": "exact"}, "divergence"),
        (Hedged, {"a": 0.0}, "a"),
        (Hedged, {"match_lr": 0.0}, "match_lr"),
        (Hedged, {"batches": 0}, "batches"),
        (Hedged, {"pairs": "all"}, "pairs"),
        (Hedged, {"optimizer": "sgd"}, "optimizer"),
        (HedgedPoint, {"loss": "triplet"}, "loss"),
        (HedgedPoint, {"loss": "hard", "margin": 0.0}, "margin"),
        (HedgedPoint, {"b": math.inf}, "b"),
    ],
)
def test_impossible_options_are_refused(made, options, named):
    with pytest.raises(InputError, match=named):
        made(setting_of(), **options)


def test_settings_without_classes_or_pairs_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="class labels"):
        Hedged(setting_of(relation=lambda a, b: (a, b)))
    with pytest.raises(InputError, match="batch_size"):
        Hedged(setting_of(batch_size=18))
    with pytest.raises(InputError, match="fit or load"):
        Hedged(setting_of()).predict(make_data().test)


def test_an_image_that_cannot_be_told_is_less_certain(tmp_path):
    # Half of the images are all grey: what they show cannot be learned, nor kept in mind, and hedging pays.
    pixels, labels = make_images(30, 0)
    hidden = torch.arange(len(labels)) % 8 < 4
    pixels[hidden] = 60
    data = dataclasses.replace(make_data(), train=TensorSplit(pixels, labels))
    method = Hedged(setting_of(), first_variance=1.0, a=1.0, b=2.0, batches=25)
    method.fit(data, 0, tmp_path)
    score = method.predict(data.train).uncertainty
    assert score[hidden].median().item() > 1.5 * score[~hidden].median().item()


def test_equal_images_have_equal_scores(tmp_path):
    data = make_data()
    method = fit("hedged", make_setting(), tmp_path, data, components=2)
    twice = method.predict(data.test.take(torch.tensor([3, 0, 3, 1, 0])))
    assert torch.equal(twice.uncertainty[[0, 1]], twice.uncertainty[[2, 4]])
    alone = method.predict(data.test)
    torch.testing.assert_close(twice.uncertainty, alone.uncertainty[[3, 0, 3, 1, 0]], rtol=0, atol=1e-6)
    assert alone.uncertainty.unique().numel() > 1


def test_options_that_give_outputs_another_meaning_are_refused(tmp_path):
    data = make_data()
    method = fit("hedged", make_setting(), tmp_path / "a", data)
    method.save(tmp_path / "m.pt")
    for options in ({"first_variance": 1.0}, {"components": 2}):
        with pytest.raises(InputError, match=f"{next(iter(options))}: expected .*, as in training"):
            make_method("hedged", make_setting(), **options).load(tmp_path / "m.pt", data)
    point = fit("hedged_point", make_setting(), tmp_path / "b", data, loss="hard")
    point.save(tmp_path / "p.pt")
    with pytest.raises(InputError, match="loss: expected 'hard', as in training"):
        make_method("hedged_point", make_setting()).load(tmp_path / "p.pt", data)


@pytest.mark.parametrize(
    "options", [{"margin": 2.0}, *({"loss": "hard", name: 2.0} for name in ("a", "b", "match_lr"))], ids=str
)
def test_options_of_the_other_loss_are_refused(options):
    with pytest.raises(UnsupportedError, match="None with loss="):
        make_method("hedged_point", make_setting(), **options)


def test_a_large_first_variance_does_not_overflow():
    _, variance = mixture(torch.zeros(1, 4), 1, 1e4)
    torch.testing.assert_close(variance, torch.full((1, 1, 2), 1e4))

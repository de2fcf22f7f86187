"""The triplet loss and the Bayesian one among the benchmarks' methods."""

import dataclasses

import pytest
import torch
from benchmark_methods import make_data, make_images, make_setting
from devices import DEVICES

from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from benchmarks.experiments.methods.triplet import (
    FORMS,
    MARGIN,
    TEMPERATURES,
    BayesianStep,
    BayesianTriplet,
    TripletDeterministic,
    TripletStep,
    calibrated_temperature,
    gaussians,
    mine_triplets,
    squared_distances,
)
from contrastive_curvature import triplet, vmf
from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics import brier_score, nearest_neighbors, retrieval_votes

METHODS = {
    "triplet": (TripletDeterministic, {}),
    "gaussian": (BayesianTriplet, {}),
    "vmf": (BayesianTriplet, {"distribution": "vmf"}),
}
BAYESIAN = [name for name in METHODS if name != "triplet"]


def fitted(name, folder, setting=None, data=None, seed=0):
    cls, options = METHODS[name]
    folder.mkdir(exist_ok=True)
    method = cls(make_setting() if setting is None else setting, **options)
    method.fit(make_data() if data is None else data, seed, folder)
    return method


class Fragile(TensorSplit):
    """Fails when a batch too many is read, as a killed training does."""

    reads = float("inf")

    def images(self, rows):
        if self.reads <= 0:
            raise InterruptedError
        self.reads -= 1
        return super().images(rows)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("margin", [0.0, 0.5, 1e9])
def test_triplets_are_those_of_a_loop(device, margin):
    z, labels = points()
    mined = mine_triplets(z.to(device), labels.to(device), margin, None)
    listed = list(zip(*(part.tolist() for part in mined), strict=True))
    wanted = by_loop(z, labels, margin)
    assert set(listed) == wanted
    assert len(listed) == len(wanted)
    assert 0 < len(wanted) <= len(by_loop(z, labels, 1e9))


@pytest.mark.parametrize("margin", [0.5, 1e9])
def test_negatives_are_a_random_choice_of_each_pairs(margin):
    z, labels = points()
    wanted = by_loop(z, labels, margin)
    of_pair = {}
    for a, p, n in wanted:
        of_pair.setdefault((a, p), set()).add(n)
    torch.manual_seed(0)
    seen = set()
    for _ in range(60):
        listed = list(zip(*(part.tolist() for part in mine_triplets(z, labels, margin, 2)), strict=True))
        assert len(set(listed)) == len(listed)
        assert set(listed) <= wanted
        for pair, negatives in of_pair.items():
            assert sum((a, p) == pair for a, p, _ in listed) == min(2, len(negatives))
        seen |= set(listed)
    assert seen == wanted


def test_a_relation_says_which_images_match():
    def close(a, b):
        far = (a[:, None] - b).abs()
        return far < 1.5, far > 2.5

    z, targets = points()[0][:6], torch.tensor([0.0, 1.0, 2.0, 4.0, 5.0, 9.0])
    mined = mine_triplets(z, targets, 1e9, None, close)
    found = set(zip(*(part.tolist() for part in mined), strict=True))
    assert found == {
        (a, p, n)
        for a in range(6)
        for p in range(6)
        for n in range(6)
        if a != p and abs(targets[a] - targets[p]) < 1.5 and abs(targets[a] - targets[n]) > 2.5
    }


def test_squared_distances_do_not_cancel():
    z = torch.tensor([[1e4, 0.0], [1e4 + 1e-2, 0.0]])
    wanted = (z[1] - z[0]).square().sum()
    assert squared_distances(z).tolist() == [[0.0, wanted.item()], [wanted.item(), 0.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", METHODS)
def test_it_learns_classes(name, device, tmp_path):
    data = make_data()
    method = fitted(name, tmp_path, make_setting(device, epochs=6), data)
    found = method.predict(data.test)
    nearest = nearest_neighbors(found.mean, k=1, metric=found.metric).squeeze(1)
    labels = data.test.targets
    assert (labels[nearest] == labels).double().mean() > 0.9


@pytest.mark.parametrize("name", METHODS)
def test_it_is_saved_and_loaded(name, tmp_path):
    setting, data = make_setting(), make_data()
    method = fitted(name, tmp_path, setting, data)
    method.save(tmp_path / "saved.pt")
    again = METHODS[name][0](setting, **METHODS[name][1])
    with pytest.raises(InputError, match="fitted"):
        again.predict(data.test)
    again.load(tmp_path / "saved.pt", data)
    first, second = method.predict(data.test), again.predict(data.test)
    assert torch.equal(first.mean, second.mean)
    assert first.metric == second.metric
    if name == "triplet":
        assert first.uncertainty is None
        assert method.samples(data.test, 3, 0) is None
        return
    assert torch.equal(first.uncertainty, second.uncertainty)
    for one, other in zip(method.samples(data.test, 3, 5), again.samples(data.test, 3, 5), strict=True):
        assert torch.equal(one, other)


def test_an_encoder_of_another_meaning_is_refused(tmp_path):
    data = make_data()
    fitted("vmf", tmp_path).save(tmp_path / "saved.pt")
    with pytest.raises(InputError, match=r"distribution.*'vmf', as in training"):
        BayesianTriplet(make_setting()).load(tmp_path / "saved.pt", data)


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_training_ends_as_an_uninterrupted_one(name, tmp_path):
    data = make_data()
    fragile = Fragile(data.train.pixels, data.train.targets)
    data, setting = dataclasses.replace(data, train=fragile), make_setting(epochs=3, checkpoint_every=1)
    whole = fitted(name, tmp_path / "whole", setting, data)
    fragile.reads = 5
    with pytest.raises(InterruptedError):
        fitted(name, tmp_path / "parts", setting, data)
    fragile.reads = float("inf")
    torch.manual_seed(123)
    resumed = fitted(name, tmp_path / "parts", setting, data)
    assert torch.equal(whole.predict(data.test).mean, resumed.predict(data.test).mean)
    other = fitted(name, tmp_path / "other", setting, data, seed=1)
    assert not torch.equal(whole.predict(data.test).mean, other.predict(data.test).mean)


def test_a_calibrated_temperature_is_kept(tmp_path):
    data = make_data()
    calibrated = BayesianTriplet(make_setting())
    with pytest.raises(InputError, match="fitted"):
        _ = calibrated.temperature
    calibrated.fit(data, 0, tmp_path)
    assert calibrated.temperature in TEMPERATURES
    calibrated.save(tmp_path / "saved.pt")
    again = BayesianTriplet(make_setting())
    again.load(tmp_path / "saved.pt", data)
    assert again.temperature == calibrated.temperature


def test_places_have_no_votes_to_calibrate(tmp_path):
    def close(a, b):
        same = a[:, None] == b
        return same, ~same

    data = make_data()
    positions = TensorSplit(data.train.pixels, data.train.targets.double())
    method = BayesianTriplet(make_setting(relation=close))
    method.fit(dataclasses.replace(data, train=positions, relation=close), 0, tmp_path)
    assert method.temperature == 1


def test_a_mean_of_zero_has_a_finite_uncertainty(tmp_path):
    data = make_data()
    method = fitted("gaussian", tmp_path, data=data)
    with torch.no_grad():
        for part in method.encoder.get_submodule("head").parameters():
            part[:3] = 0
    found = method.predict(data.test)
    assert not found.mean.any()
    assert bool(found.uncertainty.isfinite().all())
    assert found.uncertainty.min() > 1e20


@pytest.mark.parametrize("name", METHODS)
def test_a_last_batch_of_one_image_does_no_harm(name, tmp_path):
    pixels, labels = make_images(9, 0)
    data = RetrievalData("tiny", "tiny", "none", TensorSplit(pixels[:33], labels[:33]), make_data().test)
    assert bool(fitted(name, tmp_path, data=data).predict(data.test).mean.isfinite().all())


@pytest.mark.parametrize("method", [TripletDeterministic, BayesianTriplet])
@pytest.mark.parametrize(
    ("labels", "message"), [([0] * 40, "at least two classes"), (list(range(40)), "a class with at least 2 images")]
)
def test_labels_that_teach_nothing_are_refused(method, labels, message, tmp_path):
    data = make_data()
    data = dataclasses.replace(data, train=TensorSplit(data.train.pixels, torch.tensor(labels)))
    with pytest.raises(InputError, match=message):
        method(make_setting()).fit(data, 0, tmp_path)


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


@pytest.mark.parametrize("name", FORMS)
def test_outputs_become_means_and_variances(name):
    form = FORMS[name]
    raw = torch.cat([torch.randn(5, 3), torch.zeros(5, 1)], 1)
    mean, variance = gaussians(raw, form)
    torch.testing.assert_close(variance, torch.full((5, 1), form.first_variance + 1e-6), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean, torch.nn.functional.normalize(raw[:, :3]) if form.on_sphere else raw[:, :3])
    assert gaussians(raw - 1000, form)[1].min() >= 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_triplets_has_no_gradient(name):
    raw = torch.randn(4, 4, requires_grad=True)
    encoder = torch.nn.Identity()
    step = TripletStep(encoder) if name == "triplet" else BayesianStep(encoder, FORMS[name])
    loss = step(raw, torch.arange(4))
    loss.backward()
    assert loss.item() == 0
    assert not raw.grad.any()


@pytest.mark.parametrize("name", FORMS)
def test_samples_follow_the_distributions_times_the_temperature(name, tmp_path):
    data = make_data()
    method = fitted(name, tmp_path, data=data)
    with torch.no_grad():
        method.encoder.get_submodule("head").bias[3:] = -4.0 / method.form.gain
    method._temperature = 0.25
    mean, variance = method.distributions(data.test)
    drawn = torch.stack(list(method.samples(data.test, 500 if name == "vmf" else 4000, 0)))
    assert drawn.dtype == torch.float32
    if name == "gaussian":
        found = drawn.var(0).mean(1)
        torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=float(5 * (variance.max() / 4000).sqrt()))
        torch.testing.assert_close(found, 0.25 * variance.squeeze(1), rtol=5 * (2 / 12000) ** 0.5, atol=0)
    else:
        # One minus the cosine has nearly an exponential distribution, whose standard deviation is its mean.
        wanted = 1 - vmf.mean_resultant_length(4 / variance.double().squeeze(1), 3)
        found = 1 - (drawn * mean).double().sum(2).mean(0)
        torch.testing.assert_close(found, wanted, rtol=5 / 500**0.5, atol=0)


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


def test_uncertainty_is_the_variance_of_all_dimensions_relative_to_the_mean(tmp_path):
    data = make_data()
    method = fitted("gaussian", tmp_path, data=data)
    found, (mean, variance) = method.predict(data.test), method.distributions(data.test)
    assert found.metric == "euclidean"
    torch.testing.assert_close(found.uncertainty, 3 * variance.squeeze(1) / mean.norm(dim=1) ** 2)
    torch.testing.assert_close(found.variants["variance"], 3 * variance.squeeze(1))
    torch.testing.assert_close(found.variants["norm"], -mean.norm(dim=1))
    method = fitted("vmf", tmp_path / "sphere")
    found = method.predict(data.test)
    assert found.metric == "cosine"
    torch.testing.assert_close(found.uncertainty, 3 * method.distributions(data.test)[1].squeeze(1))

"""The triplet loss and the Bayesian one among the benchmarks' methods."""

import dataclasses

import pytest
import torch
from benchmark_methods import make_data, make_images, make_setting
from devices import DEVICES

from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from benchmarks.experiments.methods.bayesian_triplet import BayesianTriplet
from benchmarks.experiments.methods.triplet import TripletDeterministic
from benchmarks.experiments.methods.triplet_mining import mine_triplets, squared_distances
from benchmarks.experiments.methods.triplet_steps import BayesianStep, TripletStep, gaussians, raw_outputs
from benchmarks.experiments.methods.triplet_temperature import TEMPERATURES, calibrated_temperature
from contrastive_curvature import triplet, vmf
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.metrics import brier_score, nearest_neighbors, retrieval_votes

METHODS = {
    "triplet": (TripletDeterministic, {}),
    "gaussian": (BayesianTriplet, {"temperature": 1.0}),
    "normalized": (BayesianTriplet, {"normalized": True, "variance": "diagonal", "temperature": 1.0}),
    "vmf": (BayesianTriplet, {"distribution": "vmf", "temperature": 1.0}),
    "vmf_moments": (BayesianTriplet, {"distribution": "vmf", "moments": "vmf", "temperature": 1.0}),
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
                if margin is None or far < near + margin:
                    found.add((a, p, n))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("margin", [None, 0.0, 0.5])
def test_triplets_are_those_of_a_loop(device, margin):
    z, labels = points()
    mined = mine_triplets(z.to(device), labels.to(device), margin, None)
    listed = list(zip(*(part.tolist() for part in mined), strict=True))
    wanted = by_loop(z, labels, margin)
    assert set(listed) == wanted
    assert len(listed) == len(wanted)
    assert 0 < len(wanted) < (len(z) ** 3 if margin is None else len(by_loop(z, labels, None)))


@pytest.mark.parametrize("margin", [None, 0.5])
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
    mined = mine_triplets(z, targets, None, None, close)
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


@pytest.mark.parametrize("margin", [0.2, 1.0])
def test_the_triplet_loss_is_the_mean_of_what_is_above_zero(margin):
    z, labels = points()
    u = z / z.norm(dim=1, keepdim=True)
    terms = [
        (u[a] - u[p]).square().sum() - (u[a] - u[n]).square().sum() + margin for a, p, n in by_loop(u, labels, margin)
    ]
    found = TripletStep(torch.nn.Identity(), margin, None)(z, labels)
    torch.testing.assert_close(found, torch.stack(terms).mean())


@pytest.mark.parametrize("mining_margin", [0.0, 0.7, 4.0])
@pytest.mark.parametrize("name", BAYESIAN)
def test_the_bayesian_loss_is_the_packages_over_the_triplets(name, mining_margin):
    options = dataclasses.replace(
        METHODS[name][0](make_setting(), **METHODS[name][1]).options,
        mining_margin=mining_margin,
        negatives=None,
        margin=0.3,
    )
    raw, labels = points(dim=raw_outputs(3, options))
    mean, variance = gaussians(raw, 3, options)
    listed = sorted(by_loop(mean, labels, mining_margin))
    a, p, n = ((mean[list(part)], variance[list(part)]) for part in zip(*listed, strict=True))
    wanted = triplet.bayesian_triplet_loss(
        a,
        p,
        n,
        0.3,
        distribution=options.distribution,
        moments=options.moments,
        prior_variance=options.prior_variance if options.distribution == "gaussian" else None,
        kl_weight=options.kl_weight,
    )
    torch.testing.assert_close(BayesianStep(torch.nn.Identity(), 3, options)(raw, labels), wanted)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_triplets_has_no_gradient(name):
    cls, given = METHODS[name]
    method = cls(make_setting(), **given)
    if name == "triplet":
        step, raw = TripletStep(torch.nn.Identity(), 0.2, 8), torch.randn(4, 3, requires_grad=True)
    else:
        step = BayesianStep(torch.nn.Identity(), 3, method.options)
        raw = torch.randn(4, raw_outputs(3, method.options), requires_grad=True)
    loss = step(raw, torch.arange(4))
    loss.backward()
    assert loss.item() == 0
    assert not raw.grad.any()


@pytest.mark.parametrize("name", BAYESIAN)
def test_outputs_become_means_and_variances(name):
    options = METHODS[name][0](make_setting(), **METHODS[name][1], first_variance=0.3).options
    raw = torch.randn(5, raw_outputs(4, options))
    raw[:, 4:] = 0
    mean, variance = gaussians(raw, 4, options)
    assert variance.shape == (5, 4 if options.variance == "diagonal" else 1)
    torch.testing.assert_close(variance, torch.full_like(variance, 0.3 + 1e-6))
    if options.normalized:
        torch.testing.assert_close(mean, raw[:, :4] / raw[:, :4].norm(dim=1, keepdim=True))
    else:
        assert torch.equal(mean, raw[:, :4])
    raw[:, 4:] = -1000
    assert gaussians(raw, 4, options)[1].min() >= 1e-6
    raw[:, 4:] = 1000
    wanted = 1000 * options.variance_gain
    torch.testing.assert_close(gaussians(raw, 4, options)[1].max().item(), wanted, rtol=0.1, atol=0)


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


@pytest.mark.parametrize("name", BAYESIAN)
def test_samples_follow_the_distributions(name, tmp_path):
    data = make_data()
    method = fitted(name, tmp_path, data=data)
    with torch.no_grad():
        # Small variances, so that Gaussians put on the sphere stay close to it.
        method.encoder.get_submodule("head").bias[3:] = -4.0 / method.options.variance_gain
    mean, variance = method.distributions(data.test)
    drawn = torch.stack(list(method.samples(data.test, 500 if name.startswith("vmf") else 4000, 0)))
    assert drawn.dtype == torch.float32
    if method.options.normalized:
        torch.testing.assert_close(drawn.norm(dim=2), torch.ones(drawn.shape[:2]))
    if name == "gaussian":
        torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=float(5 * (variance.max() / 4000).sqrt()))
        torch.testing.assert_close(drawn.var(0).mean(1), variance.squeeze(1), rtol=5 * (2 / 12000) ** 0.5, atol=0)
    elif name.startswith("vmf"):
        # One minus the cosine has nearly an exponential distribution, whose standard deviation is its mean.
        wanted = 1 - vmf.mean_resultant_length(1 / variance.double().squeeze(1), 3)
        found = 1 - (drawn * mean).double().sum(2).mean(0)
        torch.testing.assert_close(found, wanted, rtol=5 / 500**0.5, atol=0)
    else:
        # Off the mean direction a sample has the variances of the tangential part, to first order.
        tangent = torch.eye(3) - mean.unsqueeze(2) * mean.unsqueeze(1)
        wanted = (tangent @ torch.diag_embed(variance) @ tangent).diagonal(dim1=1, dim2=2).sum(1)
        torch.testing.assert_close(drawn.var(0).sum(1), wanted, rtol=0.1, atol=0)


def test_the_temperature_has_the_best_votes():
    """Two overlapping clouds, with the votes' probabilities known but for their sampling."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100) % 2
    points = torch.stack([labels + 0.6 * torch.randn(100, generator=generator), torch.zeros(100)], 1)

    def draw(temperature):
        g = torch.Generator().manual_seed(1)
        return [points + (2 * temperature) ** 0.5 * torch.randn(points.shape, generator=g) for _ in range(30)]

    chosen, scores = calibrated_temperature(draw, labels, "euclidean")
    votes = {t: retrieval_votes(draw(t), labels, metric="euclidean") for t in TEMPERATURES}
    assert chosen == min(TEMPERATURES, key=lambda t: brier_score(votes[t], labels))
    assert scores == {t: brier_score(votes[t], labels) for t in TEMPERATURES}
    # Neither chance, whose score is about 1/2, nor votes that are all the same.
    assert scores[chosen] < min(scores[4.0] - 0.1, scores[1 / 1024] - 0.02)
    perfect = calibrated_temperature(lambda _: [labels.float().unsqueeze(1)] * 2, labels, "euclidean")
    assert perfect == (4.0, dict.fromkeys(TEMPERATURES, 0.0))


@pytest.mark.parametrize("name", BAYESIAN)
def test_samples_take_the_temperature_and_predictions_do_not(name, tmp_path):
    data = make_data()
    cls, options = METHODS[name]
    methods = []
    for temperature in (1.0, 0.25):
        methods.append(cls(make_setting(), **options | {"temperature": temperature}))
        methods[-1].fit(data, 0, tmp_path)
        assert methods[-1].temperature == temperature
    first, second = (method.predict(data.test) for method in methods)
    assert torch.equal(first.uncertainty, second.uncertainty)
    # Small variances, for which samples of all three scatter in proportion.
    with torch.no_grad():
        for method in methods:
            method.encoder.get_submodule("head").bias[3:] -= 4 / options.get(
                "variance_gain", method.options.variance_gain
            )
    wide, narrow = (torch.stack(list(method.samples(data.test, 400, 0))).var(0).mean() for method in methods)
    torch.testing.assert_close(wide / narrow, torch.tensor(4.0), rtol=0.1, atol=0)


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


def test_uncertainty_is_the_variance_of_all_dimensions_relative_to_the_mean(tmp_path):
    data = make_data()
    method = fitted("gaussian", tmp_path, data=data)
    found, (mean, variance) = method.predict(data.test), method.distributions(data.test)
    assert found.metric == "euclidean"
    assert torch.equal(found.mean, mean)
    torch.testing.assert_close(found.uncertainty, 3 * variance.squeeze(1) / mean.norm(dim=1) ** 2)
    torch.testing.assert_close(found.variants["variance"], 3 * variance.squeeze(1))
    torch.testing.assert_close(found.variants["norm"], -mean.norm(dim=1))
    method = fitted("normalized", tmp_path / "sphere")
    found = method.predict(data.test)
    assert found.metric == "cosine"
    torch.testing.assert_close(found.uncertainty, method.distributions(data.test)[1].sum(1))


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


def test_defaults_depend_on_where_the_means_are():
    """On the sphere as the documents have it, with the triplets of the deterministic method; off it with a prior."""
    on, off = (BayesianTriplet(make_setting(), normalized=normalized).options for normalized in (True, False))
    assert (on.mining_margin, on.kl_weight) == (TripletDeterministic(make_setting()).margin, 1e-6)
    assert (off.mining_margin, off.kl_weight, off.first_variance) == (1.0, 1e-3, 1.0)
    narrow = BayesianTriplet(make_setting(), prior_variance=0.2).options
    assert (narrow.mining_margin, narrow.first_variance) == (0.2, 0.2)
    assert BayesianTriplet(make_setting()).options == off
    vmf_options = BayesianTriplet(make_setting(), distribution="vmf").options
    assert vmf_options == dataclasses.replace(on, distribution="vmf")


def test_a_new_gaussian_is_the_prior_where_the_network_says_nothing():
    options = BayesianTriplet(make_setting(), prior_variance=0.3).options
    mean, variance = gaussians(torch.zeros(1, 4), 3, options)
    assert not mean.any()
    torch.testing.assert_close(variance, torch.full((1, 1), 0.3), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"distribution": "vmf", "variance": "diagonal"}, UnsupportedError, "variance.*'isotropic'.*gaussian"),
        ({"distribution": "vmf", "normalized": False}, UnsupportedError, "normalized.*True or None.*gaussian"),
        ({"distribution": "vmf", "prior_variance": 1.0}, UnsupportedError, "prior_variance.*None.*gaussian"),
        ({"moments": "vmf"}, UnsupportedError, "moments.*'gaussian' or None.*distribution='vmf'"),
        ({"distribution": "vmf", "moments": "exact"}, InputError, "moments"),
        ({"normalized": 1}, InputTypeError, "normalized"),
        ({"distribution": "laplace"}, InputError, "distribution"),
        ({"variance": "full"}, InputError, "variance"),
        ({"mining_margin": -1.0}, InputError, "mining_margin"),
        ({"margin": -0.1}, InputError, "margin"),
        ({"margin": float("nan")}, InputError, "margin"),
        ({"kl_weight": -1.0}, InputError, "kl_weight"),
        ({"negatives": 0}, InputError, "negatives"),
        ({"prior_variance": 0.0}, InputError, "prior_variance"),
        ({"first_variance": 0.0}, InputError, "first_variance"),
        ({"variance_gain": 0.0}, InputError, "variance_gain"),
        ({"temperature": 0.0}, InputError, "temperature"),
    ],
)
def test_options_out_of_range_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        BayesianTriplet(make_setting(), **options)


@pytest.mark.parametrize(("margin", "negatives"), [(0.0, 8), (4.1, 8), (0.2, 0), (0.2, 1.5)])
def test_the_deterministic_options_out_of_range_are_refused(margin, negatives):
    with pytest.raises(InputError, match="margin" if negatives == 8 else "negatives"):
        TripletDeterministic(make_setting(), margin, negatives)


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


def test_a_large_prior_does_not_overflow():
    options = BayesianTriplet(make_setting(), prior_variance=1e4).options
    _, variance = gaussians(torch.zeros(1, 4), 3, options)
    torch.testing.assert_close(variance, torch.full((1, 1), 1e4))

"""The triplet loss and the Bayesian one among the benchmarks' methods."""

import pytest
import torch
from benchmark_methods import make_data, make_setting
from devices import DEVICES

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
)
from contrastive_curvature import triplet, vmf
from contrastive_curvature.metrics import brier_score, retrieval_votes

METHODS = {
    "triplet": (TripletDeterministic, {}),
    "gaussian": (BayesianTriplet, {}),
    "vmf": (BayesianTriplet, {"distribution": "vmf"}),
}


def fitted(name, folder, setting=None, data=None, seed=0):
    cls, options = METHODS[name]
    folder.mkdir(exist_ok=True)
    method = cls(make_setting() if setting is None else setting, **options)
    method.fit(make_data() if data is None else data, seed, folder)
    return method


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

"""Scores on a trained encoder: PFE, norm, class densities and neighbours, against closed forms."""

import dataclasses
import math

import pytest
import torch
from benchmark_methods import fit, make_data, make_images, make_setting
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from tables import covering
from torch.distributions import Normal

from benchmarks.experiments.data.split import TensorSplit
from benchmarks.experiments.methods import embed, make_method
from benchmarks.experiments.methods.pfe import (
    MutualLikelihoodStep,
    SharedBatchNorm,
    VarianceHead,
    mutual_likelihood_score,
)
from benchmarks.experiments.methods.scores import VMFMixture, feature_distance
from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError

close = torch.testing.assert_close


@given(st.integers(1, 9), st.integers(0, 999))
def test_mutual_likelihood_is_that_of_one_latent_code(dim, seed):
    torch.manual_seed(seed)
    a, b = torch.randn(2, 6, dim, dtype=torch.float64)
    var_a, var_b = torch.rand(2, 6, dim, dtype=torch.float64) + 0.01
    found = mutual_likelihood_score(a, var_a, b, var_b)
    # the difference of two independent Gaussians, at zero
    close(found, Normal(a - b, (var_a + var_b).sqrt()).log_prob(torch.zeros(())).sum(1))
    close(found, mutual_likelihood_score(b, var_b, a, var_a))


@pytest.mark.parametrize("device", DEVICES)
def test_pfe_loss_is_the_mean_over_positive_pairs(device):
    head = VarianceHead(5, 3).to(device)
    with torch.no_grad():
        head[-1].scale.fill_(0.5)
    phi = torch.randn(8, 5, device=device)
    mu, labels = embed.unit(torch.randn(8, 3, device=device)), torch.tensor([0, 0, 0, 1, 1, 2, 3, 4], device=device)
    step = MutualLikelihoodStep(head, lambda x: (mu[: len(x)], x)).eval()
    variance = head(phi)
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    scores = [mutual_likelihood_score(mu[i], variance[i], mu[j], variance[j]) for i, j in pairs]
    close(step(phi, labels), -torch.stack(scores).mean())
    none = step.train()(phi[:1], labels[:1])
    none.backward()
    assert float(none.detach()) == 0
    assert all(float(p.grad.abs().max()) == 0 for p in head.parameters())


def test_shared_normalisation_has_one_scale_and_one_shift():
    norm, x = SharedBatchNorm(4), torch.randn(50, 4) * 3 + 1
    assert sorted(p.numel() for p in norm.parameters()) == [1, 1]
    wanted = 1e-4 * (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.norm.eps).sqrt() - 7
    close(norm(x), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_pfe_learns_which_images_scatter(device, tmp_path):
    setting, data = make_setting(device, epochs=3), make_data()
    base = fit("deterministic", setting, tmp_path, data)
    (tmp_path / "head").mkdir()
    # the labels of two of the classes say nothing: their positive pairs lie apart
    labels = data.train.targets.clone()
    mixed = labels >= 2
    labels[mixed] = 2 + torch.randint(2, (int(mixed.sum()),), generator=torch.Generator().manual_seed(0))
    method = make_method("pfe", setting, epochs=60, lr=0.02)
    method.fit(dataclasses.replace(data, train=TensorSplit(data.train.pixels, labels)), 0, tmp_path / "head", base)
    score = method.predict(data.test).uncertainty
    assert float(score[data.test.targets >= 2].min()) > float(score[data.test.targets < 2].max())


def test_pfe_scores_and_samples_are_those_of_its_gaussians(tmp_path):
    data = make_data()
    method = fit("pfe", make_setting(), tmp_path, data)
    found, (_, variance) = method.predict(data.test), method._gaussians(data.test)
    close(found.uncertainty, variance.mean(1))
    close(found.variants["sum_std"], variance.sqrt().sum(1))
    close(found.variants["harmonic"], 3 / (1 / variance).sum(1))
    # across the mean, two of three directions are left; the variance, about exp(-7), is small
    mu, kappa = vmf.fit(torch.stack(list(method.samples(data.test, 1500, 0))))
    close(mu, found.mean, atol=0.01, rtol=0)
    close(1 / kappa, found.uncertainty, rtol=0.15, atol=0)


def test_features_kept_or_not_train_the_same_head(tmp_path, monkeypatch):
    data, setting = make_data(), make_setting()
    base = fit("deterministic", setting, tmp_path, data)
    found = []
    for size in (2**30, 0):
        monkeypatch.setattr(embed, "CACHE_BYTES", size)
        (tmp_path / str(size)).mkdir()
        method = make_method("pfe", setting)
        method.fit(data, 0, tmp_path / str(size), base)
        found.append(method.predict(data.test).uncertainty)
    close(found[0], found[1], rtol=1e-3, atol=0)


@covering(1, name=["pfe", "knn_embedding", "knn_features", "vmf_density"], augment=[False, True])
def test_images_without_augmentation_are_preferred(name, augment, tmp_path):
    data, setting = make_data(), make_setting()
    base = fit("deterministic", setting, tmp_path, data)
    # what stands for augmented images are other images here
    spoiled = dataclasses.replace(data, train=TensorSplit(255 - data.train.pixels, data.train.targets))
    options = {"augment": augment} if name == "pfe" else {}
    scores = []
    for number, given_data in enumerate((data, dataclasses.replace(spoiled, train_plain=data.train))):
        (tmp_path / str(number)).mkdir()
        method = make_method(name, setting, **options)
        method.fit(given_data, 0, tmp_path / str(number), base)
        scores.append(method.predict(data.test).uncertainty)
    assert torch.equal(*scores) == (not (augment and name == "pfe"))


def test_norm_is_that_of_the_raw_output(tmp_path):
    data = make_data()
    method = fit("norm", make_setting(), tmp_path, data)
    raw = method.base.encoder(data.test.images(range(len(data.test)))).detach()
    close(method.predict(data.test).uncertainty, -raw.norm(dim=1))


@given(st.integers(2, 6), st.integers(0, 999))
def test_mixture_is_the_sum_of_its_classes(dim, seed):
    torch.manual_seed(seed)
    labels = torch.randint(4, (30,)) * 10
    labels[0] = 99  # the only image of its class
    u = embed.unit(torch.randn(30, dim, dtype=torch.float64))
    mixture = VMFMixture.fit(u, labels)
    queries = embed.unit(torch.randn(7, dim, dtype=torch.float64))
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


def test_mixture_integrates_to_one_on_the_circle():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    mixture = VMFMixture.fit(embed.unit(torch.randn(6, 2, dtype=torch.float64)), labels)
    angles = torch.arange(20_000, dtype=torch.float64) * (2 * math.pi / 20_000)
    density = mixture.log_prob(torch.stack([angles.cos(), angles.sin()], 1)).exp()
    assert float(density.mean() * 2 * math.pi) == pytest.approx(1, abs=1e-6)
    with pytest.raises(InputError, match="at least 2"):
        VMFMixture.fit(torch.eye(3), torch.arange(3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), [("knn_embedding", {}), ("knn_features", {"gallery_size": 20})])
def test_neighbours_are_those_of_a_full_search(name, options, device, tmp_path):
    data = make_data()
    method = fit(name, make_setting(device), tmp_path, data, **options)
    place = 0 if name == "knn_embedding" else 1
    gallery, queries = (method.base.features(split)[place].double() for split in (data.train, data.test))
    if options:
        gallery = gallery[torch.randperm(40, generator=torch.Generator().manual_seed(0))[:20]]
    cosine = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), gallery, dim=2)
    wanted = 1 - cosine.topk(10, dim=1).values.mean(1)
    close(method.predict(data.test).uncertainty, wanted.float(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["knn_embedding", "knn_features"])
def test_training_images_are_near_themselves(name, tmp_path):
    pixels, labels = make_images(2, 0)
    train = TensorSplit(pixels.repeat(10, 1, 1, 1), labels.repeat(10))
    data = dataclasses.replace(make_data(), train=train)
    method = fit(name, make_setting(epochs=1), tmp_path, data)
    assert float(method.predict(TensorSplit(pixels, labels)).uncertainty.abs().max()) < 1e-5
    assert float(method.predict(data.test).uncertainty.min()) > 1e-5
    few = dataclasses.replace(data, train=TensorSplit(pixels, labels))
    with pytest.raises(InputError, match="at least 10"):
        make_method(name, method.setting).fit(few, 0, tmp_path, method.base)


def test_an_image_twice_in_a_batch_is_no_genuine_pair():
    """With itself an image agrees at any variance, which would teach the head that it is certain."""
    torch.manual_seed(0)
    head = VarianceHead(5, 3)
    phi, mu = torch.randn(6, 5), torch.nn.functional.normalize(torch.randn(6, 3), dim=1)
    phi[3], mu[3] = phi[0], mu[0]
    labels = torch.tensor([0, 1, 1, 0, 2, 2])
    loss = MutualLikelihoodStep(head, lambda _: (mu, phi))(phi, labels)
    variance = head(phi)
    wanted = -mutual_likelihood_score(mu[[1, 4]], variance[[1, 4]], mu[[2, 5]], variance[[2, 5]]).mean()
    assert torch.allclose(loss, wanted)


def test_feature_distance_is_the_mean_of_the_ten_nearest():
    queries, gallery = torch.rand(7, 5), torch.rand(30, 5)
    cosine = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), gallery, dim=2)
    wanted = 1 - cosine.sort(1, descending=True).values[:, :10].mean(1)
    assert torch.allclose(feature_distance(queries, gallery), wanted, atol=1e-6)

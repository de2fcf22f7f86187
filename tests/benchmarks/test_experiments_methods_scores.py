"""Scores on a trained encoder: PFE, norm, class densities and neighbours, against closed forms."""

import dataclasses
import math

import pytest
import torch
from benchmark_methods import fit, make_data, make_setting
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal

from benchmarks.experiments.data.split import TensorSplit
from benchmarks.experiments.methods import embed, make_method, pfe
from benchmarks.experiments.methods.pfe import (
    MutualLikelihoodStep,
    VarianceHead,
    mutual_likelihood_score,
)
from benchmarks.experiments.methods.scores import VMFMixture, feature_distance
from contrastive_curvature import vmf

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


@pytest.mark.parametrize("device", DEVICES)
def test_pfe_learns_which_images_scatter(device, tmp_path, monkeypatch):
    monkeypatch.setattr(pfe, "_RATE", 0.02)
    setting, data = make_setting(device, epochs=3), make_data()
    base = fit("deterministic", setting, tmp_path, data)
    (tmp_path / "head").mkdir()
    # the labels of two of the classes say nothing: their positive pairs lie apart
    labels = data.train.targets.clone()
    mixed = labels >= 2
    labels[mixed] = 2 + torch.randint(2, (int(mixed.sum()),), generator=torch.Generator().manual_seed(0))
    method = make_method("pfe", make_setting(device, epochs=60))
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


def test_feature_distance_is_the_mean_of_the_ten_nearest():
    queries, gallery = torch.rand(7, 5), torch.rand(30, 5)
    cosine = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), gallery, dim=2)
    wanted = 1 - cosine.sort(1, descending=True).values[:, :10].mean(1)
    assert torch.allclose(feature_distance(queries, gallery), wanted, atol=1e-6)

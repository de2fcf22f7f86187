"""Spread over samples, MC dropout and deep ensembles of the benchmarks, against closed forms."""

import pytest
import torch
from benchmark_methods import fit, make_data, make_setting
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.experiments.methods import embed, make_method
from benchmarks.experiments.methods.embed import SphereSpread
from benchmarks.experiments.methods.ensembles import rotation_onto
from contrastive_curvature import vmf


def spread_of(samples):
    spread = SphereSpread()
    for u in samples:
        spread.add(u)
    return spread.prediction()


def random_rotation(dim):
    return torch.linalg.qr(torch.randn(dim, dim))[0]


@given(st.integers(2, 30), st.integers(2, 9), st.sampled_from([1e-4, 0.1, 1.0, 100.0]), st.integers(0, 999))
def test_sums_give_what_all_samples_give(n_samples, dim, noise, seed):
    torch.manual_seed(seed)
    samples = torch.randn(5, dim) + noise * torch.randn(n_samples, 5, dim)
    samples = torch.nn.functional.normalize(samples, dim=2)
    found = spread_of(samples)
    mu, kappa = vmf.fit(samples.double())
    assert torch.allclose(found.mean, mu.float(), atol=1e-5)
    assert torch.allclose(1 / found.uncertainty, kappa.float(), rtol=1e-2)
    assert torch.allclose(found.variants["sum_std"], samples.double().std(0).sum(1).float(), rtol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_predictions_summarise_the_samples(device, tmp_path, monkeypatch):
    data = make_data()
    method = fit("mc_dropout", make_setting(device), tmp_path, data, seed=3)
    samples = torch.stack(list(method.samples(data.test, 6, 3)))
    found, (mu, kappa) = method.predict(data.test), vmf.fit(samples)
    assert torch.allclose(found.mean, mu, atol=1e-5)
    assert torch.allclose(found.uncertainty, 1 / kappa, rtol=1e-3)
    # what is computed once and kept gives the same as what is computed for every pass
    monkeypatch.setattr(embed, "CACHE_BYTES", 0)
    assert torch.equal(samples, torch.stack(list(method.samples(data.test, 6, 3))))


def test_only_dropout_is_switched_on():
    torch.manual_seed(0)
    method = make_method("mc_dropout", make_setting(), rate=0.5)
    norm, drop, last = nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 3)
    method._encoder = nn.Sequential(nn.Flatten(), norm, drop, nn.BatchNorm1d(64), last).eval()
    split = make_data().test
    before = [value.clone() for value in method._encoder.buffers()]
    interrupted = method.samples(split, 3, 0)
    next(interrupted)
    assert torch.is_grad_enabled()
    assert not any(module.training for module in method._encoder.modules())
    method.predict(split)
    assert all(torch.equal(a, b) for a, b in zip(before, method._encoder.buffers(), strict=True))
    # one mask of zeros and twos gives the pass of each image: its output lies in the span of the images' own features
    pixels = split.images(range(len(split))).flatten(1) / (1 + norm.eps) ** 0.5
    torch.manual_seed(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(5)).item())
    masks = torch.cat([nn.functional.dropout(rows, 0.5) for rows in pixels.split(7)])
    wanted = embed.unit(last(masks / (1 + norm.eps) ** 0.5)).detach()
    assert torch.allclose(next(method.samples(split, 1, 5)), wanted, atol=1e-5)


@given(st.integers(2, 8), st.integers(0, 999))
def test_procrustes_finds_the_rotation(dim, seed):
    torch.manual_seed(seed)
    reference, rotation = torch.randn(3 * dim, dim), random_rotation(dim)
    found = rotation_onto(reference @ rotation.T, reference)
    assert torch.allclose(found, rotation, atol=1e-4)
    # with noise, no other rotation that we try comes closer
    moving = reference @ rotation.T + 0.3 * torch.randn(3 * dim, dim)
    best = (moving @ rotation_onto(moving, reference) - reference).norm()
    assert all(best <= (moving @ random_rotation(dim) - reference).norm() + 1e-4 for _ in range(20))
    assert best <= (moving @ rotation - reference).norm() + 1e-4


def rotated_copy(method, data, rotation):
    state = {name: value.clone() for name, value in method.encoder.state_dict().items()}
    state["head.weight"], state["head.bias"] = rotation @ state["head.weight"], rotation @ state["head.bias"]
    copy = make_method("deterministic", method.setting)
    copy.load_state_dict({"encoder": state}, data)
    return copy


@pytest.mark.parametrize("alignment", ["none", "procrustes"])
def test_rotated_copies_agree_after_alignment_only(alignment, tmp_path):
    data, setting = make_data(), make_setting(epochs=1)
    one = fit("deterministic", setting, tmp_path, data)
    copies = {seed: rotated_copy(one, data, torch.eye(3) if seed == 0 else random_rotation(3)) for seed in range(3)}
    ensemble = make_method("deep_ensemble", setting, members=3, alignment=alignment, trained=copies.get)
    ensemble.fit(data, 0, tmp_path)
    mean, found = one.predict(data.test).mean, ensemble.predict(data.test)
    if alignment == "procrustes":
        assert torch.allclose(found.mean, mean, atol=1e-5)
        assert float(found.uncertainty.max()) < 1e-9
        assert all(torch.allclose(u, mean, atol=1e-5) for u in ensemble.samples(data.test, 3, 0))
    else:
        assert float((found.mean - mean).norm(dim=1).min()) > 0.05
        assert float(found.uncertainty.min()) > 1e-3

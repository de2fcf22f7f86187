"""What holds for every method of the benchmarks."""

import dataclasses

import pytest
import torch
from benchmark_methods import fit, make_data, make_setting
from devices import DEVICES

from benchmarks.experiments.methods import METHODS, make_method
from contrastive_curvature.errors import InputError

OPTIONS = {
    "deep_ensemble": {"members": 2, "alignment": "procrustes"},
    "knn_features": {"gallery_size": 25},
    "knn_gated": {"gallery_size": 20},
}
SAMPLED = {
    *("deep_ensemble", "pfe", "laplace_posthoc", "mc_dropout", "laplace_online"),
    *("hedged", "bayesian_triplet", "proxies"),
}
WITHOUT_SCORE = ("deterministic", "triplet", "hedged_point")
EXACT_BASE = ("norm", "vmf_density", "knn_embedding", "knn_features", "pfe")


def same(a, b):
    assert torch.equal(a.mean, b.mean)
    assert (a.uncertainty is None) == (b.uncertainty is None)
    assert a.uncertainty is None or torch.equal(a.uncertainty, b.uncertainty)
    assert (a.novelty is None) == (b.novelty is None)
    assert a.novelty is None or torch.equal(a.novelty, b.novelty)
    assert a.variants.keys() == b.variants.keys()
    assert all(torch.equal(value, b.variants[name]) for name, value in a.variants.items())


@pytest.fixture(scope="module", params=[(name, device) for name in METHODS for device in DEVICES], ids=str)
def fitted(request, tmp_path_factory):
    name, device = request.param
    setting, data, folder = make_setting(device), make_data(), tmp_path_factory.mktemp(name)
    return fit(name, setting, folder, data, **OPTIONS.get(name, {})), data, folder


def test_predictions_have_the_promised_form(fitted):
    method, data, _ = fitted
    found = method.predict(data.test)
    assert found.mean.shape == (len(data.test), 3)
    assert found.mean.dtype == torch.float32
    scores = [*found.variants.values(), *([] if found.uncertainty is None else [found.uncertainty])]
    scores += [] if found.novelty is None else [found.novelty]
    assert (found.novelty is None) == (method.name not in ("laplace_posthoc", "laplace_online"))
    assert found.p_value is None  # no image was held out
    assert (found.uncertainty is None) == (method.name in WITHOUT_SCORE)
    for score in scores:
        assert score.shape == (len(data.test),)
        assert score.device.type == "cpu"
        assert bool(score.isfinite().all())
        assert float(score.std()) > 0


def test_equal_calls_give_equal_predictions_and_leave_the_random_state(fitted):
    method, data, _ = fitted
    before = torch.get_rng_state()
    first = method.predict(data.test)
    if not method.name.startswith("laplace"):
        assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    same(first, method.predict(data.test))


def test_saved_and_loaded_is_the_same(fitted, tmp_path):
    method, data, _ = fitted
    method.save(tmp_path / "method.pt")
    again = make_method(method.name, method.setting, **OPTIONS.get(method.name, {}))
    again.load(tmp_path / "method.pt", data)
    same(method.predict(data.test), again.predict(data.test))
    if method.name in SAMPLED:
        first, second = (list(one.samples(data.test, 2, 5)) for one in (method, again))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_samples_are_seeded_and_of_unit_length_on_the_sphere(fitted):
    method, data, _ = fitted
    if method.name not in SAMPLED:
        assert method.samples(data.test, 3, 0) is None
        return
    runs = [list(method.samples(data.test, 3, seed)) for seed in (0, 0, 1)]
    assert len(runs[0]) == (2 if method.name == "deep_ensemble" else 3)
    for z in runs[0]:
        assert z.shape == (len(data.test), 3)
        assert z.dtype == torch.float32
        on_sphere = torch.allclose(z.norm(dim=1), torch.ones(len(z)), atol=1e-5)
        assert on_sphere == (method.predict(data.test).metric == "cosine")
    assert not torch.equal(runs[0][0], runs[0][1])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert torch.equal(runs[0][0], runs[2][0]) == (method.name == "deep_ensemble")


@pytest.mark.parametrize("name", ["laplace_posthoc", "laplace_online"])
def test_held_out_images_give_p_values(name, tmp_path):
    data, setting = make_data(), make_setting()
    held = dataclasses.replace(data, calibration=data.test)
    method = fit(name, setting, tmp_path / "a", held)
    found = method.predict(data.test)
    # The calibration images themselves: their p-values are evenly spread, the smallest that of the most unusual one.
    known = {"laplace_posthoc": 12, "laplace_online": 8}[name]
    assert float(found.p_value.min()) >= 1 / (known + 1)
    if name == "laplace_posthoc":
        wanted = (torch.arange(12, dtype=torch.float64) + 2) / 13
        assert torch.allclose(found.p_value.sort().values, wanted)
    assert bool((found.p_value[found.novelty.argsort()].diff() <= 0).all())
    method.save(tmp_path / "m.pt")
    again = make_method(name, setting)
    again.load(tmp_path / "m.pt", held)
    assert torch.equal(again.predict(data.test).p_value, found.p_value)
    with pytest.raises(InputError, match=r"data\.calibration: expected as in the fit, some"):
        make_method(name, setting).load(tmp_path / "m.pt", data)


def test_the_gate_is_the_novelty(tmp_path):
    data, setting = make_data(), make_setting()
    gated = fit("laplace_gated", setting, tmp_path, data)
    novelty = gated._detector.predict(data.test).novelty
    assert torch.equal(gated.predict(data.test).uncertainty > 2, novelty > gated._score.threshold)


@pytest.mark.parametrize("name", EXACT_BASE)
def test_scores_on_a_base_embed_as_it_does_and_leave_it(name, tmp_path):
    data, setting = make_data(), make_setting()
    base = fit("deterministic", setting, tmp_path, data)
    before = {key: value.clone() for key, value in base.encoder.state_dict().items()}
    method = make_method(name, setting, **OPTIONS.get(name, {}))
    (tmp_path / "own").mkdir()
    method.fit(data, 0, tmp_path / "own", base)
    assert torch.allclose(method.predict(data.test).mean, base.predict(data.test).mean, atol=1e-6)
    assert all(torch.equal(value, before[key]) for key, value in base.encoder.state_dict().items())
    assert not any(module.training for module in base.encoder.modules())

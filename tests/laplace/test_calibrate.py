"""``la.calibrate``: p-values by hand for every posterior, the guarantee over splits, and what outdates them."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace_combinations import for_every_combination
from tables import covering, each
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.codec import sealed
from contrastive_curvature.embedding.known import (
    Reference,
    TrainingGaussians,
    components,
    held_out_distances,
    unit_features,
)
from contrastive_curvature.fit.part_state import State
from contrastive_curvature.laplace.state_dict import SEALED
from contrastive_curvature.network import digest
from contrastive_curvature.posterior import value

INPUTS, HIDDEN, DIM, TRAINED, GIVEN = 4, 6, 3, 20, 30


def body(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM)]
    return nn.Sequential(*layers).double().eval().to(device)


def inputs(n: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(n, INPUTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def training(seed: int = 0, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    x, y = inputs(TRAINED, seed, device), (torch.arange(TRAINED) % 3).to(device)
    return [(x[:12], y[:12]), (x[12:], y[12:])]


def given(n: int = GIVEN, device: str = "cpu") -> list[Tensor]:
    """Known inputs of no class, in batches of eleven."""
    return list(inputs(n, 5, device).split(11))


def made(weights: str, structure: str, device: str = "cpu", **host: Any) -> Any:
    if weights == "subnetwork":
        host["subnetwork_indices"] = torch.tensor([0, 3, 26, 30, 41, 50])
    return Laplace(body(device), "contrastive", weights, structure, backend_kwargs={"pd_fix": "psd"}, **host)


def fitted(weights: str = "last_layer", structure: str = "diag", device: str = "cpu", **host: Any) -> Any:
    la = made(weights, structure, device, **host)
    la.fit(training(device=device))
    la.optimize_prior_precision()
    return la


def components_of(la: Any, x: Tensor, with_features: bool) -> Tensor:
    """What an input is judged by; each part has a test of its own in test_known.py."""
    out, encoder = la(x), body(x.device.type)
    if not with_features:
        return components(out).detach()
    known, labels = map(torch.cat, zip(*training(device=x.device.type), strict=True))
    gaussians = TrainingGaussians.of(encoder[:3](known).detach(), encoder(known).detach(), labels)
    phi = encoder[:3](x).detach()
    return torch.cat([components(out, phi.norm(dim=1)).detach(), gaussians(unit_features(phi)[0], out.raw_mean)], 1)


def p_values_of(for_scale: Tensor, known: Tensor, new: Tensor) -> Tensor:
    reference = Reference.of(for_scale, known)
    return reference.p_value(reference.novelty(new))


@for_every_combination
def test_p_values_are_those_of_their_parts(weights: str, structure: str, device: str) -> None:
    host = {"enable_backprop": True} if weights == "all" else {}
    la, new = fitted(weights, structure, device, **host), inputs(9, 8, device)
    with_features = weights == "last_layer"
    if not with_features:
        with pytest.raises(cc.NotFittedError, match=r"p_value.*not calibrated.*la\.calibrate\(loader\)"):
            _ = la(new).p_value
    la.calibrate(given(device=device))
    known, found = (components_of(la, x, with_features) for x in (torch.cat(given(device=device)), new))
    if with_features:
        for_scale = components_of(la, torch.cat([x for x, _ in training(device=device)]), True)
    else:
        order = torch.randperm(GIVEN, generator=torch.Generator().manual_seed(0)).to(device)
        for_scale, known = known[order[: GIVEN // 3]], known[order[GIVEN // 3 :]]
    p = la(new).p_value
    assert (p.device.type, p.dtype, p.requires_grad) == (device, torch.float64, False)
    torch.testing.assert_close(p, p_values_of(for_scale, known, found), rtol=1e-12, atol=0)
    assert p.unique().numel() > 2
    # An input is flagged at the very alpha that is its p-value.
    for alpha in (0.1, 0.5, float(p[p < 1].max())):
        assert torch.equal(la(new).is_known(alpha), p > alpha)


def test_without_calibration_the_training_inputs_stand_in_and_say_so() -> None:
    la, new = fitted("last_layer", "kron"), inputs(9, 8)
    out = la(new)
    with pytest.warns(cc.OptimisticPValueWarning, match=r"optimistic.*la\.calibrate\(loader\)") as caught:
        p = out.p_value
    assert caught[0].filename == __file__, "it points to the line that asked"
    x, y = map(torch.cat, zip(*training(), strict=True))
    held_out = held_out_distances(body()[:3](x).detach(), body()(x).detach(), y)

    def truth() -> Tensor:
        known = components_of(la, x, True)
        compared = torch.cat([known[:, :3], held_out], 1)
        return p_values_of(known, compared, components_of(la, new, True))

    torch.testing.assert_close(p, truth(), rtol=1e-12, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out.p_value, p), "once is enough"
        with pytest.raises(cc.InputError, match=r"alpha.*20 known inputs.*at least 99 inputs"):
            la(new).is_known()
    # The prior precision moves the training inputs along.
    la.prior_precision = 7.0
    with pytest.warns(cc.OptimisticPValueWarning):
        torch.testing.assert_close(la(new).p_value, truth(), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore::contrastive_curvature.laplace.advice.FeatureNormWarning")
@pytest.mark.parametrize("options", [{"hessian_structure": "diag"}, {}])
def test_neither_order_nor_batch_size_nor_parts_decide_what_is_known(options: dict[str, str]) -> None:
    """Of 6,000 points, three times as many as a posterior keeps, in float32."""
    n, generator = 6000, torch.Generator().manual_seed(0)
    centres, y = 1.5 * torch.randn(12, 16, generator=generator), torch.arange(n) % 12
    x, known = (centres[labels] + torch.randn(len(labels), 16, generator=generator) for labels in (y, y[:1500]))
    new = torch.cat([known[1000:], 2.5 * torch.randn(500, 16, generator=generator)])
    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    ordered, mixed = torch.arange(n), torch.randperm(n, generator=generator)
    found = []
    for order, size, count in ((ordered, 500, 1), (mixed, 500, 1), (ordered, 77, 1), (mixed, 333, 2)):
        la = Laplace(encoder, "contrastive", **options)
        loaders = [[(x[rows], y[rows]) for rows in part.split(size)] for part in order.tensor_split(count)]
        if count == 1:
            la.fit(loaders[0])
        else:
            parts = [(loader, (part, count)) for part, loader in enumerate(loaders)]
            statistics = State.merged([la.part_statistics(*part) for part in parts])
            la.fit_parts(statistics, State.merged([la.part_curvature(*part, statistics) for part in parts]))
        with pytest.warns(cc.OptimisticPValueWarning):
            uncalibrated = la(new).p_value
        la.calibrate([known[:1000]])
        out = la(new)
        found.append((torch.stack([uncalibrated, out.p_value]), out.uncertainty))
    (p, angle), *others = found
    assert 0 < (p[1, :500] <= 0.01).double().mean() < 0.05 < 0.5 < (p[1, 500:] <= 0.01).double().mean()
    for q, other in others:
        torch.testing.assert_close(q, p, rtol=0, atol=0.005)
        assert torch.equal(q[1] <= 0.01, p[1] <= 0.01)
        torch.testing.assert_close(other, angle, rtol=1e-4, atol=0)


def test_fits_that_add_up_have_the_mean_norm_of_all_points() -> None:
    la, x, more = fitted(), torch.cat([part for part, _ in training()]), 3 * inputs(7, 4)
    la.fit([(more, torch.arange(7) % 3)], override=False)
    norms = body()(torch.cat([x, more])).detach().norm(dim=1)
    assert la.typical_norm == pytest.approx(float(norms.mean()), rel=1e-12)


@pytest.mark.parametrize("pairs", ["dataset", "batch"])
def test_fits_that_add_up_keep_a_sample_of_both(pairs: str) -> None:
    la = Laplace(body(), "contrastive", "last_layer", "diag", backend_kwargs={"pairs": pairs})
    la.fit(training(0))
    la.fit(training(1), override=False)
    columns = la.posterior.fitted.training_sample.rows.columns
    x, y = map(torch.cat, zip(*training(0), *training(1), strict=True))
    truth = torch.cat([body()[:3](x).detach(), y.unsqueeze(1)], 1)
    rows = torch.cat([columns["features"], columns["classes"].unsqueeze(1)], 1)
    torch.testing.assert_close(rows[rows[:, 0].argsort()], truth[truth[:, 0].argsort()])
    la.fit(training(1))
    assert len(la.posterior.fitted.training_sample.rows) == TRAINED
    sample = la.posterior.fitted.training_sample.rows
    unlabelled = replace(sample, columns={"features": sample.columns["features"]})
    for merged in (sample.merged(unlabelled), unlabelled.merged(sample)):
        assert set(merged.columns) == {"features"}


@pytest.mark.filterwarnings("ignore:override=False. this posterior was loaded")
def test_a_loaded_posterior_has_no_sample_of_what_was_fitted_before() -> None:
    loaded = made("last_layer", "diag")
    loaded.load_state_dict(fitted().state_dict())
    loaded.fit(training(1), override=False)
    with pytest.raises(cc.NotFittedError):
        _ = loaded(inputs(9, 8)).p_value


def _other_prior(la: Any) -> None:
    la.prior_precision = la.prior_precision.flip(0) if len(la.prior_precision) > 1 else la.prior_precision * 1.001


def _other_temperature(la: Any) -> None:
    la.temperature = la.temperature * 1.001


def _weights(la: Any) -> None:
    with torch.no_grad():
        next(la.model.parameters())[0, 0] += 1e-5


def _step_of_a_fused_optimizer(la: Any) -> None:
    """Training that changes weights and no version counter."""
    optimizer = torch.optim.AdamW(la.model.parameters(), 0.01, fused=True)
    for p in la.model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    la.model.zero_grad()


def _statistics_of_a_layer(la: Any) -> None:
    next(b for b in la.model.buffers() if b.is_floating_point()).add_(1e-5)


def _exchanged_entries(la: Any) -> None:
    first = next(la.model.parameters())
    with torch.no_grad():
        first.copy_(first.flip(1))


CHANGES = [_other_prior, _other_temperature, _weights, _exchanged_entries]
CHANGES += [_statistics_of_a_layer, _step_of_a_fused_optimizer]


@pytest.mark.filterwarnings("ignore:la.x.. the weights of la.model have changed")
@covering(1, weights=["last_layer", "all"], change=CHANGES)
def test_another_posterior_is_noticed(weights: str, change: Callable[[Any], None]) -> None:
    if change is _step_of_a_fused_optimizer:
        weights = "all"  # a posterior of the last layer has a copy of the encoder, which nobody trains
    la, x = fitted(weights, "diag"), inputs(3, 8)
    if weights == "last_layer":
        la.prior_precision = torch.tensor([10.0, 0.1])
    la.calibrate(given())
    before = la(x)
    change(la)
    for ask in (lambda: la(x).p_value, lambda: la(x).is_known(0.2)):
        with pytest.raises(cc.NotFittedError, match=r"another posterior.*la\.calibrate\(loader\) again"):
            ask()
    la.calibrate(given())
    assert la(x).p_value.shape == (3,)
    with pytest.raises(cc.UnsupportedError, match="two states of a posterior"):
        _ = cc.EmbeddingDistribution.cat([before, la(x)]).p_value


KINDS = [{}, {"pred_type": "nn", "n_samples": 3}, {"joint": True}, {"diagonal_output": True}]


@covering(1, weights=["last_layer", "all"], change=CHANGES[:-1], options=KINDS)
def test_a_prediction_says_that_the_weights_have_changed(
    weights: str, change: Callable[[Any], None], options: dict[str, Any]
) -> None:
    la, x = fitted(weights, "diag"), inputs(3, 8)
    la.prior_precision = torch.tensor([10.0, 0.1]) if weights == "last_layer" else 3.0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        la(x, **options)
        assert not said
        change(la)
        la(x, **options)
        assert len(said) == (change not in CHANGES[:2])
        assert all("changed since the fit" in str(one.message) and one.filename == __file__ for one in said)
        la.fit(training())
        la(x, **options)
        assert len(said) == (change not in CHANGES[:2])


def _prior_in_place(la: Any) -> None:
    la.prior_precision.mul_(2)


@each("calibrated", [True, False])
@each("change", [*CHANGES[:-1], _prior_in_place, lambda la: la.fit(training(1))])
def test_a_prediction_is_frozen(change: Callable[[Any], None], calibrated: bool) -> None:
    """It answers the same after a change as before, whether it was asked before or not."""
    la, x = fitted("last_layer", "kron"), inputs(9, 8)
    la.prior_precision = torch.tensor([3.0, 2.0], dtype=torch.float64)
    if calibrated:
        la.calibrate(given())
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        truth = la(x)
        wanted = [truth.novelty, truth.p_value, truth.uncertainty]
        out, part = la(x), la(x)[2:5]
        change(la)
        found = [out.novelty, out.p_value, out.uncertainty]
        assert torch.equal(part.p_value, wanted[1][2:5])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@each("options", [{}, {"score": "uncertainty", "by_class": True}, {"by_class": True}, None])
def test_a_pickled_prediction_keeps_its_numbers_and_nothing_of_the_training_data(options: dict[str, Any]) -> None:
    la, x = fitted("last_layer", "kron"), inputs(9, 8)
    x[4] = torch.nan
    if options is not None:
        la.calibrate(given(), **options)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        out = la(x, on_invalid="nan")
        p_value, novelty = out.p_value, out.novelty
        content = pickle.dumps(la(x, on_invalid="nan"))
        stored = body()[:3](torch.cat([part for part, _ in training()])).detach()
        assert not any(row.numpy().tobytes()[:16] in content for row in stored)
        la.prior_precision = 7.0
        loaded = pickle.loads(content)
        for twin in (loaded, copy.copy(loaded), copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
            assert torch.equal(twin.p_value.nan_to_num(-1), p_value.nan_to_num(-1))
            assert torch.equal(twin.novelty.nan_to_num(-1), novelty.nan_to_num(-1))
            assert torch.equal(twin[[5, 0]].p_value, p_value[[5, 0]])
            assert torch.equal(twin.is_known(0.2), out.is_known(0.2))
            parts = cc.EmbeddingDistribution.cat([twin[:3], loaded[3:]])
            assert torch.equal(parts.p_value.nan_to_num(-1), p_value.nan_to_num(-1))
    with pytest.raises(cc.NotFittedError, match="not calibrated"):
        _ = pickle.loads(pickle.dumps(fitted("all", "diag")(x[:3]))).p_value


def test_what_is_expensive_is_computed_once_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussians of the training sample once for a fit, its components once for a prior, weights read after a change."""
    counts = {"gaussians": 0, "components": 0, "weights": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return run

    monkeypatch.setattr(TrainingGaussians, "of", counting("gaussians", TrainingGaussians.of))
    monkeypatch.setattr(value, "_at_stored_features", counting("components", value._at_stored_features))
    monkeypatch.setattr(digest, "state_tensors", counting("weights", digest.state_tensors))
    la, x = fitted("last_layer", "kron"), inputs(3, 8)
    counts["weights"] = 0
    for _ in range(3):
        assert torch.equal(la(x).novelty, la(x).novelty)
    assert counts == {"gaussians": 1, "components": 1, "weights": 0}
    la.prior_precision = 2.0
    la(x)
    assert counts["components"] == 1, "nobody has asked"
    assert torch.equal(la(x).novelty, la(x).novelty)
    assert counts == {"gaussians": 1, "components": 2, "weights": 0}
    with torch.no_grad():
        next(la.model.parameters()).mul_(1)
    assert torch.equal(la(x).novelty, la(x).novelty)
    assert counts == {"gaussians": 1, "components": 2, "weights": 1}


def test_the_same_posterior_is_taken_for_it() -> None:
    la, x = fitted(), inputs(3, 8)
    la.calibrate(given())
    p = la(x).p_value
    with torch.no_grad():
        next(la.model.parameters()).mul_(1)
    assert torch.equal(la(x).p_value, p)
    assert torch.equal(copy.deepcopy(la)(x).p_value, p)
    weights = copy.deepcopy(la.model.model.state_dict())
    _weights(la)
    la.prior_precision = la.prior_precision
    la.model.model.load_state_dict(weights)
    assert torch.equal(la(x).p_value, p)
    posterior = la.posterior
    _other_prior(la)
    la.posterior = posterior
    assert torch.equal(la(x).p_value, p)


@pytest.mark.filterwarnings("ignore:la.x.. the weights of la.model have changed")
def test_training_inputs_of_other_weights_are_not_used() -> None:
    la = fitted()
    _weights(la)
    with pytest.raises(cc.NotFittedError, match="present weights"):
        _ = la(inputs(3, 8)).p_value
    la.calibrate(given())
    assert len(la.posterior.calibration.reference.statistics) == GIVEN - GIVEN // 3
    with pytest.raises(cc.InputError, match="at least 148 inputs"):
        la(inputs(3, 8)).is_known()


BAD: list[tuple[Any, str]] = [
    (inputs(9, 3), "loader"),
    ([inputs(1, 3)], "at least two known inputs, got 1"),
    ([inputs(9, 3)[:, :3]], r"loader: batch 0.*shape \(3,\)"),
    ([inputs(9, 3), inputs(9, 3).float()], r"loader: batch 1.*torch\.float32"),
    ([[inputs(9, 3)] * 3], "a list of 3"),
]


@each("loader, words", BAD)
def test_malformed_calibration_data_change_nothing(loader: Any, words: str) -> None:
    la, x = fitted(), inputs(9, 8)
    la.calibrate(given())
    before = la(x).p_value
    with pytest.raises(cc.InputError, match=words):
        la.calibrate(loader)
    assert torch.equal(la(x).p_value, before)


def test_p_values_that_there_are_not() -> None:
    la, x = made("last_layer", "diag"), inputs(3, 8)
    with pytest.raises(cc.NotFittedError, match="fit"):
        la.calibrate(given())
    la.fit(training())
    la.calibrate(given())
    for bad in ("0.1", 0, float("nan")):
        with pytest.raises(cc.InputError, match="alpha"):
            la(x).is_known(bad)
    with pytest.raises(cc.InputError, match=r"alpha.*30 known inputs.*at least 99 inputs"):
        la(x).is_known()
    assert la(x).is_known(1 / 31).shape == (3,)
    for options in ({"joint": True}, {"diagonal_output": True}, {"pred_type": "nn", "n_samples": 5}):
        with pytest.raises(cc.UnsupportedError, match=r"Call la\(x\)\.p_value"):
            _ = la(x, **options).p_value


@each("weights, structure", [("last_layer", "kron"), ("all", "diag")])
def test_the_calibration_is_saved(weights: str, structure: str) -> None:
    la, x = fitted(weights, structure), inputs(9, 8)
    la.calibrate(given())
    loaded = made(weights, structure)
    loaded.load_state_dict(la.state_dict())
    torch.testing.assert_close(loaded(x).p_value, la(x).p_value, rtol=0, atol=0)
    loaded.calibrate(given())
    assert (loaded(x)._measured().values.shape[1] == 5) == (weights == "last_layer")
    loaded.prior_precision = 5.0
    with pytest.raises(cc.NotFittedError, match="another posterior"):
        _ = loaded(x).p_value
    # A posterior that was not calibrated takes the calibration away.
    loaded.load_state_dict(fitted(weights, structure).state_dict())
    with pytest.raises(cc.NotFittedError, match="not calibrated"):
        _ = loaded(x).p_value
    loaded.calibrate(given())
    assert len(loaded.posterior.calibration.reference.statistics) == GIVEN - GIVEN // 3


SPOILT: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("statistics", lambda v: v * torch.nan, "finite"),
    ("statistics", lambda v: v[:0], "statistics"),
    ("location", lambda v: v[:2], "shape"),
    ("scale", lambda v: 0 * v, "positive"),
    ("gaussians", lambda v: {**v, "basis": v["basis"][:2]}, "shape"),
    ("gaussians", lambda v: {**v, "axes": v["axes"][:1]}, "shape"),
    ("gaussians", lambda v: {**v, "slopes": None}, "slopes"),
    ("more", lambda _: 1, "more"),
]


def test_a_spoilt_calibration_is_refused_without_a_trace() -> None:
    la, x = fitted(), inputs(9, 8)
    la.calibrate(given())
    p, state = la(x).p_value, la.state_dict()
    part = state["calibration"]["calibration"]
    for key, change, words in SPOILT:
        place = part["reference"] if key in part["reference"] else part
        spoilt = {**place, key: change(place.get(key))}
        whole = spoilt if place is part else {**part, "reference": spoilt}
        wrong = {**state, "calibration": {**state["calibration"], "calibration": whole}}
        with pytest.raises(cc.InputError, match=rf"state_dict.*calibration.*{words}"):
            la.load_state_dict(sealed(wrong, SEALED))
        assert torch.equal(la(x).p_value, p), words


def said_to_be_fitted(la: Any, known: Tensor) -> float:
    """The share of inputs that the warning tells of; zero without one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", cc.OptimisticPValueWarning)
        la.calibrate(known.split(300))
    assert all(one.filename == __file__ and "optimistic" in str(one.message) for one in caught)
    return sum(float(str(one.message).split("about ")[1].split("%")[0]) / 100 for one in caught)


def directions(n: int, width: int, seed: int) -> Tensor:
    """Embeddings of norm 1 as a vector database holds them, of ten classes in turn."""
    centres, noise = (
        torch.randn(m, width, generator=torch.Generator().manual_seed(seed)) for m, seed in ((10, 9), (n, seed))
    )
    return nn.functional.normalize(0.7 * centres[torch.arange(n) % 10] + 0.5 * noise)


def of_directions(x: Tensor) -> Any:
    layer = nn.Linear(x.shape[1], x.shape[1], bias=False)
    layer.weight.data.copy_(torch.eye(x.shape[1]))
    la = Laplace(nn.Sequential(layer), "contrastive")
    la.fit([(part, torch.arange(len(part)) % 10) for part in x.split(500)])
    la.prior_precision = 1.0
    return la


@each("n, width", [(1500, 64), (6000, 8), (20000, 2)])
def test_only_inputs_of_the_fit_count_as_such(n: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two dimensions, many directions agree by chance."""
    x, other, m = directions(n, width, 0), directions(1500, width, 1), 1500
    la = of_directions(x)
    assert said_to_be_fitted(la, other) == 0
    nearly = nn.functional.normalize(x[:m] + 1e-3 * other)
    assert said_to_be_fitted(la, nearly) == 0
    assert said_to_be_fitted(la, torch.cat([x[: m // 20], other[m // 20 :]])) == 0
    # What is kept is a random sample; what chance explains is subtracted with three standard errors.
    kept, chance = min(1, 2000 / n), 0.01 if width > 2 else 0.15
    for share in (0.05, 0.2, 1.0):
        fitted_on = x[torch.arange(int(share * m)) * (n // m)]
        with monkeypatch.context() as lower:
            lower.setattr("contrastive_curvature.posterior.p_values._MOST_FITTED", 0.01)
            found = said_to_be_fitted(la, torch.cat([fitted_on, other[: m - len(fitted_on)]]))
        noise = 4 * (share * (1 - kept) / (kept * m)) ** 0.5
        assert share - noise - chance <= found <= share + noise + 0.01, share


def test_features_that_many_inputs_share_tell_of_no_overlap_and_repeated_data_do() -> None:
    x, other = directions(6000, 16, 0), directions(1500, 16, 1)
    for blank in (0.005, 0.4):
        given, new = x.clone(), other.clone()
        given[torch.rand(6000, generator=torch.Generator().manual_seed(2)) < blank] = 0.25
        new[torch.rand(1500, generator=torch.Generator().manual_seed(3)) < blank] = 0.25
        la = of_directions(given)
        assert said_to_be_fitted(la, new) == 0, blank
        assert said_to_be_fitted(la, given[:1500]) > 0.8, blank
    assert said_to_be_fitted(of_directions(x[:900].repeat(2, 1)), x[:900]) == 1


def longest(embedding: cc.EmbeddingDistribution) -> Tensor:
    """A score of the user's: the shorter the output, the less like known ones."""
    return -embedding.raw_mean.norm(dim=1)


def classes_of(la: Any, x: Tensor) -> Tensor:
    return torch.cdist(la(x).mu, la.class_centres.centres).argmin(1)


def scores_of(la: Any, x: Tensor, score: Any) -> Tensor:
    return score(la(x)) if callable(score) else getattr(la(x), score)


@covering(
    2,
    weights__structure=[("last_layer", "kron"), ("all", "diag")],
    score=["novelty", "uncertainty", longest],
    by_class=[False, True],
)
def test_p_values_of_any_score_by_hand(weights: str, structure: str, score: Any, by_class: bool) -> None:
    la, known, new = fitted(weights, structure), torch.cat(given()), inputs(9, 8)
    la.calibrate(given(), score=score, by_class=by_class)
    if weights == "all" and score == "novelty":
        known = known[torch.randperm(GIVEN, generator=torch.Generator().manual_seed(0))[GIVEN // 3 :]]
    of_known, of_new = (scores_of(la, x, score) for x in (known, new))
    comparable = torch.ones(9, len(known), dtype=torch.bool)
    if by_class:
        comparable = classes_of(la, new).unsqueeze(1) == classes_of(la, known)
    higher = comparable & (of_known >= of_new.unsqueeze(1))
    truth = (1 + higher.sum(1)) / (1 + comparable.sum(1)).double()
    out = la(new)
    torch.testing.assert_close(out.p_value, truth, rtol=1e-12, atol=0)
    # Known inputs again are as far out as themselves, also where they were computed in another batch.
    assert float(la(known[:1]).p_value) >= 2 / (1 + len(known))
    parts = [la(new[:4]), la(new[4:])]
    ways = [out[[2, 0]].p_value, cc.EmbeddingDistribution.cat(parts).p_value]
    for found, wanted in zip(ways, (truth[[2, 0]], truth), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    if not callable(score):
        rounded = cc.EmbeddingDistribution.cat([part.to(torch.float16) for part in parts])
        torch.testing.assert_close(rounded[1:].p_value, truth[1:], rtol=1e-12, atol=0)
    loaded = made(weights, structure)
    loaded.load_state_dict(la.state_dict())
    if callable(score):
        with pytest.raises(cc.NotFittedError, match=r"'longest'.*la\.set_score\(longest\)"):
            _ = loaded(new).p_value
        loaded.set_score(longest)
    assert torch.equal(loaded(new).p_value, out.p_value)
    alpha = float(truth[truth < 1].max())
    fewest = 1 / (1 + int(la.posterior.calibration.reference.counts.min())) if by_class else 0
    if alpha >= fewest:
        assert torch.equal(out.is_known(alpha), truth > alpha)


def test_what_outdates_or_contradicts_a_score() -> None:
    la, x, scale = fitted("last_layer", "kron"), inputs(9, 8), 1.0

    def scaled(embedding: cc.EmbeddingDistribution) -> Tensor:
        return scale * embedding.uncertainty.numpy()

    la.calibrate(given(), by_class=True)
    with pytest.raises(cc.InputError, match=r"alpha.*the class with the fewest.*at least 99 inputs of each predicted"):
        la(x).is_known()
    centres = la.class_centres
    for options in ({"by_class": True}, {"score": "uncertainty"}, {"score": scaled}):
        la.class_centres = centres
        la.calibrate(given(), **options)
        p = la(x).p_value
        la.class_centres = None
        with pytest.raises(cc.NotFittedError, match="other class centres"):
            _ = la(x).p_value
        la.class_centres = centres
        assert torch.equal(la(x).p_value, p)
    scale = 1.5
    with pytest.raises(cc.NotFittedError, match=r"'scaled' gives other scores.*gallery"):
        _ = la(x).p_value
    with pytest.raises(cc.NotFittedError, match="other scores"):
        la.set_score(scaled)
    with pytest.raises(cc.InputError, match=r"'scaled'.*'longest'"):
        la.set_score(longest)
    with pytest.raises(cc.UnsupportedError, match=r"la is calibrated for the function 'scaled'.*p_value=False"):
        la.export("never.pt2")
    la.class_centres = None
    with pytest.raises(cc.UnsupportedError, match=r"class centres.*la\.measure_classes"):
        la.calibrate(given(), by_class=True)


def nan(embedding: cc.EmbeddingDistribution) -> Tensor:
    return embedding.uncertainty * torch.nan


def one_for_all(embedding: cc.EmbeddingDistribution) -> Tensor:
    return embedding.uncertainty.mean()


def judged(embedding: cc.EmbeddingDistribution) -> Tensor:
    return embedding.novelty


@each(
    "score, words",
    [
        ("cosine", "'novelty', 'uncertainty'"),
        (lambda e: e.uncertainty, "def my_score"),
        (nan, r"nan\(embedding\).*finite.*NaN"),
        (one_for_all, r"8 finite numbers.*shape \(\)"),
        (judged, "novelty: only a plain prediction"),
    ],
)
def test_scores_that_are_refused(score: Any, words: str) -> None:
    with pytest.raises(cc.ContrastiveCurvatureError, match=words):
        fitted().calibrate(given(), score=score)


def test_a_loader_is_read_as_a_fit_reads_it() -> None:
    """Every point once in the order of the data set; a sampler that repeats or leaves out points is not silent."""
    data = TensorDataset(inputs(GIVEN, 5), torch.arange(GIVEN) % 3)
    whole, new = DataLoader(data, 11), inputs(5, 6)
    shuffled = DataLoader(data, 11, shuffle=True, drop_last=True)
    repeated = DataLoader(data, 11, sampler=[0, *range(GIVEN)])

    def read(loader: Any) -> tuple[Tensor, Tensor]:
        la = fitted(weights="all")
        la.calibrate(loader)
        la.measure_classes(loader)
        return la(new).p_value, la.class_centres.sums

    torch.testing.assert_close(read(shuffled), read(whole), rtol=0, atol=0)
    with pytest.warns(UserWarning, match="loader: 30 of the 30 points .* are read, 1 of them more than once") as told:
        read(repeated)
    assert len(told) == 2

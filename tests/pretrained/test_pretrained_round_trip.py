"""A saved posterior comes back around its encoder, whatever its class, loss and options, and around no other one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from laplace_combinations import COMBINATIONS, for_every_combination
from saved_cases import batches, encoder, fitted, inputs, predicts_the_same, reloaded
from strategies import close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.io.pretrained.folder import TensorTable, flattened, restored
from contrastive_curvature.io.pretrained.posterior import KNOWN_LOSSES, _loss_options, posterior_classes
from contrastive_curvature.losses.base import Terms

pytestmark = pytest.mark.parametrize("device", DEVICES)

PROXIES = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3).sin()

LOSSES = [
    cc.ContrastiveLoss(None, 0.3, "type", pd_fix="psd"),
    cc.LogisticLoss(7, -3, 0.4),
    cc.SoftContrastiveLoss(3.0, 1.0, squared=True),
    cc.InfoNCELoss(0.3, "sum", "a"),
    cc.InfoNCELoss(scale=4.0),
    cc.SupConLoss(0.2, distance="euclidean"),
    cc.SigLIPLoss(5.0, -4.0),
    cc.MultiSimilarityLoss(3.0, 20.0, 0.4),
    cc.TripletLoss(0.3),
    cc.CoSENTLoss(12.0),
    cc.ProxyLoss(PROXIES, 8.0, 0.1, "arcface", "sum"),
    cc.ProxyLoss(nn.Parameter(PROXIES), 8.0),
]


class Steep(cc.PairLoss):
    """A loss of a user's own."""

    def __init__(self, power: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.power = power

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        return (attract * (1 - cosine) ** self.power + repel * (1 + cosine) ** self.power).sum()

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        k = self.power
        first = -attract * k * (1 - cosine) ** (k - 1) + repel * k * (1 + cosine) ** (k - 1)
        return Terms(first, k * (k - 1) * (attract * (1 - cosine) ** (k - 2) + repel * (1 + cosine) ** (k - 2)))


class Own(cc.ContrastiveGGN):
    """A backend of a user's own."""


def same_label(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    same = one.unsqueeze(1) == other.unsqueeze(0)
    return same, ~same


@for_every_combination
def test_every_posterior_predicts_what_it_did(weights: str, structure: str, device: str, tmp_path: Path) -> None:
    la = fitted(weights, structure, device)
    loaded = reloaded(la, tmp_path / "saved", device)
    assert type(loaded) is type(la)
    assert predicts_the_same(la, loaded, device)
    # All options are restored, so that another fit is the same fit.
    loaded.fit(batches(device))
    la.fit(batches(device))
    assert close(loaded(inputs(4, 3, device)).kappa, la(inputs(4, 3, device)).kappa, 1e-9)


def test_every_class_can_be_saved(device: str) -> None:
    keys = {kind._key[:2] for kind in posterior_classes().values()}
    assert keys == set(COMBINATIONS)


@pytest.mark.parametrize(
    ("weights", "structure", "options"),
    [
        ("last_layer", "kron", {"last_layer_name": "3", "damping": True}),
        ("last_layer", "diag", {"enable_backprop": True, "temperature": 0.5}),
        ("last_layer", "kron_lowrank", {"backend_kwargs": {"rank": 2, "margin": None}}),
        ("all", "lowrank", {"backend_kwargs": {"rank": 3, "negative_weight": 0.2}}),
        ("all", "kron", {"backend_kwargs": {"kfac_approx": "reduce", "pairs": "batch", "pd_fix": "full"}}),
        ("all", "diag", {"backend_kwargs": {"mc_samples": 2, "pairs": "batch"}}),
        ("all", "diag", {"backend_kwargs": {"loss": cc.InfoNCELoss(0.3), "candidates": "dataset"}}),
        ("last_layer", "full", {"backend_kwargs": {"loss": cc.SupConLoss(0.2, pd_fix="ggn_fixed")}}),
        ("last_layer", "kron", {"backend_kwargs": {"loss": cc.ProxyLoss(PROXIES, 8.0)}}),
        ("last_layer", "diag", {"backend_kwargs": {"negative_samples": 12}}),
    ],
)
def test_options_come_back(weights: str, structure: str, options: dict[str, Any], device: str, tmp_path: Path) -> None:
    options = copy.deepcopy(options)
    if "loss" in options.get("backend_kwargs", {}):
        options["backend_kwargs"]["loss"] = options["backend_kwargs"]["loss"].to(device)
    la = fitted(weights, structure, device, **options)
    loaded = reloaded(la, tmp_path / "saved", device)
    assert predicts_the_same(la, loaded, device)
    assert loaded.enable_backprop == la.enable_backprop
    assert loaded.curvature_error == la.curvature_error
    loaded.fit(batches(device))
    assert close(torch.as_tensor(loaded.loss), torch.as_tensor(la.loss), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    x = inputs(0, 24, device).to(dtype)
    la = Laplace(encoder(device).to(dtype), "contrastive", "last_layer", "kron")
    la.fit([(x, torch.arange(24, device=device) % 3)])
    la.optimize_prior_precision()
    loaded = cc.load_pretrained(la.save_pretrained(tmp_path / "saved"), encoder(device).to(dtype))
    mine, theirs = la(x), loaded(x)
    assert torch.equal(mine.mu, theirs.mu)
    assert close(mine.kappa, theirs.kappa, 1e-5)
    assert cc.pretrained.read_info(tmp_path / "saved").posteriors[0].dtype == str(la._dtype)
    if dtype is torch.float32:
        with pytest.raises(cc.InputError, match=r"encoder: expected .* got torch\.float64 instead of torch\.float32"):
            cc.load_pretrained(tmp_path / "saved", encoder(device))


@pytest.mark.parametrize("structure", ["layerwise", "diag"])
def test_a_prior_of_many_precisions(structure: str, device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "diag", device, calibrated=False)
    la.optimize_prior_precision(prior_structure=structure)
    assert predicts_the_same(la, reloaded(la, tmp_path / "saved", device), device)
    info = cc.pretrained.read_info(tmp_path / "saved").posteriors[0]
    assert info.prior_precision is None
    assert info.prior_precisions[0] == len(la.prior_precision) > 1


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_losses_are_rebuilt(loss: Any, device: str) -> None:
    table = TensorTable()
    plain = json.loads(json.dumps(flattened(_loss_options(loss), table, "loss")))
    made = KNOWN_LOSSES[type(loss).__name__](**restored(plain, table.tensors))
    assert repr(made) == repr(loss)
    z = inputs(5, 9, device)[:, :3]
    target: dict[str, Any] = {"labels": torch.arange(9, device=device) % 3}
    if isinstance(loss, cc.CoSENTLoss):
        first, second = torch.arange(8, device=device), torch.arange(1, 9, device=device)
        target = {"pairs": (first, second, torch.arange(8, device=device) % 3)}
    assert torch.equal(made.to(device)(z, **target), loss.to(device)(z, **target))


def test_a_loss_relation_or_backend_of_ones_own_is_given_again(device: str, tmp_path: Path) -> None:
    options = {"loss": Steep(3.0), "relation": same_label}
    la = fitted("last_layer", "diag", device, backend=Own, backend_kwargs=options)
    model, folder = encoder(device), la.save_pretrained(tmp_path / "saved")
    info = cc.pretrained.read_info(folder).posteriors[0]
    assert (info.needs_loss, info.relation) == (True, "same_label")
    loaded = cc.load_pretrained(folder, model, loss=Steep(3.0), relation=same_label, backend=Own)
    assert predicts_the_same(la, loaded, device)
    given: dict[str, Any] = {"loss": Steep(3.0), "relation": same_label, "backend": Own}
    for name, value, message in [
        ("loss", None, r"loss: expected the Steep .* Pass loss=Steep"),
        ("loss", Steep(2.0), r"loss: expected the Steep .* Steep\(power=3\.0.* got Steep\(power=2\.0"),
        ("loss", cc.LogisticLoss(), "loss: expected the Steep.* got LogisticLoss"),
        ("loss", "steep", "loss: expected the Steep .* got str"),
        ("relation", None, "relation: expected the function same_label .*got None"),
        ("relation", lambda a, b: same_label(a, b), "relation: expected the function same_label .* got .*lambda"),
        ("relation", 3, "relation: expected the function same_label .* got int"),
        ("backend", None, "backend: expected the Own of the fit, got None"),
    ]:
        with pytest.raises(cc.InputError, match=message):
            cc.load_pretrained(folder, model, **{**given, name: value})


def test_what_is_given_without_need_is_compared(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "diag", device, backend_kwargs={"margin": 0.5})
    model, folder = encoder(device), la.save_pretrained(tmp_path / "saved")
    assert predicts_the_same(la, cc.load_pretrained(folder, model, loss=cc.ContrastiveLoss(0.5)), device)
    with pytest.raises(cc.InputError, match=r"loss: .* ContrastiveLoss\(margin=0\.5.*margin=0\.6.*Leave it out"):
        cc.load_pretrained(folder, model, loss=cc.ContrastiveLoss(0.6))
    with pytest.raises(cc.InputError, match="relation: expected None, got same_label"):
        cc.load_pretrained(folder, model, relation=same_label)


def other_encoders(device: str) -> dict[str, tuple[nn.Module, str]]:
    """Encoders that are not the one of a saved posterior, and what the message says of them."""
    nudged = encoder(device)
    with torch.no_grad():
        nudged[0].weight[1, 2] += 1e-12
    buffer = encoder(device)
    buffer[1].running_mean[0] += 0.5
    deeper = nn.Sequential(*encoder(device), nn.Linear(3, 3).double().to(device))
    no_bias = encoder(device)
    no_bias[3] = nn.Linear(5, 3, bias=False).double().to(device)
    swapped = encoder(device)
    swapped[0].weight.data = swapped[0].weight.data[[1, 0, 2, 3, 4]]
    return {
        "trained on": (encoder(device, seed=1), "other numbers in 6 of 9 parameters and buffers: 0.weight, 0.bias"),
        "one number": (nudged, "other numbers in 1 of 9 parameters and buffers: 0.weight. Load the encoder's weights"),
        "a buffer": (buffer, "other numbers in 1 of 9 parameters and buffers: 1.running_mean"),
        "exchanged rows": (swapped, "other numbers in 1 of 9 parameters and buffers: 0.weight"),
        "another width": (encoder(device, width=6), "another shape of 0.weight, 0.bias, 1.weight and 4 more"),
        "another depth": (deeper, "4.weight, 4.bias are new"),
        "no bias": (no_bias, "3.bias is missing"),
        "single precision": (encoder(device).float(), "torch.float32 instead of torch.float64 in 0.weight"),
        "no weights": (encoder(device).to("meta"), "an encoder with its weights, got one on the device meta"),
        "another activation": (encoder(device, activation=nn.ReLU), "outputs for the example inputs"),
    }


@pytest.mark.parametrize("which", list(other_encoders("cpu")))
def test_another_encoder_is_refused_and_the_message_says_what_differs(which: str, device: str, tmp_path: Path) -> None:
    folder = fitted("last_layer", "kron", device).save_pretrained(tmp_path / "saved")
    model, message = other_encoders(device)[which]
    before = copy.deepcopy(model).state_dict()
    with pytest.raises(cc.InputError) as error:
        cc.load_pretrained(folder, model)
    assert message in str(error.value)
    assert str(error.value).startswith("encoder: expected ")
    if which != "no weights":
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_wrapped_encoder_is_the_same_one(device: str, tmp_path: Path) -> None:
    la = fitted("all", "diag", device)
    folder = la.save_pretrained(tmp_path / "saved")

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.module(x)
            return found

    assert predicts_the_same(la, cc.load_pretrained(folder, Wrapper(encoder(device))), device)
    with pytest.raises(cc.InputError, match=r"other numbers in 6 of 9 parameters and buffers: 0\.weight"):
        cc.load_pretrained(folder, Wrapper(encoder(device, seed=1)))


def towers(device: str, shared: bool) -> cc.TwoTowers:
    a = encoder(device, seed=5)
    return cc.TwoTowers(a, a if shared else encoder(device, seed=6, activation=nn.ReLU, width=4))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("weights", "structure"), [("last_layer", "kron"), ("all", "diag")])
def test_two_towers(weights: str, structure: str, shared: bool, device: str, tmp_path: Path) -> None:
    names = {"last_layer_name": ("3", "3")} if weights == "last_layer" else {}
    options = {"loss": cc.InfoNCELoss(0.5, pd_fix="ggn_fixed")}
    la = Laplace(towers(device, shared), "contrastive", weights, structure, backend_kwargs=options, **names)
    data = [(inputs(7, 8, device), inputs(8, 8, device)), (inputs(9, 5, device), inputs(10, 5, device))]
    la.fit(data)
    la.optimize_prior_precision()
    la.a.calibrate([inputs(1, 20, device)])
    folder = la.save_pretrained(tmp_path / "saved", encoder_source="two of mine")
    loaded = cc.load_pretrained(folder, towers(device, shared))
    assert loaded.shared == shared
    for one, other in ((la.a, loaded.a), (la.b, loaded.b)):
        assert predicts_the_same(one, other, device)
    info = cc.pretrained.read_info(folder)
    assert (info.towers, info.shared, len(info.posteriors)) == (True, shared, 1 if shared else 2)
    with pytest.raises(cc.InputError, match=r"one module for both|two modules"):
        cc.load_pretrained(folder, towers(device, not shared))
    with pytest.raises(cc.InputError, match="encoder: expected a TwoTowers, got a Sequential"):
        cc.load_pretrained(folder, encoder(device))
    other = towers(device, shared)
    other.encoder_b = other.encoder_b if shared else encoder(device, seed=7, activation=nn.ReLU, width=4)
    if not shared:
        with pytest.raises(cc.InputError, match=r"encoder_b: expected the encoder .* other numbers"):
            cc.load_pretrained(folder, other)


def test_one_encoder_is_no_pair_of_towers(device: str, tmp_path: Path) -> None:
    folder = fitted("last_layer", "diag", device).save_pretrained(tmp_path / "saved")
    with pytest.raises(cc.InputError, match="encoder: expected one encoder, got a TwoTowers"):
        cc.load_pretrained(folder, towers(device, shared=True))


@pytest.mark.parametrize("curve", ["logistic", "isotonic"])
def test_a_match_probability_goes_with_it(curve: Any, device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "kron", device)
    x, y = inputs(0, 40, device), torch.arange(40, device=device) % 2
    match = cc.MatchProbability(curve=curve).fit_retrieval(la(x), y)
    folder = la.save_pretrained(tmp_path / "saved", match=match)
    loaded = cc.pretrained.load_match(folder)
    q, gallery = la(inputs(11, 5, device)), la(x)
    assert close(loaded.nearest(q, gallery).right, match.nearest(q, gallery).right, 1e-12)
    assert cc.pretrained.read_info(folder).match
    plain = la.save_pretrained(tmp_path / "plain")
    with pytest.raises(cc.InputError, match=r"expected a posterior with a MatchProbability.*match="):
        cc.pretrained.load_match(plain)
    for wrong, message in (
        (cc.MatchProbability(), "one that is not fitted"),
        (3, "instance of MatchProbability, got 3"),
    ):
        with pytest.raises(cc.InputError, match=message):
            la.save_pretrained(tmp_path / "other", match=wrong)


def test_an_example_takes_the_place_of_made_up_inputs(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "kron", device)
    example = inputs(12, 1, device)
    x = example[0].cpu().numpy().tobytes()
    plain, given = la.save_pretrained(tmp_path / "plain"), la.save_pretrained(tmp_path / "given", example=example)
    holds = {folder: any(x in path.read_bytes() for path in folder.iterdir()) for folder in (plain, given)}
    assert holds == {plain: False, given: True}
    assert predicts_the_same(la, cc.load_pretrained(given, encoder(device)), device)
    for wrong in (inputs(12, 1, device)[:, :3], torch.full((1, 4), torch.nan, device=device).double(), "x", 3):
        with pytest.raises(cc.InputError, match=r"example: expected (inputs|a list of texts|a tensor)"):
            la.save_pretrained(tmp_path / "wrong", example=wrong)
    with pytest.raises(cc.InputError, match="example: expected None for this posterior"):
        fitted("all", "diag", device).save_pretrained(tmp_path / "wrong", example=example)
    assert not (tmp_path / "wrong").exists()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(device: str, tmp_path: Path) -> None:
    with pytest.raises(cc.NotFittedError):
        Laplace(encoder(device), "contrastive").save_pretrained(tmp_path / "saved")

    class Mine(cc.laplace.ContrastiveDiagLaplace):
        _key = ("all", "mine", "contrastive")

    la = Mine(encoder(device), "contrastive")
    la.fit(batches(device))
    with pytest.raises(cc.UnsupportedError, match=r"Mine is a class of your own.*state_dict"):
        la.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_the_information_is_that_of_the_posterior(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "kron", device)
    said = {"metrics": {"auroc": 0.75, "recall": 1}, "license": "mit", "fitted_on": "digits", "tags": ["a"]}
    info = cc.pretrained.read_info(la.save_pretrained(tmp_path / "saved", **said))
    one = info.posteriors[0]
    assert (one.kind, one.subset_of_weights, one.hessian_structure) == (type(la).__name__, "last_layer", "kron_lowrank")
    assert (one.n_data, one.n_outputs, one.n_params, one.dtype) == (24, 3, 18, "torch.float64")
    assert (one.prior_precision, one.temperature) == (float(la.prior_precision), la.temperature)
    assert (one.calibrated, one.n_calibration, one.n_classes) == (True, 20, 3)
    assert one.typical_norm == la.typical_norm
    assert one.loss == repr(cc.ContrastiveLoss())
    assert (one.needs_loss, one.relation) == (False, None)
    assert one.options["margin"] == 0.7
    assert one.n_encoder_tensors == 9
    assert info.metrics == {"auroc": 0.75, "recall": 1.0}
    assert info.about == {"license": "mit", "fitted_on": "digits", "tags": ["a"]}
    assert info.versions["torch"] == torch.__version__
    assert info.size == sum(p.stat().st_size for p in info.folder.glob("*.safetensors"))
    assert json.loads(json.dumps(info.to_plain(), allow_nan=False)) == info.to_plain()


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | FINITE | st.text() | st.just(torch.tensor([[1.0, -0.0]])),
        lambda part: st.lists(part) | st.tuples(part, part) | st.dictionaries(st.from_regex("[a-z_]+"), part),
        max_leaves=12,
    )
)
def test_any_state_comes_back(device: str, value: Any) -> None:
    table = TensorTable()
    plain = json.loads(json.dumps(flattened(value, table, "state"), allow_nan=False))
    # repr tells types and signed zeros apart.
    assert repr(restored(plain, table.tensors)) == repr(value)


def test_a_tensor_in_two_places_is_kept_once(device: str) -> None:
    table, x = TensorTable(), inputs(0, 3, device)
    plain = flattened({"a": x, "b": [x, x.T, x.clone()]}, table, "state")
    assert sorted(table.tensors) == ["state.a", "state.b.1", "state.b.2"]
    assert torch.equal(restored(plain, table.tensors)["b"][1], x.T.cpu())


def test_objects_are_refused(device: str) -> None:
    wrongs: list[Any] = [{1.5: 2}, {"a": {3}}, object(), b"x", 1j]
    for wrong in wrongs:
        with pytest.raises(cc.UnsupportedError, match=r"state.*cannot be saved"):
            flattened(wrong, TensorTable(), "state")


def test_a_new_loss_of_the_library_needs_no_list(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exported by ``contrastive_curvature.losses`` is rebuilt, also from arguments of its base class."""
    monkeypatch.setitem(KNOWN_LOSSES, "Steep", Steep)
    la = fitted("last_layer", "diag", device, backend_kwargs={"loss": Steep(3.0, negative_weight=0.3, pd_fix="psd")})
    assert predicts_the_same(la, reloaded(la, tmp_path / "saved", device), device)


def test_every_exported_loss_is_known(device: str) -> None:
    del device
    kinds = [getattr(cc, name) for name in cc.__all__ if name.endswith("Loss") and name not in ("PairLoss", "RowLoss")]
    assert {kind for kind in kinds if issubclass(kind, cc.losses.CosineLoss)} == set(KNOWN_LOSSES.values())

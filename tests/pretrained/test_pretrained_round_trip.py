"""A saved posterior comes back around its encoder, whatever its class, loss and options, and around no other one."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace_combinations import for_every_combination
from saved_cases import batches, encoder, fitted, inputs, predicts_the_same, reloaded
from strategies import close
from tables import each, refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.codec import TensorTable, packed, unpacked
from contrastive_curvature.io.pretrained.save import KNOWN_LOSSES, _loss_config
from contrastive_curvature.structures import REMOVED_STRUCTURES

PROXIES = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3).sin()

LOSSES = [
    cc.ContrastiveLoss(None, 0.3, "type", pd_fix="psd"),
    cc.LogisticLoss(7, -3, 0.4),
    cc.SoftContrastiveLoss(3.0, 1.0),
    cc.InfoNCELoss(0.3, "sum", "a"),
    cc.InfoNCELoss(scale=4.0),
    cc.SupConLoss(0.2, distance="euclidean"),
    cc.SigLIPLoss(5.0, -4.0),
    cc.MultiSimilarityLoss(3.0, 20.0, 0.4),
    cc.TripletLoss(0.3),
    cc.ProxyLoss(PROXIES, 8.0, 0.1, "arcface", "sum"),
    cc.ProxyLoss(nn.Parameter(PROXIES), 8.0),
]


class Steep(cc.ContrastiveLoss):
    """A loss of a user's own."""


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


@pytest.mark.parametrize(
    ("weights", "structure", "options"),
    [
        ("last_layer", "kron", {"last_layer_name": "3"}),
        ("last_layer", "diag", {"enable_backprop": True, "temperature": 0.5}),
        ("last_layer", "full", {"backend_kwargs": {"loss": cc.SupConLoss(0.2, pd_fix="ggn_fixed")}}),
        ("all", "kron", {"backend_kwargs": {"pairs": "batch", "mc_samples": 2}}),
    ],
)
def test_options_come_back(weights: str, structure: str, options: dict[str, Any], device: str, tmp_path: Path) -> None:
    la = fitted(weights, structure, device, **options)
    loaded = reloaded(la, tmp_path / "saved", device)
    assert predicts_the_same(la, loaded, device)
    assert loaded.enable_backprop == la.enable_backprop
    loaded.fit(batches(device))
    assert close(torch.as_tensor(loaded.loss), torch.as_tensor(la.loss), 1e-12)


def test_half_precision(device: str, tmp_path: Path) -> None:
    x, half = inputs(0, 24, device).bfloat16(), encoder(device).bfloat16()
    la = Laplace(half, "contrastive", "last_layer", "kron")
    la.fit([(x, torch.arange(24, device=device) % 3)])
    la.optimize_prior_precision()
    loaded = cc.load_pretrained(la.save_pretrained(tmp_path / "saved"), copy.deepcopy(half))
    mine, theirs = la(x), loaded(x)
    assert torch.equal(mine.mu, theirs.mu)
    assert close(mine.kappa, theirs.kappa, 1e-5)


def test_a_prior_of_many_precisions(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "diag", device, calibrated=False)
    la.optimize_prior_precision(prior_structure="diag")
    assert predicts_the_same(la, reloaded(la, tmp_path / "saved", device), device)
    info = cc.pretrained.read_info(tmp_path / "saved").posteriors[0]
    assert info.prior_precision is None
    assert info.prior_precisions[0] == len(la.prior_precision) > 1


@each("loss", LOSSES)
def test_losses_are_rebuilt(loss: Any, device: str) -> None:
    table = TensorTable()
    plain = json.loads(json.dumps(packed(_loss_config(loss), table, "loss")))
    made = KNOWN_LOSSES[type(loss).__name__].from_config(unpacked(plain, table.tensors))
    assert repr(made) == repr(loss)
    z = inputs(5, 9, device)[:, :3]
    labels = torch.arange(9, device=device) % 3
    assert torch.equal(made.to(device)(z, labels), loss.to(device)(z, labels))


def test_a_loss_and_a_relation_of_ones_own_are_given_again(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "diag", device, backend_kwargs={"loss": Steep(0.5), "relation": same_label})
    model, folder = encoder(device), la.save_pretrained(tmp_path / "saved")
    info = cc.pretrained.read_info(folder).posteriors[0]
    assert (info.needs_loss, info.relation) == (True, "same_label")
    given: dict[str, Any] = {"loss": Steep(0.5), "relation": same_label}
    assert predicts_the_same(la, cc.load_pretrained(folder, model, **given), device)
    for name, value, message in [
        ("loss", None, r"loss: expected the Steep .* Pass loss=Steep"),
        ("loss", Steep(0.6), r"loss: expected the Steep .* Steep\(margin=0\.5.* got Steep\(margin=0\.6"),
        ("relation", None, "relation: expected the function same_label .*got None"),
    ]:
        with pytest.raises(cc.InputError, match=message):
            cc.load_pretrained(folder, model, **{**given, name: value})


def test_what_is_given_without_need_is_compared(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "diag", device, backend_kwargs={"margin": 0.5})
    model, folder = encoder(device), la.save_pretrained(tmp_path / "saved")
    assert predicts_the_same(la, cc.load_pretrained(folder, model, loss=cc.ContrastiveLoss(0.5)), device)
    with pytest.raises(cc.InputError, match=r"loss: .* ContrastiveLoss\(margin=0\.5.*margin=0\.6.*Leave it out"):
        cc.load_pretrained(folder, model, loss=cc.ContrastiveLoss(0.6))
    refused(lambda: cc.load_pretrained(folder, model, relation=same_label), "relation: expected None, got same_label")


def test_another_encoder_is_refused_and_the_message_says_what_differs(device: str, tmp_path: Path) -> None:
    folder = fitted("last_layer", "kron", device).save_pretrained(tmp_path / "saved")
    nudged = encoder(device)
    with torch.no_grad():
        nudged[0].weight[1, 2] += 1e-12
    buffer = encoder(device)
    buffer[1].running_mean[0] += 0.5
    deeper = nn.Sequential(*encoder(device), nn.Linear(3, 3).double().to(device))
    no_bias = encoder(device)
    no_bias[3] = nn.Linear(5, 3, bias=False).double().to(device)
    others = {
        "trained on": (encoder(device, seed=1), "other numbers in 6 of 9 parameters and buffers: 0.weight, 0.bias"),
        "one number": (nudged, "other numbers in 1 of 9 parameters and buffers: 0.weight. Load the encoder's weights"),
        "a buffer": (buffer, "other numbers in 1 of 9 parameters and buffers: 1.running_mean"),
        "another width": (encoder(device, width=6), "another shape of 0.weight, 0.bias, 1.weight and 4 more"),
        "another depth": (deeper, "one with 4.weight, 4.bias too"),
        "no bias": (no_bias, "one without 3.bias"),
        "single precision": (encoder(device).float(), "torch.float32 instead of torch.float64 in 0.weight"),
        "no weights": (encoder(device).to("meta"), "an encoder with its weights, got one on the device meta"),
        "another activation": (encoder(device, activation=nn.ReLU), "outputs for the example inputs"),
    }

    for which, (model, message) in others.items():
        before = copy.deepcopy(model).state_dict()
        with pytest.raises(cc.InputError) as error:
            cc.load_pretrained(folder, model)
        assert message in str(error.value), which
        if which != "no weights":
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(cc.InputError, match="encoder: expected one encoder, got a TwoTowers"):
        cc.load_pretrained(folder, towers(device, shared=True))


def test_a_wrapped_encoder_is_the_same_one(device: str, tmp_path: Path) -> None:
    la = fitted("all", "diag", device)
    folder = la.save_pretrained(tmp_path / "saved")
    assert predicts_the_same(la, cc.load_pretrained(folder, nn.DataParallel(encoder(device))), device)
    with pytest.raises(cc.InputError, match=r"other numbers in 6 of 9 parameters and buffers: 0\.weight"):
        cc.load_pretrained(folder, nn.DataParallel(encoder(device, seed=1)))


def towers(device: str, shared: bool) -> cc.TwoTowers:
    a = encoder(device, seed=5)
    return cc.TwoTowers(a, a if shared else encoder(device, seed=6, activation=nn.ReLU, width=4))


@pytest.mark.parametrize(
    ("weights", "structure", "shared"), [("last_layer", "kron", False), ("all", "diag", False), ("all", "diag", True)]
)
def test_two_towers(weights: str, structure: str, shared: bool, device: str, tmp_path: Path) -> None:
    names = {"last_layer_name": ("3", "3")} if weights == "last_layer" else {}
    options = {"loss": cc.InfoNCELoss(0.5, pd_fix="ggn_fixed")}
    la = Laplace(towers(device, shared), "contrastive", weights, structure, backend_kwargs=options, **names)
    data = [(inputs(7, 8, device), inputs(8, 8, device)), (inputs(9, 5, device), inputs(10, 5, device))]
    la.fit(data)
    la.optimize_prior_precision()
    la.a.calibrate([inputs(1, 20, device)])
    folder = la.save_pretrained(tmp_path / "saved")
    loaded = cc.load_pretrained(folder, towers(device, shared))
    assert loaded.shared == shared
    for one, other in ((la.a, loaded.a), (la.b, loaded.b)):
        assert predicts_the_same(one, other, device)
    info = cc.pretrained.read_info(folder)
    assert (info.towers, info.shared, len(info.posteriors)) == (True, shared, 1 if shared else 2)
    with pytest.raises(cc.InputError, match=r"one module for both|two modules"):
        cc.load_pretrained(folder, towers(device, not shared))
    refused(lambda: cc.load_pretrained(folder, encoder(device)), "encoder: expected a TwoTowers, got a Sequential")
    if not shared:
        other = towers(device, shared)
        other.encoder_b = encoder(device, seed=7, activation=nn.ReLU, width=4)
        refused(lambda: cc.load_pretrained(folder, other), "encoder_b: expected the encoder", "other numbers")


def test_an_example_takes_the_place_of_made_up_inputs(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "kron", device)
    example = inputs(12, 1, device)
    x = example[0].cpu().numpy().tobytes()
    plain, given = la.save_pretrained(tmp_path / "plain"), la.save_pretrained(tmp_path / "given", example=example)
    holds = {folder: any(x in path.read_bytes() for path in folder.iterdir()) for folder in (plain, given)}
    assert holds == {plain: False, given: True}
    assert predicts_the_same(la, cc.load_pretrained(given, encoder(device)), device)
    refused(lambda: la.save_pretrained(tmp_path / "wrong", example=example[:, :3]), "example: expected inputs")
    with pytest.raises(cc.InputError, match="example: expected None for this posterior"):
        fitted("all", "diag", device).save_pretrained(tmp_path / "wrong", example=example)
    assert not (tmp_path / "wrong").exists()


def test_what_is_not_fitted_is_refused_before_anything_is_written(device: str, tmp_path: Path) -> None:
    refused(lambda: Laplace(encoder(device), "contrastive").save_pretrained(tmp_path / "saved"), kind=cc.NotFittedError)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_removed_structure_says_what_to_use_instead(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "diag", device)
    for structure, instead in REMOVED_STRUCTURES.items():
        la.hessian_structure = structure
        la.save_pretrained(tmp_path / structure)
        refused(lambda s=structure: cc.load_pretrained(tmp_path / s, encoder(device)), "hessian_structure", instead)


def test_the_information_is_that_of_the_posterior(device: str, tmp_path: Path) -> None:
    la = fitted("last_layer", "kron", device)
    info = cc.pretrained.read_info(la.save_pretrained(tmp_path / "saved"))
    one = info.posteriors[0]
    assert (one.subset_of_weights, one.hessian_structure) == ("last_layer", "kron_lowrank")
    assert (one.n_data, one.n_outputs, one.n_params, one.dtype) == (24, 3, 18, "torch.float64")
    assert (one.prior_precision, one.temperature) == (float(la.prior_precision), la.temperature)
    assert (one.calibrated, one.n_calibration, one.n_classes) == (True, 20, 3)
    assert (one.typical_norm, one.loss, one.needs_loss) == (la.typical_norm, repr(cc.ContrastiveLoss()), False)
    assert type(info).model_validate_json(info.model_dump_json()) == info


def test_every_exported_loss_is_known() -> None:
    kinds = [getattr(cc, name) for name in cc.__all__ if name.endswith("Loss") and name not in ("PairLoss", "RowLoss")]
    assert {kind for kind in kinds if issubclass(kind, cc.losses.CosineLoss)} == set(KNOWN_LOSSES.values())

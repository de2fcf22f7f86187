"""What two towers refuse, by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from tables import each
from torch import nn
from tower_cases import LOSSES, batches, encoders, numbers, posterior

import contrastive_curvature as cc
from contrastive_curvature.laplace import ContrastiveDiagLaplace
from contrastive_curvature.network.two_towers import TwoTowers

pytestmark = pytest.mark.parametrize("device", DEVICES)


def made(device: str, name: str = "infonce", **options: Any) -> Any:
    return posterior(*encoders(device), "last_layer", "diag", LOSSES[name](), **options)


@each("wrong", [None, nn.Linear])
def test_encoders_are_modules(wrong: object, device: str) -> None:
    for place, pair in (("encoder_a", (wrong, nn.Linear(2, 2))), ("encoder_b", (nn.Linear(2, 2), wrong))):
        with pytest.raises(cc.InputTypeError, match=f"{place}: expected a torch.nn.Module"):
            TwoTowers(*pair)  # type: ignore[arg-type]
    with pytest.raises(cc.InputTypeError, match="expected one encoder"):
        TwoTowers(TwoTowers(*encoders(device)), nn.Linear(2, 2))


def test_towers_run_both_encoders(device: str) -> None:
    a, b = encoders(device)
    x_a, x_b = batches(device)[0]
    z_a, z_b = TwoTowers(a, b)(x_a, x_b)
    assert torch.equal(z_a, a(x_a))
    assert torch.equal(z_b, b(x_b))
    assert not TwoTowers(a, b).shared
    assert TwoTowers(a, a).shared


@each(
    "options, message",
    [
        ({}, r"backend_kwargs: loss: .*InfoNCELoss\(temperature=...\).*SigLIPLoss"),
        ({"loss": cc.ContrastiveLoss()}, "loss: ContrastiveLoss compares points of one tower"),
        ({"loss": cc.ProxyLoss(torch.ones(3, 3))}, "loss: ProxyLoss compares points of one tower"),
        ({"loss": LOSSES["infonce"](), "candidates": "dataset"}, "candidates='dataset': two towers"),
        ({"loss": LOSSES["infonce"](), "relation": lambda a, b: (a, b)}, "relation: inputs of two towers"),
    ],
)
def test_losses_and_options(options: dict[str, Any], message: str, device: str) -> None:
    towers = TwoTowers(*encoders(device))
    with pytest.raises((cc.InputError, cc.UnsupportedError), match=message):
        Laplace(towers, "contrastive", "all", "diag", backend_kwargs=options)


@each(
    "weights, structure, message",
    [
        ("subnetwork", "diag", "subset_of_weights='subnetwork'"),
        ("all", "lowrank", "hessian_structure='lowrank': two towers"),
        ("last_layer", "gp", "hessian_structure='gp': two towers"),
        ("all", "kron_lowrank", "subset_of_weights='all' has no such structure"),
    ],
)
def test_structures(weights: str, structure: str, message: str, device: str) -> None:
    with pytest.raises(cc.UnsupportedError, match=message):
        posterior(*encoders(device), weights, structure, LOSSES["infonce"]())


def test_towers_of_other_places_or_widths(device: str) -> None:
    a, _ = encoders(device)
    with pytest.raises(cc.InputError, match=r"encoder_b: expected torch\.float64"):
        posterior(a, nn.Linear(2, 3).to(device), "all", "diag", LOSSES["infonce"]())
    for weights in ("all", "last_layer"):
        la = posterior(a, nn.Linear(2, 5).double().to(device), weights, "diag", LOSSES["infonce"]())
        with pytest.raises(cc.InputError, match="3 outputs of encoder_a and 5 of encoder_b"):
            la.fit(batches(device))
    with pytest.raises(cc.InputError, match="encoder_b: model: expected an encoder with parameters"):
        posterior(a, nn.Identity(), "all", "diag", LOSSES["infonce"]())
    narrow = nn.Linear(2, 1).double().to(device)
    with pytest.raises(cc.InputError, match=r"encoder_b: model: expected embeddings of D >= 2"):
        posterior(a, narrow, "all", "diag", LOSSES["infonce"]()).fit(batches(device))


def test_towers_that_share_a_part(device: str) -> None:
    """A common trunk has no posterior of a last layer, and two of all parameters."""
    torch.manual_seed(0)
    trunk, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)
    a, b = (nn.Sequential(trunk, nn.Linear(4, 3)).double().to(device) for _ in range(2))
    data = batches(device, widths=(4, 4))
    with pytest.raises(cc.UnsupportedError, match=r"share the parameters '0.0.weight', '0.0.bias'"):
        posterior(a, b, "all", "diag", LOSSES["infonce"]())
    posterior(a, b, "last_layer", "diag", LOSSES["infonce"]()).fit(data)
    c, d = (nn.Sequential(nn.Linear(4, 4), head).double().to(device) for _ in range(2))
    with pytest.raises(cc.UnsupportedError, match="share the parameters 'weight', 'bias'"):
        posterior(c, d, "last_layer", "diag", LOSSES["infonce"]()).fit(data)


def test_batches(device: str) -> None:
    a, b = (x.to(device) for x in (numbers(0, 4, 4), numbers(1, 4, 2)))
    labels = torch.arange(4, device=device)
    for batch, message in (
        ({"pixel_values": a, "input_ids": b}, "got a dict. An encoder that takes a mapping"),
        (a, "got a Tensor"),
        ((a, b, labels, labels), "got a tuple of 4"),
        ((a, b[:3]), "expected as many second views as first ones, got 4 and 3"),
        ((a, b, labels[:3]), "expected 4 labels, one a pair, got 3"),
        ((a, b[:3], labels), "expected 7 labels, of 4 inputs of the first tower and then of 3 of the second, got 4"),
        ((a, b[:3], (labels, labels)), "expected 3 labels of b, got 4"),
        ((a, b, labels.double()), "labels"),
        ((a, b, "labels"), "expected labels as a tensor, got a str"),
        ((a, b, (labels, 3)), r"expected \(labels of a, labels of b\)"),
        ((a[:0], b[:0]), "expected a batch of at least one point"),
    ):
        with pytest.raises(cc.InputError, match=message):
            made(device, "supcon").fit([batch])
    with pytest.raises(cc.InputError, match="at least one batch, got an empty loader"):
        made(device).fit([])
    with pytest.raises(cc.InputTypeError, match="iterated several times"):
        made(device).fit(iter([(a, b)]))
    with pytest.raises(cc.InputError, match="positives='labels', got no labels"):
        made(device, positives="labels").fit([(a, b)])


@each("name", LOSSES)
def test_nothing_to_compare(name: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    """Batches of one pair have no negative; labels may leave no positive."""
    a, b = (x.to(device) for x in (numbers(0, 4, 4), numbers(1, 4, 2)))
    with pytest.raises(cc.InputError, match="batches of two pairs or more, got 2 batches whose inputs all belong"):
        made(device, name).fit([(a[:1], b[:1]), (a[1:2], b[1:2])])
    same = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(cc.InputError, match="batches of two pairs or more"):
        made(device, name).fit([(a, b, (same, same))])
    if name != "siglip":
        with pytest.raises(cc.InputError, match=r"at least one anchor with .*, got none of 8"):
            made(device, name).fit([(a, b, (torch.arange(4), torch.arange(4, 8)))])
    caplog.clear()
    with caplog.at_level(logging.INFO, "contrastive_curvature"):
        made(device, name).fit([(a[:1], b[:1]), (a, b)])
    assert "1 of 2 batches had no inputs that belong together less than others" in caplog.text


def test_grades(device: str) -> None:
    a, b = (x.to(device) for x in (numbers(0, 4, 4), numbers(1, 4, 2)))
    grades = torch.arange(4.0, device=device)
    for batch, message in (
        ((a, b), r"expected \(a, b, grades\) with a grade for every pair, got 4 and 4 inputs\."),
        ((a, b, grades[:3]), "got 4 and 4 inputs with 3 grades"),
        ((a, b[:3], grades), "got 4 and 3 inputs with 4 grades"),
        ((a, b, grades * torch.inf), r"pairs \(grades\): expected finite numbers"),
        ((a, b, 0 * grades), "got 1 batches whose inputs all belong together, or as much"),
    ):
        with pytest.raises(cc.InputError, match=message):
            posterior(*encoders(device), "all", "diag", cc.CoSENTLoss()).fit([batch])


def test_methods(device: str) -> None:
    la = made(device)
    x = numbers(0, 4, 4).to(device)
    with pytest.raises(cc.UnsupportedError, match=r"Call la.a\(x\) or la.b\(x\)"):
        la(x)
    with pytest.raises(cc.NotFittedError):
        la.state_dict()
    with pytest.raises(cc.NotFittedError):
        la.curvature_product(batches(device), x, x)
    with pytest.raises(cc.NotFittedError):
        la.optimize_prior_precision()
    la.fit(batches(device))
    with pytest.raises(cc.UnsupportedError, match=r"la\.a\.optimize_prior_precision"):
        la.optimize_prior_precision(method="gridsearch")
    v_a, v_b = torch.zeros_like(la.a.mean), torch.zeros_like(la.b.mean)
    for vectors, message in (
        ((v_a,), "v_b: expected a vector over the parameters of the second tower, got none"),
        ((v_a, v_b[1:]), "v_b: expected shape"),
        ((v_a.float(), v_b), "v_a: expected torch.float64"),
        ((v_a, v_b + torch.nan), "v_b: expected finite numbers"),
        ((v_a, 3), "v_b: expected a torch.Tensor"),
    ):
        with pytest.raises(cc.InputError, match=message):
            la.curvature_product(batches(device), *vectors)
    with pytest.raises(cc.InputTypeError, match="progress_bar"):
        la.fit(batches(device), progress_bar="yes")


def test_two_towers_are_no_encoder(device: str) -> None:
    """Everything that takes one encoder says what to do with two."""
    towers = cc.TwoTowers(nn.Linear(3, 2), nn.Linear(4, 2)).to(device)
    for call in (
        lambda: cc.OnlineLaplace(towers, probe=torch.rand(2, 3, device=device), n_data=10),
        lambda: cc.ContrastiveGGN(towers),
        lambda: ContrastiveDiagLaplace(towers),
        lambda: cc.ggn(towers, torch.rand(4, 3, device=device), torch.zeros(4, dtype=torch.int64)),
    ):
        with pytest.raises(cc.InputTypeError, match=r"one encoder.*TwoTowers.*encoder_a or encoder_b"):
            call()


def test_labels_that_cannot_be_used(device: str) -> None:
    """Labels beside a pair are taken in every form, or refused; never dropped."""
    model = cc.TwoTowers(nn.Linear(3, 2), nn.Linear(4, 2)).double().to(device)
    a, b = numbers(0, 6, 3).to(device), numbers(1, 6, 4).to(device)
    labels = (torch.arange(6) % 2).to(device)

    def fitted(batch: Any) -> float:
        la = Laplace(model, "contrastive", backend_kwargs={"loss": cc.SupConLoss(0.2)})
        la.fit([batch])
        return float(la.loss)

    forms = [(a, b, labels), ((a, b), labels), (a, b, (labels, labels)), ((a, b), (labels, labels))]
    values = [fitted(batch) for batch in forms]
    assert max(values) - min(values) < 1e-12
    assert abs(values[0] - fitted((a, b))) > 1e-3
    for wrong in (labels.tolist(), ["x"] * 6):
        with pytest.raises(cc.InputTypeError, match=r"labels as a tensor.*positives='views'"):
            fitted(((a, b), wrong))

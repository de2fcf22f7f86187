"""Posteriors of two towers: predictions, priors, states, calibration and what a loader may yield."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from strategies import close
from tables import covering, refused
from tiny import OfMapping
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tower_cases import LOSSES, batches, encoders, numbers, posterior

import contrastive_curvature as cc
from contrastive_curvature.network.two_towers import TwoTowers

COMBINATIONS = [
    ("all", "diag"),
    ("all", "full"),
    ("all", "kron"),
    ("last_layer", "diag"),
    ("last_layer", "full"),
    ("last_layer", "kron"),
    ("last_layer", "kron_lowrank"),
]


def fitted(weights: str, structure: str, device: str, shared: bool = False, labelled: bool = True) -> Any:
    a, b = encoders(device)
    data = batches(device, labelled, (4, 4) if shared else (4, 2))
    la = posterior(a, a if shared else b, weights, structure, LOSSES["infonce"](pd_fix="ggn_fixed"))
    la.fit(data)
    la.optimize_prior_precision()
    return la


@covering(1, shared=[False, True], weights__structure=COMBINATIONS)
def test_state_makes_the_same_posterior(weights: str, structure: str, shared: bool, device: str) -> None:
    la = fitted(weights, structure, device, shared)
    one, other = encoders(device)
    again = posterior(one, one if shared else other, weights, structure, LOSSES["infonce"](pd_fix="ggn_fixed"))
    again.load_state_dict(la.state_dict())
    x_a, x_b = numbers(7, 5, 4).to(device), numbers(8, 3, 4 if shared else 2).to(device)
    for mine, other, x in ((la.a, again.a, x_a), (la.b, again.b, x_b)):
        assert torch.equal(mine(x).covariance, other(x).covariance)
    assert again.shared is shared
    assert again.loss == la.loss


def test_bad_state_leaves_both_posteriors(device: str) -> None:
    la, other = (fitted("all", "diag", device, labelled=labelled) for labelled in (True, False))
    state = other.state_dict()
    state["b"]["curvature"] = {**state["b"]["curvature"], "entries": state["b"]["curvature"]["entries"][1:]}
    before = la.state_dict()
    refused(lambda: la.load_state_dict(state), "encoder_b: state_dict")
    for tower in "ab":
        assert la.state_dict()[tower]["checksum"] == before[tower]["checksum"]
    cut = {key: value for key, value in before.items() if key != "b"}
    for wrong in (
        {},
        cut,
        {**before, "shared": None},
        other.a.state_dict(),
        fitted("all", "diag", device, shared=True).state_dict(),
    ):
        with pytest.raises(cc.InputError, match="state_dict: expected"):
            la.load_state_dict(wrong)


def test_failed_fit_leaves_both_posteriors(device: str) -> None:
    la = fitted("last_layer", "diag", device)
    x = numbers(7, 5, 4).to(device)
    before = la.a(x).variance
    bad = batches(device)
    bad[1] = (bad[1][0], torch.full_like(bad[1][1], torch.nan))
    refused(lambda: la.fit(bad), "encoder_b(b) of batch 1", "expected finite embeddings")
    assert torch.equal(la.a(x).variance, before)
    refused(lambda: la.optimize_prior_precision(strength=-1.0))
    assert torch.equal(la.a(x).variance, before)


def test_what_a_loader_may_yield(device: str) -> None:
    """Labels of both towers count; one label a pair counts for losses of classes, or where it is asked for."""
    a, b = numbers(0, 4, 4).to(device), numbers(1, 4, 2).to(device)
    labels = torch.tensor([0, 0, 1, 2], device=device)
    alone = torch.arange(4, device=device)

    def curvature(name: str, batch: Any, **options: Any) -> Tensor:
        la = posterior(*encoders(device), "all", "diag", LOSSES[name](), **options)
        la.fit([batch])
        return la.b.H_raw

    pair, both = ((a, b, labels), ((a, b), labels)), ((a, b, (labels, labels)), (a, b, torch.cat([labels, labels])))
    for name, classes in (("infonce", False), ("supcon", True)):
        by_pair, by_label = curvature(name, (a, b)), curvature(name, both[0])
        assert not close(by_pair, by_label, tolerance=1e-3)
        unread = () if classes else (((a, b), "names"),)
        for batch in ((a, b, alone), ((a, b), alone), [a, b], *unread, (a, b, (alone, alone))):
            assert close(curvature(name, batch), by_pair, tolerance=1e-13)
        for batch in (*pair, *both):
            asked = by_label if classes or any(batch is one for one in both) else by_pair
            assert close(curvature(name, batch), asked, tolerance=1e-13)
            assert close(curvature(name, batch, positives="labels"), by_label, tolerance=1e-13)
            assert close(curvature(name, batch, positives="views"), by_pair, tolerance=1e-13)


def test_loader_of_torch_and_mappings(device: str) -> None:
    """A shuffling loader, and an encoder that takes a mapping."""

    a, b = encoders(device)
    data = TensorDataset(numbers(0, 9, 4), numbers(1, 9, 2))
    plain = posterior(a, b, "last_layer", "diag", LOSSES["infonce"]())
    plain.fit(DataLoader(data, batch_size=4))
    named = posterior(OfMapping(a, "pixels"), b, "last_layer", "diag", LOSSES["infonce"]())
    named.fit([({"pixels": x}, y) for x, y in DataLoader(data, batch_size=4)])
    assert close(named.a.H_raw, plain.a.H_raw, tolerance=1e-13)
    assert close(named.b.H_raw, plain.b.H_raw, tolerance=1e-13)


def test_calibration_of_both(device: str) -> None:
    la = fitted("last_layer", "diag", device)
    known = [(numbers(2, 40, 4).to(device), numbers(3, 40, 2).to(device))]
    la.calibrate(known)
    alone = fitted("last_layer", "diag", device)
    alone.b.calibrate([known[0][1]])
    x = numbers(4, 6, 2).to(device)
    assert torch.equal(la.b(x).p_value, alone.b(x).p_value)
    assert bool((la.a(numbers(5, 6, 4).to(device)).p_value > 0).all())


def test_all_arguments_arrive_at_both_towers(device: str) -> None:
    towers, loss = TwoTowers(*encoders(device)), {"loss": LOSSES["infonce"](pd_fix="fixed")}
    la = Laplace(towers, "contrastive", "all", "diag", 1.0, 7.0, backend_kwargs=loss, temperature=3.0)
    assert {(one.subset_of_weights, one.hessian_structure) for one in (la.a, la.b)} == {("all", "diag")}
    assert (float(la.b.prior_precision), la.a.temperature) == (7, 3)
    named = Laplace(model=towers, likelihood="contrastive", last_layer_name=("2", None), backend_kwargs=loss)
    named.fit(batches(device))
    assert named.a.model.last_layer.out_features == 3
    named.optimize_prior_precision("glm", "unit_information")
    ready = [float(tower.prior_precision) for tower in (named.a, named.b)]
    named.optimize_prior_precision(method="marglik", n_steps=3)
    assert all(float(tower.prior_precision) != old for tower, old in zip((named.a, named.b), ready, strict=True))

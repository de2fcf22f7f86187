"""What two towers refuse, by name."""

from functools import partial
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each, refused
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tower_cases import LOSSES, batches, encoders, numbers, posterior

import contrastive_curvature as cc
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.network.two_towers import TwoTowers


def made(device: str, name: str = "infonce", **options: Any) -> Any:
    return posterior(*encoders(device), "last_layer", "diag", LOSSES[name](), **options)


def test_towers_run_both_encoders(device: str) -> None:
    a, b = encoders(device)
    x_a, x_b = batches(device)[0]
    z_a, z_b = TwoTowers(a, b)(x_a, x_b)
    assert torch.equal(z_a, a(x_a))
    assert torch.equal(z_b, b(x_b))
    refused(lambda: TwoTowers(a, None), "encoder_b: expected a", kind=cc.InputTypeError)


@each(
    "options, message",
    [
        ({}, r"backend_kwargs: loss: .*InfoNCELoss\(temperature=...\).*SigLIPLoss"),
        ({"loss": cc.ContrastiveLoss()}, "loss: ContrastiveLoss compares points of one tower"),
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
        ("all", "kron_lowrank", "encoder_a: hessian_structure: expected one of 'diag', 'full', 'kron'"),
    ],
)
def test_structures(weights: str, structure: str, message: str, device: str) -> None:
    with pytest.raises((cc.InputError, cc.UnsupportedError), match=message):
        posterior(*encoders(device), weights, structure, LOSSES["infonce"]())


def test_towers_of_other_places_or_widths(device: str) -> None:
    a, _ = encoders(device)
    with pytest.raises(cc.InputError, match=r"encoder_b: expected torch\.float64"):
        posterior(a, nn.Linear(2, 3).to(device), "all", "diag", LOSSES["infonce"]())
    wider = nn.Linear(2, 5).double().to(device)
    with pytest.raises(cc.InputError, match="3 outputs of encoder_a and 5 of encoder_b"):
        posterior(a, wider, "all", "diag", LOSSES["infonce"]()).fit(batches(device))


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


def test_a_part_of_the_data_calibrates_no_tower(device: str) -> None:
    """A sampler of several processes repeats points, which would count twice."""
    a, b = encoders(device)
    la, data = posterior(a, b, "all", "diag", LOSSES["infonce"]()), TensorDataset(numbers(0, 5, 4), numbers(1, 5, 2))
    la.fit(batches(device))
    with pytest.raises(cc.UnsupportedError, match=r"loader: DistributedSampler gives each of 2 processes a part"):
        la.calibrate(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))


def test_batches(device: str) -> None:
    a, b = (x.to(device) for x in (numbers(0, 4, 4), numbers(1, 4, 2)))
    labels = torch.arange(4, device=device)
    for batch, message in (
        ({"pixel_values": a, "input_ids": b}, "got a dict. An encoder that takes a mapping"),
        (a, "got a Tensor"),
        ((a, b[:3]), "expected as many second views as first ones, got 4 and 3"),
        ((a, b, labels[:3]), "expected 4 labels, one a pair, got 3"),
        ((a, b[:3], (labels, labels)), "expected 3 labels of b, got 4"),
        ((a, b, labels.double()), "labels"),
        ((a, b, labels / 4), "got one fraction a pair"),
        ((a, b, "labels"), "expected labels as a tensor, got a str"),
    ):
        with pytest.raises(cc.InputError, match=message):
            made(device, "supcon").fit([batch])
    refused(lambda: made(device).fit([]), "at least one batch, got an empty loader")
    refused(lambda: made(device, positives="labels").fit([(a, b)]), "positives='labels', got no labels")
    graded = [(a, b, labels / 4)]
    refused(lambda: made(device).fit(graded), "got one fraction a pair", kind=cc.InputTypeError)
    refused(lambda: made(device, positives="labels").fit(graded), "integer class labels", kind=cc.InputTypeError)


@each("name", LOSSES)
def test_nothing_to_compare(name: str, device: str) -> None:
    """Batches of one pair have no negative; labels may leave no positive."""
    a, b = (x.to(device) for x in (numbers(0, 4, 4), numbers(1, 4, 2)))
    same = torch.zeros(4, dtype=torch.int64, device=device)
    for loader in ([(a[:1], b[:1]), (a[1:2], b[1:2])], [(a, b, (same, same))]):
        with pytest.raises(cc.InputError, match="batches of two pairs or more"):
            made(device, name).fit(loader)
    if name != "siglip":
        with pytest.raises(cc.InputError, match=r"at least one anchor with .*, got none of 8"):
            made(device, name).fit([(a, b, (torch.arange(4), torch.arange(4, 8)))])
    made(device, name).fit([(a[:1], b[:1]), (a, b)])


def test_methods(device: str) -> None:
    la, x = made(device), numbers(0, 4, 4).to(device)
    refused(lambda: la(x), "Call la.a(x) or la.b(x)", kind=cc.UnsupportedError)
    for call in (la.state_dict, la.optimize_prior_precision, lambda: la.curvature_product(batches(device), x, x)):
        refused(call, kind=cc.NotFittedError)
    la.fit(batches(device))
    gridsearch = partial(la.optimize_prior_precision, method="gridsearch")
    refused(gridsearch, "la.a.optimize_prior_precision", kind=cc.UnsupportedError)
    v_a, v_b = torch.zeros_like(la.a.mean), torch.zeros_like(la.b.mean)
    for vectors, message in (((v_a,), "v_b: expected a vector"), ((v_a, v_b[1:]), "v_b: expected shape")):
        with pytest.raises(cc.InputError, match=message):
            la.curvature_product(batches(device), *vectors)


def test_two_towers_are_no_encoder(device: str) -> None:
    """Everything that takes one encoder says what to do with two."""
    towers = cc.TwoTowers(nn.Linear(3, 2), nn.Linear(4, 2)).to(device)
    for call in (
        lambda: cc.OnlineLaplace(towers, probe=torch.rand(2, 3, device=device), n_data=10),
        lambda: cc.ContrastiveGGN(towers),
        lambda: ContrastiveLaplace(towers, "contrastive", "all", "diag"),
        lambda: cc.ggn(towers, torch.rand(4, 3, device=device), torch.zeros(4, dtype=torch.int64)),
    ):
        with pytest.raises(cc.InputTypeError, match=r"one encoder.*TwoTowers.*encoder_a or encoder_b"):
            call()

"""Options of online training, and what a first user stumbled over."""

import functools
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import DivergenceError, InputTypeError
from contrastive_curvature.online import OnlineLaplace
from contrastive_curvature.online.learner import described


@dataclass(frozen=True)
class WithinMetres:
    positive: float

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        near = torch.cdist(a, b) <= self.positive
        return near, ~near


def encoder(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def data(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 4, device=device), torch.arange(12, device=device) % 3


def relate(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    same = a[:, None] == b[None, :]
    return same, ~same


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"encoder": "net"}, InputTypeError, r"encoder: expected a torch.nn.Module, got a str"),
    ({"encoder": nn.Linear(4, 2).bfloat16()}, cc.InputError, r"model\.float\(\)"),
    ({"probe": torch.zeros(1, 4)}, cc.InputError, "probe: expected a batch of two inputs or more"),
    ({"n_data": 1}, cc.InputError, "n_data: expected a whole number of at least 2, got 1"),
    ({"n_samples": 0}, cc.InputError, "n_samples: expected a positive whole number, got 0"),
    ({"memory_factor": 1.0}, cc.InputError, r"memory_factor: expected a number in \[0, 1\), got 1.0.* 0.001 here"),
    ({"loss": 3}, InputTypeError, "loss: expected a callable, got a int"),
    ({"miner": "hard"}, InputTypeError, "miner: expected a callable"),
    ({"curvature_miner": 1}, InputTypeError, "curvature_miner: expected a callable"),
    ({"prior_precision": 0}, cc.InputError, "prior_precision: expected a finite number > 0, got 0"),
    ({"temperature": math.inf}, cc.InputError, "temperature: expected a finite number > 0, got inf"),
    ({"subset_of_weights": "subnetwork"}, cc.UnsupportedError, "'last_layer' or 'all'"),
    ({"backend": "BackPack"}, InputTypeError, "backend: expected ContrastiveGGN, BackPackContrastiveGGN or "),
    ({"backend_kwargs": {"pairs": "dataset"}}, cc.InputError, "pairs: expected 'batch' or nothing, got 'dataset'"),
    ({"backend_kwargs": {"margins": 1}}, cc.InputError, r"backend_kwargs: expected keys among .*\['margins'\]"),
    ({"backend_kwargs": {"relation": relate}, "curvature_miner": relate}, cc.InputError, "one of them, got both"),
]


@each("wrong, kind, message", REFUSED)
def test_refused_options_say_what_came_and_what_to_do(wrong, kind, message, device) -> None:
    arguments = {"encoder": encoder(), "probe": data("cpu")[0], "n_data": 12, **wrong}
    with pytest.raises(kind, match=f"(?s){message}"):
        OnlineLaplace(arguments.pop("encoder"), **arguments)


@covering(1, subset=["last_layer", "all"], cause=["weights", "inputs", "loss"])
def test_a_step_that_is_no_number_is_named_and_changes_nothing(subset: str, cause: str, device: str) -> None:
    x, labels = data(device)
    factor = torch.ones((), device=device)
    loss = {"loss": lambda z, _: (factor * z).mean()} if cause == "loss" else {}
    online = OnlineLaplace(encoder(device), probe=x, n_data=12, subset_of_weights=subset, **loss)
    online(x, labels)
    before = {name: value.clone() for name, value in online.discounted.state_dict().items()}
    spoilt, good = {"weights": online.encoder[0].weight.data, "inputs": x.clone(), "loss": factor}[cause], x
    x = spoilt if cause == "inputs" else x
    kept = spoilt.clone()
    spoilt.fill_(math.nan)
    wanted = "the loss is" if cause == "loss" else "the outputs of the encoder are"
    with pytest.raises(DivergenceError, match=f"training step 2: {wanted} not finite") as caught:
        online(x, labels)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.step, again.reason, str(again)) == (2, caught.value.reason, str(caught.value))
    assert all(torch.equal(before[name], value) for name, value in online.discounted.state_dict().items())
    spoilt.copy_(kept)
    assert bool(online(good, labels).isfinite()), "a bad batch can be skipped"


def test_a_curvature_that_overflows(device: str) -> None:
    x, labels = data(device)
    net = encoder(device)
    online = OnlineLaplace(net, probe=x, n_data=12)
    with torch.no_grad():
        net[-1].weight.mul_(1e-20)
        net[-1].bias.mul_(1e-20)
    with pytest.raises(DivergenceError, match="training step 1: the curvature is not finite"):
        online(x, labels)


@each(
    "change, name",
    [
        ({"memory_factor": 0.01}, "memory_factor"),
        ({"n_data": 99}, "n_data"),
        ({"sampling_temperature": 0.1}, "sampling_temperature"),
        ({"backend_kwargs": {"pd_fix": "psd"}}, "pd_fix"),
        ({"prior_precision": 3.0}, "prior_precision"),
        *(({"backend_kwargs": {"loss": loss}}, "curvature_loss") for loss in (cc.InfoNCELoss(0.05), cc.TripletLoss())),
    ],
)
def test_a_state_of_other_options_is_refused(change: dict[str, Any], name: str, device: str) -> None:
    def make(**options: Any) -> OnlineLaplace:
        return OnlineLaplace(encoder(device), probe=data(device)[0], **{"n_data": 6} | options)

    state = make().state_dict()
    make(backend_kwargs={"distance": "arccos"}).load_state_dict(state)  # the default, spelled out
    with pytest.raises(cc.InputError, match=f"(?s){name}"):
        make(**change).load_state_dict(state)


def within(z: Tensor, labels: Tensor, margin: float) -> Tensor:
    return (z.square().sum(1) - margin).relu().mean() + 0 * labels.sum()


def test_functions_are_known_again_by_what_they_were_given() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    assert described(within) == "<function within>"
    assert described(functools.partial(within, margin=4)) != described(functools.partial(within, margin=3))
    assert described(losses.TripletMarginLoss(margin=0.1)) != described(losses.TripletMarginLoss(margin=0.9))
    assert described(losses.TripletMarginLoss(margin=0.1)) == described(losses.TripletMarginLoss(margin=0.1))
    assert described(WithinMetres(10)) != described(WithinMetres(40))


@each("n_samples", [1, 3])
def test_all_but_the_last_layer_runs_once(device: str, n_samples: int) -> None:
    x, labels = data(device)
    made = encoder(device)
    online = cc.OnlineLaplace(made, probe=x[:4], n_data=12, n_samples=n_samples)
    passes: list[int] = []
    made[0].register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        passes.clear()
        online(x, labels).backward()
        assert len(passes) == 1
    la = online.laplace()
    passes.clear()
    assert bool((la(x).uncertainty > 0).all())
    assert len(passes) == 1

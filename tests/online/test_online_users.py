"""What a first user of online training stumbled over."""

import functools

import pytest
import torch
from laplace import Laplace
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.experiments.data.places import WithinMetres
from contrastive_curvature.online.options import described


def data(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 3
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)[labels]
    return x.to(device), labels.to(device)


def encoder(device: str, *tail: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), *tail).double().to(device)


def test_refitting_takes_all_pairs_of_the_data_set(device: str) -> None:
    x, labels = data(device)
    batches = [(x[:10], labels[:10]), (x[10:], labels[10:])]
    online = cc.OnlineLaplace(encoder(device), probe=x[:4], n_data=24)
    for batch in batches:
        online(*batch)
    la = online.laplace()
    la.fit(batches)
    post_hoc = Laplace(online.encoder, "contrastive", hessian_structure="diag")
    post_hoc.fit(batches)
    assert torch.allclose(la.H_raw, post_hoc.H_raw, rtol=1e-12)


def within(z: Tensor, labels: Tensor, margin: float) -> Tensor:
    return (z.square().sum(1) - margin).relu().mean() + 0 * labels.sum()


def test_functions_are_known_again_by_what_they_were_given() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    assert described(within) == "<function within>"
    assert described(functools.partial(within, margin=4)) != described(functools.partial(within, margin=3))
    assert described(losses.TripletMarginLoss(margin=0.1)) != described(losses.TripletMarginLoss(margin=0.9))
    assert described(losses.TripletMarginLoss(margin=0.1)) == described(losses.TripletMarginLoss(margin=0.1))
    assert described(WithinMetres(10, 25)) != described(WithinMetres(40, 41))


@each("n_samples", [1, 3])
def test_all_but_the_last_layer_runs_once(device: str, n_samples: int) -> None:
    x, labels = data(device)
    made = encoder(device)
    online = cc.OnlineLaplace(made, probe=x[:4], n_data=24, n_samples=n_samples)
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

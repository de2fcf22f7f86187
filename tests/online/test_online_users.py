"""What a first user of online training stumbled over."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from devices import DEVICES
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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
@each("change", ["lr", "weight_decay", "T_max", "margin=0.7", "dropout"])
def test_a_training_goes_on_as_it_began(device: str, change: str, tmp_path: Path) -> None:
    x, labels = data(device)

    def run(epochs: int, changed: str = "") -> None:
        loss = functools.partial(within, margin=0.7 if changed == "margin=0.7" else 0.5)
        made = encoder(device, nn.Dropout(0.5 if changed == "dropout" else 0.1))
        online = cc.OnlineLaplace(made, probe=x[:4], n_data=24, subset_of_weights="all", loss=loss)
        optimizer = torch.optim.AdamW(
            online.parameters(),
            lr=1e-4 if changed == "lr" else 1e-3,
            weight_decay=0.5 if changed == "weight_decay" else 0.01,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9 if changed == "T_max" else 6)
        cc.Trainer(online, optimizer, schedule, checkpoint=tmp_path / "run.pt").fit([(x, labels)] * 2, epochs)

    (tmp_path / "run.pt").unlink(missing_ok=True)
    run(1)
    name = {"dropout": "p=0.1"}.get(change, change.replace("0.7", r"0\.5"))
    with pytest.raises(cc.InputError, match=rf"(?s){name}.*as before.*must keep the settings.*; remove .*run\.pt"):
        run(2, change)
    run(2)


@each("checkpoint", [True, False])
def test_epochs_count_from_the_first_fit(checkpoint: bool, tmp_path: Path) -> None:
    x, labels = data("cpu")
    online = cc.OnlineLaplace(encoder("cpu"), probe=x[:4], n_data=24)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01)
    trainer = cc.Trainer(online, optimizer, checkpoint=tmp_path / "run.pt" if checkpoint else None)
    for epochs in (2, 3, 3):
        trainer.fit([(x, labels)] * 4, epochs)
    assert trainer.steps == 12


def test_functions_are_known_again_by_what_they_were_given() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    assert described(within) == "<function within>"
    assert described(functools.partial(within, margin=4)) != described(functools.partial(within, margin=3))
    assert described(losses.TripletMarginLoss(margin=0.1)) != described(losses.TripletMarginLoss(margin=0.9))
    assert described(losses.TripletMarginLoss(margin=0.1)) == described(losses.TripletMarginLoss(margin=0.1))
    assert described(WithinMetres(10, 25)) != described(WithinMetres(40, 41))


@pytest.mark.parametrize("device", DEVICES)
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

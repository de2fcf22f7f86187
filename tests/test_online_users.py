"""What a first user of online training stumbled over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import DivergenceError


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


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_batch_can_be_skipped(device: str) -> None:
    x, labels = data(device)
    online = cc.OnlineLaplace(encoder(device), probe=x[:4], n_data=24)
    online(x, labels)
    before = {name: value.clone() for name, value in online.state_dict().items()}
    for bad in (float("nan"), float("inf")):
        with pytest.raises(DivergenceError, match="training step 2"):
            online(torch.full_like(x, bad), labels)
    assert all(torch.equal(before[name], value) for name, value in online.state_dict().items())
    assert bool(online(x, labels).isfinite())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_loss_of_the_users_is_given_what_the_encoder_gives(device: str, subset: str, normalized: bool) -> None:
    x, labels = data(device)
    made = encoder(device, *([cc.L2Norm()] if normalized else []))
    seen: list[Tensor] = []

    def loss(z: Tensor, labels: Tensor) -> Tensor:
        seen.append(z.detach())
        return z.sum() * 0 + labels.sum() * 0

    online = cc.OnlineLaplace(made, probe=x[:4], n_data=24, loss=loss, sampling_temperature=0, subset_of_weights=subset)
    online(x, labels)
    assert torch.allclose(seen[0], made(x), rtol=1e-12)


def squares(z: Tensor, labels: Tensor) -> Tensor:
    return z.square().mean() + 0 * labels.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["lr", "weight_decay", "T_max", "loss", "dropout"])
def test_a_training_goes_on_as_it_began(device: str, change: str, tmp_path: Path) -> None:
    x, labels = data(device)

    def run(epochs: int, changed: str = "") -> None:
        other = {"loss": squares} if changed == "loss" else {}
        made = encoder(device, nn.Dropout(0.5 if changed == "dropout" else 0.1))
        online = cc.OnlineLaplace(made, probe=x[:4], n_data=24, subset_of_weights="all", **other)
        optimizer = torch.optim.AdamW(
            online.parameters(),
            lr=1e-4 if changed == "lr" else 1e-3,
            weight_decay=0.5 if changed == "weight_decay" else 0.01,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9 if changed == "T_max" else 6)
        cc.Trainer(online, optimizer, schedule, checkpoint=tmp_path / "run.pt").fit([(x, labels)] * 2, epochs)

    run(2)
    with pytest.raises(cc.InputError, match=r"as before|loss=squares"):
        run(3, change)
    run(3)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_epochs_count_from_the_first_fit(checkpoint: bool, tmp_path: Path) -> None:
    x, labels = data("cpu")
    online = cc.OnlineLaplace(encoder("cpu"), probe=x[:4], n_data=24)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01)
    trainer = cc.Trainer(online, optimizer, checkpoint=tmp_path / "run.pt" if checkpoint else None)
    for epochs in (2, 3, 3):
        trainer.fit([(x, labels)] * 4, epochs)
    assert trainer.steps == 12

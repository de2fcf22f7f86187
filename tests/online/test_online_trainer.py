"""The training loop: any module with a loss, any loader; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from online_training import make_training
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.errors import InputTypeError
from contrastive_curvature.online import OnlineLaplace, Trainer, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Plain(nn.Module):
    """Deterministic training of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.loss = cc.ContrastiveLoss(0.7, normalization="type")

    def forward(self, x: Any, targets: Tensor) -> Tensor:
        return self.loss(self.net(x["x"] if isinstance(x, dict) else x), targets)


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(6, 4), torch.arange(6) % 2) for _ in range(count)]


def plain(device: str, **options: Any) -> tuple[Plain, Trainer]:
    torch.manual_seed(1)
    step = Plain().to(device)
    return step, Trainer(step, torch.optim.SGD(step.parameters(), lr=0.1), **options)


def by_hand(device: str, epochs: int) -> Tensor:
    torch.manual_seed(1)
    step = Plain().to(device)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, labels in batches():
            optimizer.zero_grad()
            step(x.to(device), labels.to(device)).backward()
            optimizer.step()
    return step.net.weight


def test_it_is_the_usual_loop(tmp_path: Path, device: str) -> None:
    for checkpoint in (None, tmp_path / "run.pt"):
        step, trainer = plain(device, checkpoint=checkpoint)
        trainer.fit(batches(), 3)
        assert trainer.steps == 12
        assert torch.equal(step.net.weight, by_hand(device, 3))
    assert load_checkpoint(tmp_path / "run.pt")["steps"] == 12


def test_mappings(device: str) -> None:
    step, trainer = plain(device, dict_key_y="target")
    trainer.fit([{"x": x, "target": labels} for x, labels in batches()], 1)
    assert torch.equal(step.net.weight, by_hand(device, 1))
    _, trainer = plain(device)
    with pytest.raises(InputTypeError, match=r"'labels', got the keys \['target', 'x'\].*dict_key_y"):
        trainer.fit([{"x": x, "target": labels} for x, labels in batches()], 1)


class Stream(IterableDataset[Any]):
    """Points without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, labels in batches():
            yield from zip(x, labels, strict=True)


def test_data_without_a_length(tmp_path: Path, device: str) -> None:
    step, trainer = plain(device, checkpoint=tmp_path / "run.pt", checkpoint_every=3)
    trainer.fit(DataLoader(Stream(), 6), 2)
    assert trainer.steps == 8
    assert torch.equal(step.net.weight, by_hand(device, 2))
    longer, trainer = plain(device, checkpoint=tmp_path / "run.pt")
    trainer.fit(DataLoader(Stream(), 6), 3)
    assert torch.equal(longer.net.weight, by_hand(device, 3))


def test_a_scheduler_steps_once_an_epoch(device: str) -> None:
    step = Plain().to(device)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    Trainer(step, optimizer, scheduler).fit(batches(), 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_online_laplace_of_metric_learning_losses(device: str) -> None:
    """A loss with weights of its own is trained and saved with the encoder."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    online = OnlineLaplace(
        nn.Sequential(nn.Linear(4, 3)), probe=batches()[0][0], n_data=24, loss=losses.ArcFaceLoss(2, 3)
    ).to(device)
    before = online.state_dict()["_loss.W"].clone()
    Trainer(online, torch.optim.SGD(online.parameters(), lr=0.1)).fit(batches(), 1)
    assert not torch.equal(online.state_dict()["_loss.W"], before)


def test_what_is_refused(tmp_path: Path, device: str) -> None:
    step, trainer = plain(device)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    x, labels = batches()[0]
    workers = DataLoader(TensorDataset(x, labels), num_workers=1, persistent_workers=True)
    resumable = plain(device, checkpoint=tmp_path / "run.pt")[1]
    nowhere = tmp_path / "nowhere" / "run.pt"
    for call, message in (
        (lambda: Trainer(len, trainer.optimizer), "step: expected a torch Module, got a builtin"),
        (lambda: Trainer(nn.Tanh(), trainer.optimizer), "step: expected a module with parameters"),
        (lambda: Trainer(step, trainer.optimizer, plateau), "ReduceLROnPlateau needs a validation loss"),
        (lambda: plain(device, checkpoint_every=0), "checkpoint_every: expected a positive whole number, got 0"),
        (lambda: plain(device, checkpoint=nowhere), "checkpoint: expected a file in a folder that exists"),
        (lambda: trainer.fit(batches(), 0), "epochs: expected a positive whole number"),
        (lambda: trainer.fit([], 1), "loader: expected at least one batch, got an empty loader"),
        (lambda: trainer.fit(iter(batches()), 1), "iterated several times, got the iterator"),
        (lambda: trainer.fit([x], 1), r"batches \(x, labels\)"),
        (lambda: resumable.fit(workers, 1), "persistent_workers=False"),
    ):
        with pytest.raises(cc.ContrastiveCurvatureError, match=message):
            call()
    no_loss = Trainer(type("NoLoss", (Plain,), {"forward": lambda s, x, _: s.net(x)})().to(device), trainer.optimizer)
    with pytest.raises(InputTypeError, match=r"one number in a tensor, got shape \(6, 3\)"):
        no_loss.fit(batches(), 1)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path, device: str) -> None:
    file = tmp_path / "run.pt"
    _, trainer = plain(device, checkpoint=file)
    trainer.fit(batches(), 1)
    kept = file.read_bytes()
    with pytest.raises(cc.InputError, match=r"number of batches: expected 4, as before, got 3.*remove .*run\.pt"):
        plain(device, checkpoint=file)[1].fit(batches(3), 2)
    with pytest.raises(cc.InputError, match="optimizer: expected SGD, as before, got Adam"):
        make_training("none", file)[0].fit(batches(), 2)
    step = Plain().to(device)
    step.net = nn.Linear(4, 5).to(device)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    with pytest.raises(cc.InputError, match=r"step, line 2 of its modules: expected .*out_features=3.*out_features=5"):
        Trainer(step, optimizer, checkpoint=file).fit(batches(), 2)
    assert file.read_bytes() == kept
    save_checkpoint(file, {"weights": 1})
    with pytest.raises(cc.InputError, match="a checkpoint of a Trainer, got other content"):
        plain(device, checkpoint=file)[1].fit(batches(), 2)


class Overflowing(Plain):
    """A finite loss and finite weights, with statistics that overflow at the second step, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistic", torch.ones(2))
        self.register_buffer("mask", torch.full((2,), -float("inf")), persistent=False)

    def forward(self, x: Any, targets: Tensor) -> Tensor:
        self.statistic.mul_(1e30)
        return super().forward(x, targets)


def test_statistics_and_states_of_the_optimizer_are_finite_in_every_checkpoint(device: str, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    step = Overflowing().to(device)
    trainer = Trainer(step, torch.optim.SGD(step.parameters(), lr=0.1), checkpoint=file, checkpoint_every=1)
    with pytest.raises(
        cc.DivergenceError, match=r"buffer 'statistic' is not finite.* checkpoint, of step 1, is .*run\.pt"
    ):
        trainer.fit(batches(), 1)
    assert load_checkpoint(file)["steps"] == 1
    step = Plain().to(device)
    optimizer = torch.optim.Adam(step.parameters())
    optimizer.register_step_post_hook(lambda *_: optimizer.state[step.net.weight]["exp_avg"].fill_(float("inf")))
    with pytest.raises(cc.DivergenceError, match="'exp_avg' of the optimizer is not finite"):
        Trainer(step, optimizer).fit(batches(1), 1)

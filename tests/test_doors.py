"""The public entry points return the same numbers wherever the encoder is, and whatever torch's defaults are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from laplace import Laplace
from numpy.typing import NDArray
from tiny import in_batches, numbers
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.online import OnlineLaplace

Numbers = list[NDArray[np.float64]]

CLASSES = np.arange(90) % 3


def points(seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Draw 90 inputs of three clusters, and their classes."""
    x = numbers(seed, 90, 4) + 3 * numbers(0, 3, 4)[CLASSES]
    return x.to(device, torch.float32), torch.from_numpy(CLASSES).to(device)


def encoder(device: str, inputs: int = 4) -> nn.Module:
    layers = nn.Sequential(
        nn.Linear(inputs, 5, device="cpu", dtype=torch.float32),
        nn.Tanh(),
        nn.Linear(5, 3, device="cpu", dtype=torch.float32),
    )
    for seed, p in enumerate(layers.parameters()):
        p.data = numbers(seed, *p.shape).to(p)
    return layers.to(device)


def as_numpy(*values: Tensor) -> Numbers:
    return [value.detach().cpu().double().numpy() for value in values]


def answers(posterior: cc.EmbeddingDistribution) -> Numbers:
    return as_numpy(posterior.mu, posterior.kappa, posterior.uncertainty, posterior.p_value)


def fitted(device: str, loss: cc.losses.CosineLoss, weights: str = "last_layer", structure: str = "full") -> Laplace:
    la = Laplace(encoder(device), "contrastive", weights, structure, backend_kwargs={"loss": loss})
    la.fit(in_batches(*points(1, device), 30))
    la.optimize_prior_precision()
    la.calibrate([points(2, device)[0]])
    return la


def source(loss: Callable[[str], cc.losses.CosineLoss], weights: str, structure: str) -> Callable[[str, Path], Numbers]:
    return lambda device, _: answers(fitted(device, loss(device), weights, structure)(points(3, device)[0]))


def saved(device: str, folder: Path) -> Numbers:
    fitted(device, cc.ContrastiveLoss()).save_pretrained(folder / "saved")
    return answers(cc.load_pretrained(folder / "saved", encoder(device))(points(3, device)[0]))


def exported(device: str, folder: Path) -> Numbers:
    fitted(device, cc.ContrastiveLoss()).export(folder / "model.pt2")
    with torch.device("cpu"):  # torch reads no file while another device is the default
        served = torch.export.load(folder / "model.pt2").module()(points(3, device)[0])
    return as_numpy(*(served if isinstance(served, tuple) else served.values()))


def influential(device: str, _: Path) -> Numbers:
    la = fitted(device, cc.ContrastiveLoss())
    x, y = points(3, device)
    return as_numpy(cc.influence(la, in_batches(*points(1, device), 30), [(x[:9], y[:9])]))


def online(device: str, _: Path) -> Numbers:
    x, y = points(1, device)
    learner = OnlineLaplace(encoder(device), probe=x[:9], n_data=90, sampling_temperature=0)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    for batch, labels in in_batches(x, y, 30):
        optimizer.zero_grad()
        learner(batch, labels).backward()
        optimizer.step()
    la = learner.laplace()
    return as_numpy(la(points(3, device)[0]).kappa)


def towers(device: str, _: Path) -> Numbers:
    pair = TwoTowers(encoder(device), encoder(device, 2))
    la = Laplace(pair, "contrastive", "last_layer", "kron", backend_kwargs={"loss": cc.InfoNCELoss()})
    x, _ = points(1, device)
    la.fit([(part, part[:, :2]) for part in x.split(30)])
    la.optimize_prior_precision()
    return as_numpy(la.a(x).kappa, la.b(x[:, :2]).kappa)


def retrieved(head: bool) -> Callable[[str, Path], Numbers]:
    def answer(device: str, folder: Path) -> Numbers:
        (x, _), (other, _), (asked, _) = (points(seed, device) for seed in (1, 2, 3))
        retriever = cc.Retriever(encoder(device), 0.3, 0.3, 0.1, head=head).fit(x, CLASSES, held_out=(other, CLASSES))
        retriever.save(folder / "saved")
        retriever = cc.Retriever.load(folder / "saved", encoder(device))
        found = retriever(asked)
        return [np.asarray(found.confidence, float), np.asarray(found.p_value, float), np.asarray(found.label, float)]

    return answer


DOORS: dict[str, Callable[[str, Path], Numbers]] = {
    "pairs, last layer": source(lambda _: cc.ContrastiveLoss(), "last_layer", "kron_lowrank"),
    "pairs, all weights": source(lambda _: cc.ContrastiveLoss(), "all", "diag"),
    "anchors": source(lambda _: cc.SupConLoss(), "all", "kron"),
    "proxies": source(lambda device: cc.ProxyLoss(numbers(5, 3, 3).to(device)), "last_layer", "full"),
    "towers": towers,
    "online": online,
    "influence": influential,
    "save and load": saved,
    "export": exported,
    "retriever": retrieved(head=False),
    "retriever with a head": retrieved(head=True),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_device_returns_the_numbers_of_the_cpu(door: str, device: str, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    want, found = DOORS[door]("cpu", tmp_path / "cpu"), DOORS[door](device, tmp_path)
    for one, other in zip(want, found, strict=True):
        assert np.isfinite(one).any()
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("door", DOORS)
def test_no_default_of_torch_changes_the_numbers(door: str, tmp_path: Path) -> None:
    """What has no device would be made on ``meta``, where there are no numbers."""
    if door == "retriever with a head" and torch.__version__ < (2, 7):
        pytest.skip("torch's own Adam counts its steps on the default device")
    (tmp_path / "plain").mkdir()
    want = DOORS[door]("cpu", tmp_path / "plain")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = DOORS[door]("cpu", tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(want, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)

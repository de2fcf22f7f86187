"""The online Laplace as a module of torch: modes, moves, copies, saved states that go on, and users' encoders."""

import copy
import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from strategies import build_network, close
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.online import OnlineLaplace

STRUCTURES = ("diag", "full", "kron")


SUBSETS = ("last_layer", "all")


def data(device: str, n: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 4, dtype=torch.float64, device=device), torch.arange(n, device=device) % 3


def noisy_encoder(device: str) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3), cc.L2Norm()
    return nn.Sequential(*layers).double().to(device)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps(online: OnlineLaplace, x: Tensor, labels: Tensor, count: int = 2, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.05)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = online(x, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@covering(1, subset=SUBSETS, structure=STRUCTURES)
def test_modes_are_those_of_the_user_and_evaluation_changes_nothing(subset: str, structure: str, device: str) -> None:
    x, labels = data(device)
    encoder = noisy_encoder(device)
    encoder[2].eval()
    modes = [m.training for m in encoder.modules()]
    online = OnlineLaplace(encoder, probe=x, n_data=30, subset_of_weights=subset, hessian_structure=structure)
    assert [m.training for m in encoder.modules()] == modes
    before = encoder[1].running_mean.clone()
    steps(online, x, labels)
    assert [m.training for m in encoder.modules()] == modes
    assert not torch.equal(encoder[1].running_mean, before)
    online.laplace()(x)
    online.laplace()
    assert [m.training for m in encoder.modules()] == modes
    online.eval()
    before, random = state(online), torch.get_rng_state()
    assert online(x, labels).item() == online(x, labels).item()
    assert same(state(online), before)
    assert torch.equal(torch.get_rng_state(), random)
    online.laplace()(x)
    assert not any(m.training for m in online.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in online.modules())
    with torch.no_grad():
        z = encoder[:5](x)
        mined = cc.ContrastiveLoss(0.7).mine(z, labels)
        assert torch.allclose(online(x, labels), cc.ContrastiveLoss(0.7, normalization="type")(z, pairs=mined))


@covering(1, subset=SUBSETS, structure=STRUCTURES)
def test_copies_and_other_precisions_go_on(subset: str, structure: str, device: str) -> None:
    x, labels = data(device)
    how = {"probe": x, "n_data": 30, "subset_of_weights": subset, "hessian_structure": structure}
    online = OnlineLaplace(noisy_encoder(device), **how)
    steps(online, x, labels)
    copied = copy.deepcopy(online)
    assert steps(copied, x, labels, seed=7) == steps(online, x, labels, seed=7)
    assert same(state(copied), state(online))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in online.parameters()}
    online.float()
    steps(online, x.float(), labels)
    assert online.discounted.curvature_0.dtype == torch.float32
    assert online.laplace()(x.float()).kappa.dtype == torch.float32


def test_parameters_used_twice_stay_one_parameter(device: str) -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    encoder = nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), a, nn.Linear(4, 3)).double().to(device)
    x, labels = data(device)
    names = {name: id(p) for name, p in encoder.named_parameters(remove_duplicate=False)}
    online = OnlineLaplace(encoder, probe=x, n_data=30, subset_of_weights="all", backend_kwargs={"pd_fix": "psd"})
    truth = cc.ggn(encoder, x, labels, pd_fix="psd")
    online(x, labels)
    assert close(online.discounted.curvature_0, truth)
    before = a.weight.detach().clone()
    steps(online, x, labels)
    assert {name: id(p) for name, p in encoder.named_parameters(remove_duplicate=False)} == names
    assert not torch.equal(a.weight, before)


def test_parameters_that_thaw_in_training_are_refused(device: str) -> None:
    x, labels = data(device)
    encoder = build_network("frozen", 3).to(device)
    online = OnlineLaplace(encoder, probe=x, n_data=30, subset_of_weights="all")
    size = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    encoder.requires_grad_()
    with pytest.raises(cc.InputError, match=rf"encoder: expected {size} trainable numbers"):
        online(x, labels)


@pytest.mark.usefixtures("few_objects")
def test_no_graph_outlives_its_step(device: str) -> None:
    x, labels = data(device)
    for subset, structure in zip(("last_layer", "all", "all"), STRUCTURES, strict=True):
        how = {"subset_of_weights": subset, "hessian_structure": structure}
        online = OnlineLaplace(noisy_encoder(device), probe=x, n_data=30, n_samples=2, **how)
        steps(online, x, labels)
        assert not any(b.requires_grad for b in online.buffers())
        gc.collect()
        before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        steps(online, x, labels, count=5)
        gc.collect()
        # Gradients of the parameters, whose first ones came before, and nothing that grows with the steps.
        assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before + 2


def test_accumulated_gradients(device: str) -> None:
    x, labels = data(device)
    online = OnlineLaplace(noisy_encoder(device).eval(), probe=x, n_data=24, prior_precision=1e30)
    for rows in (slice(0, 6), slice(6, 12)):
        (online(x[rows], labels[rows]) / 2).backward()
    assert float(online.discounted.points) == pytest.approx(6 + 6 * (1 - 1e-4))
    found = [p.grad.clone() for p in online.parameters()]
    online.zero_grad()
    online.eval()
    torch.stack([online(x[rows], labels[rows]) for rows in (slice(0, 6), slice(6, 12))]).mean().backward()
    for a, p in zip(found, online.parameters(), strict=True):
        assert torch.allclose(a, p.grad, rtol=1e-9, atol=1e-12)


@covering(1, subset=SUBSETS, structure=STRUCTURES)
def test_autocast_touches_the_network_alone(subset: str, structure: str, device: str) -> None:
    x, labels = data(device)
    x, encoder = x.float(), noisy_encoder(device).float()[:1].append(nn.Tanh()).append(nn.Linear(6, 3)).to(device)
    how = {"probe": x, "n_data": 30, "subset_of_weights": subset, "hessian_structure": structure}
    low, high = OnlineLaplace(copy.deepcopy(encoder), **how), OnlineLaplace(encoder, **how)
    for _ in range(2):
        torch.manual_seed(3)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = low(x, labels)
        loss.backward()
        torch.manual_seed(3)
        truth = high(x, labels)
    assert torch.allclose(loss, truth, rtol=0.05)
    assert all(b.dtype != torch.bfloat16 for b in low.buffers())
    # Where the curvature takes a pass of its own, it is that of full precision; the last layer takes what there is.
    tolerance = 1e-3 if subset == "all" else 0.05
    for name, value in high.discounted.named_buffers():
        if name.startswith("curvature_"):
            assert close(getattr(low.discounted, name), value, tolerance=tolerance)


HOW = [("last_layer", structure) for structure in ("diag", "full", "kron", "kron_lowrank")]
HOW += [("all", structure) for structure in STRUCTURES]


@each("how", HOW)
def test_a_state_goes_on_with_the_same_bits(how: tuple[str, str], device: str, tmp_path: Path) -> None:
    x, labels = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)).to(device), torch.arange(24) % 4

    def make() -> tuple[OnlineLaplace, torch.optim.Optimizer]:
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))
        options = {"subset_of_weights": how[0], "hessian_structure": how[1], "n_samples": 2, "memory_factor": 0.1}
        online = OnlineLaplace(encoder.to(device), probe=x[:4], n_data=24, **options)
        return online, torch.optim.Adam(online.parameters(), lr=1e-2)

    def train(online: OnlineLaplace, optimizer: torch.optim.Optimizer) -> None:
        for rows in torch.arange(24, device=device).split(6):
            optimizer.zero_grad()
            online(x[rows], labels.to(device)[rows]).backward()
            optimizer.step()

    whole, optimizer = make()
    train(whole, optimizer)
    parts = {"online": whole.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(parts, tmp_path / "training.pt")
    gpu = torch.cuda.get_rng_state() if device == "cuda" else None
    train(whole, optimizer)

    again, optimizer = make()
    saved = torch.load(tmp_path / "training.pt", weights_only=True, map_location="cpu")
    again.load_state_dict(saved["online"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
    train(again, optimizer)
    for name, value in whole.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, again.state_dict()[name]), name

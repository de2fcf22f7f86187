"""Posteriors from a feature folder are those from the loader of the inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_networks import DIM, WIDTH, data, encoder, loader
from laplace import Laplace
from tables import each, refused
from torch import Tensor, nn

import contrastive_curvature as cc

pytestmark = [
    # Both calibrations use the training inputs, which are at hand.
    pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")
]


def fitted(model: nn.Module, given: Any, structure: str = "kron_lowrank", **options: Any) -> Any:
    la: Any = Laplace(model, "contrastive", hessian_structure=structure, backend_kwargs=options)
    la.fit(given)
    la.optimize_prior_precision()
    return la


def everything(la: Any, x: Tensor) -> dict[str, Tensor]:
    """What a posterior says, in tensors."""
    found = la(x)
    generator = torch.Generator(x.device).manual_seed(0)
    return {
        "mean": found.raw_mean,
        "covariance": found.covariance,
        "uncertainty": found.uncertainty,
        "p_value": found.p_value,
        "samples": la.predictive_samples(x, generator=generator, joint=True, n_samples=3),
        "prior": la.prior_precision,
        "loss": la.loss,
    }


def assert_same(la: Any, other: Any, x: Tensor, tolerance: float) -> None:
    """Relative to the largest entry, as the entries are sums."""
    for (name, mine), exact in zip(everything(la, x).items(), everything(other, x).values(), strict=True):
        size = float(exact.abs().max())
        assert float((mine - exact).abs().max()) <= tolerance * size, name


@pytest.mark.parametrize("structure", ["diag", "kron", "kron_lowrank", "full"])
def test_posterior_is_that_of_the_loader(structure: str, device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    given = loader(x, y)
    folder = cc.features(model, given, tmp_path / "f", dtype=torch.float64, rows_per_part=20)
    # Batches of the size of the loader's: others are rounded differently.
    folder = cc.FeatureFolder(folder.path, batch_size=8)
    la, other = fitted(model, folder, structure), fitted(model, given, structure)
    for method in ("measure_classes", "calibrate"):
        getattr(la, method)(folder)
        getattr(other, method)(given)
    # On a GPU sums need not be in the same order twice.
    assert_same(la, other, x, 1e-12 if device == "cpu" else 1e-11)
    assert la.n_data == other.n_data == len(x)


def test_seed_orders_batches_the_same_way_in_every_pass(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    folder = cc.features(model, loader(x, y), tmp_path / "f", dtype="float64")
    mixed = cc.FeatureFolder(folder.path, batch_size=10, seed=3)
    first, second = (torch.cat([targets for _, targets in mixed]) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, folder.targets)
    assert torch.equal(first.sort().values, folder.targets.sort().values)
    # Over all pairs the order is of no account; inside batches it is.
    exact = fitted(model, loader(x, y), "diag")
    assert torch.allclose(fitted(model, mixed, "diag").H, exact.H, rtol=1e-10, atol=1e-12)
    inside = [fitted(model, given, "diag", pairs="batch").H for given in (mixed, cc.FeatureFolder(folder.path, 10))]
    assert not torch.allclose(*inside, rtol=1e-3)


def test_posterior_takes_batches_of_both_kinds(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    folder = cc.features(model, loader(x, y), tmp_path / "f", dtype="float64")
    inputs, _ = next(iter(folder))
    from_folder, from_inputs = fitted(model, folder), fitted(model, loader(x, y))
    for la in (from_folder, from_inputs):
        assert torch.allclose(la(inputs).covariance, la(x).covariance, rtol=1e-10, atol=1e-14)
        assert torch.allclose(la(inputs).raw_mean, la(x).raw_mean, rtol=1e-12)
    # A fit that adds data of the other kind.
    from_folder.fit(loader(x, y), override=False)
    assert from_folder.n_data == 2 * len(x)


def test_half_precision_is_close(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device, torch.float32), data(device, torch.float32)
    exact = fitted(model, loader(x, y))(x).uncertainty
    for dtype, bound in ((torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        folder = cc.features(model, loader(x, y), tmp_path / str(dtype), dtype=dtype)
        assert folder.dtype is dtype
        inputs, _ = next(iter(folder))
        assert inputs["contrastive_curvature.features"].dtype is torch.float32
        apart = (fitted(model, folder)(x).uncertainty / exact - 1).abs().max()
        assert 0 < float(apart) < bound


def test_last_layer_alone_may_have_changed(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    folder = cc.features(model, loader(x, y), tmp_path / "f", dtype="float64")
    with torch.no_grad():
        model[2].weight.mul_(2).add_(0.1)
    la, other = fitted(model, folder), fitted(model, loader(x, y))
    assert_same(la, other, x, 1e-10)
    inputs, _ = next(iter(folder))
    la(inputs)
    with torch.no_grad():
        next(la.model.model.parameters()).add_(0.1)
    refused(lambda: la(inputs), "other weights before the last layer")


def _other_trunk(model: nn.Sequential) -> nn.Module:
    with torch.no_grad():
        model[0].bias[0] += 1e-6
    return model


def _other_layer(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*model[:2], nn.Identity(), *model[2:])


def _other_width(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*model[:2], nn.Linear(WIDTH, 9), nn.Linear(9, DIM)).to(model[0].weight)


@each(
    "change, message",
    [
        (_other_trunk, "other weights before"),
        (_other_layer, "no linear layer"),
        (_other_width, "other weights|takes 9"),
    ],
)
def test_other_encoder_is_refused(change: Callable[..., nn.Module], message: str, device: str, tmp_path: Path) -> None:
    x, y = data(device)
    folder = cc.features(encoder(device), loader(x, y), tmp_path / "f", dtype="float64")
    model = change(encoder(device))
    la: Any = Laplace(model, "contrastive")
    with pytest.raises(cc.InputError, match=f"features: expected those of this encoder.*({message})"):
        la.fit(folder)
    la.fit(loader(x, y))
    refused(lambda: la(next(iter(folder))[0]), "features: expected those of this encoder")


def test_other_weights_than_the_last_layers_are_refused(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    folder = cc.features(model, loader(x, y), tmp_path / "f", dtype="float64")
    la: Any = Laplace(model, "contrastive", "all", "diag")
    inputs = next(iter(folder))[0]
    calls = [lambda: la.fit(folder), lambda: la(inputs), lambda: cc.ggn(model, inputs, y, loss=cc.ContrastiveLoss())]
    for call in calls:
        refused(call, "subset_of_weights='last_layer'", kind=cc.UnsupportedError)
        la.fit(loader(x, y))

"""Encoders in half precision: the posterior of their last layer is that of the weights in float32, to few digits."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.given_features import feature_inputs

pytestmark = pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")

HALF = (torch.bfloat16, torch.float16)
STRUCTURES = ("diag", "kron", "kron_lowrank", "full")
N, F, D = 60, 6, 4


def encoder(dtype: torch.dtype, device: str, *tail: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(F, 8), nn.Tanh(), nn.Linear(8, D), *tail).to(device, dtype)


def data(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    labels = torch.arange(N) % 3
    x = torch.randn(N, F, generator=torch.Generator().manual_seed(0)) + 2 * nn.functional.one_hot(labels, F)
    return x.to(device, dtype), labels.to(device)


def fitted(model: nn.Module, x: Tensor, labels: Tensor, structure: str = "kron_lowrank", **options: Any) -> Any:
    la: Any = Laplace(model, "contrastive", hessian_structure=structure, **options)
    la.fit([(x[:20], labels[:20]), (x[20:40], labels[20:40])])
    la.optimize_prior_precision()
    return la


def near(found: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    """Equal to a few roundings of half precision, relative to the largest entry."""
    assert found.dtype == truth.dtype
    return float((found - truth).abs().max()) < 4 * torch.finfo(dtype).eps * float(truth.abs().max())


def pair(structure: str, dtype: torch.dtype, device: str, *tail: nn.Module, **options: Any) -> tuple[Any, Any, Tensor]:
    """Posteriors of an encoder in half precision, and of its weights in float32; and inputs of the former."""
    x, labels = data(device, dtype)
    half = fitted(encoder(dtype, device, *tail), x, labels, structure, **options)
    single = fitted(encoder(dtype, device, *tail).float(), x.float(), labels, structure, **options)
    return half, single, x[40:]


@covering(1, dtype=HALF, structure=STRUCTURES)
def test_every_prediction_is_that_of_the_weights_in_float32(structure: str, dtype: torch.dtype, device: str) -> None:
    half, single, x = pair(structure, dtype, device)
    assert {p.dtype for p in half.model.model.parameters()} == {dtype}
    assert half.mean.dtype == half.prior_precision.dtype == torch.float32
    assert torch.equal(half.mean, single.mean)
    assert near(half.prior_precision, single.prior_precision, dtype)
    assert near(half.log_marginal_likelihood(), single.log_marginal_likelihood(), dtype)
    found, truth = half(x), single(x.float())
    # The raw mean is the encoder's own output.
    assert torch.equal(found.raw_mean, half.model.model(x).float())
    for name in ("raw_mean", "mu", "kappa", "uncertainty", "covariance", "variance"):
        assert near(getattr(found, name), getattr(truth, name), dtype), name
    for options, name in (
        ({"joint": True}, "joint_covariance"),
        ({"diagonal_output": True}, "variance"),
        ({"pred_type": "nn", "n_samples": 5}, "raw_mean"),
    ):
        seeds = [torch.Generator(device).manual_seed(0) for _ in range(2)]
        one = half(x, generator=seeds[0], **options)
        assert near(getattr(one, name), getattr(single(x.float(), generator=seeds[1], **options), name), dtype), name
    assert half.functional_samples(x, n_samples=3, joint=True).dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF)
def test_p_values_normalised_outputs_and_states(dtype: torch.dtype, device: str) -> None:
    half, single, x = pair("kron_lowrank", dtype, device, cc.L2Norm())
    half.calibrate([x])
    single.calibrate([x.float()])
    # Ranks among 20 move by few.
    assert float((half(x).p_value - single(x.float()).p_value).abs().max()) < 0.1
    again: Any = Laplace(encoder(dtype, device, cc.L2Norm()), "contrastive")
    again.load_state_dict(half.state_dict())
    assert torch.equal(again(x).uncertainty, half(x).uncertainty)
    assert torch.equal(again(x).p_value, half(x).p_value)


@covering(1, dtype=HALF, structure=STRUCTURES)
def test_features_are_as_good_as_inputs(structure: str, dtype: torch.dtype, device: str) -> None:
    """Features are what the encoder computed: nothing is rounded twice."""
    x, labels = data(device, dtype)
    features = Encoder(encoder(dtype, device), x).forward_with_features(x).features
    posteriors = []
    for loader in ([(x, labels)], [(feature_inputs(features, "2"), labels)]):
        la: Any = Laplace(encoder(dtype, device), "contrastive", hessian_structure=structure)
        la.fit(loader)
        la.optimize_prior_precision()
        posteriors.append(la)
    truth, found = posteriors
    assert found.prior_precision.dtype == found.mean.dtype == torch.float32
    for name in ("raw_mean", "kappa", "uncertainty", "covariance"):
        one, other = getattr(found(x[:5]), name), getattr(truth(x[:5]), name)
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@each("method", ["marglik", "gridsearch"])
def test_priors_are_float32(method: str, device: str) -> None:
    half, _, _ = pair("kron_lowrank", torch.bfloat16, device)
    half.optimize_prior_precision(method=method, val_loader=[data(device, torch.bfloat16)], n_steps=2, grid_size=3)
    assert half.prior_precision.dtype == torch.float32


@each(
    "arguments, options",
    [
        (("all", "diag"), {}),
        (("subnetwork", "full"), {"subnetwork_indices": torch.tensor([0])}),
    ],
)
def test_other_posteriors_are_refused_with_what_to_type(
    arguments: tuple[str, str], options: dict[str, Any], device: str
) -> None:
    with pytest.raises(cc.InputError, match=r"model\.float\(\)"):
        Laplace(encoder(torch.float16, device), "contrastive", *arguments, **options)


def test_inputs_of_another_dtype_are_named(device: str) -> None:
    half, _, x = pair("diag", torch.bfloat16, device)
    with pytest.raises(cc.InputError, match=r"dtype torch\.bfloat16.*got points of.*torch\.float32"):
        half(x.float())

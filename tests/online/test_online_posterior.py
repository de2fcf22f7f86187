"""What an online Laplace remembers, as a posterior: the same as post hoc where nothing moves, and usable as one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from laplace import Laplace
from strategies import DISTANCES, build_network, close, make_inputs
from tables import covering, each, refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.online import OnlineLaplace

STRUCTURES = ("diag", "full", "kron")
SUBSETS = ("last_layer", "all")


def toy(device: str, dim: int = 3, n: int = 12, kind: str = "tanh") -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    encoder = build_network(kind, dim).to(device)
    return encoder, make_inputs(kind, n).to(device), torch.arange(n, device=device) % 3


def trained(device: str, steps: int = 3, **options: Any) -> tuple[OnlineLaplace, Tensor, Tensor]:
    encoder, x, labels = toy(device)
    online = OnlineLaplace(encoder, probe=x, n_data=12, **options)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        online(x, labels).backward()
        optimizer.step()
    return online, x, labels


def diagonal(la: Any) -> Tensor:
    precision = la.posterior_precision
    if isinstance(precision, Tensor):
        return precision if precision.ndim == 1 else precision.diagonal()
    return precision.diag()


@given(
    kind=st.sampled_from(("tanh", "conv1d", "no bias")),
    structure=st.sampled_from(STRUCTURES),
    subset=st.sampled_from(SUBSETS),
    normalization=st.sampled_from(("type", "anchor")),
    distance=st.sampled_from(DISTANCES),
    # Of batches that are made up alike, none stands for more than its own points.
    size=st.sampled_from([4, 6]),
    count=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_without_motion_and_forgetting_it_is_the_post_hoc_fit(
    kind, structure, subset, normalization, distance, size, count, seed, device
) -> None:
    torch.manual_seed(seed)
    encoder = build_network(kind, 3).to(device)
    batches = [(make_inputs(kind, n).to(device), torch.arange(n, device=device) % 2) for n in [size] * count]
    # With this fix the clamp takes nothing away, so that it does not matter how often it is applied.
    options = {"pd_fix": "psd", "normalization": normalization, "distance": distance}
    how = {"subset_of_weights": subset, "hessian_structure": structure}
    still = {"memory_factor": 0.0, "sampling_temperature": 0, "backend_kwargs": options}
    online = OnlineLaplace(encoder, probe=batches[0][0], n_data=size * count, **still, **how)
    for x, labels in batches:
        online(x, labels)
    assume(bool(online.discounted.positive))  # four points may all be pulled the concave way
    found = online.laplace()
    options["pairs"] = "batch"
    if (subset, structure) == ("last_layer", "kron"):
        options["rank"] = "full"
    fresh = copy.deepcopy(encoder)
    la = Laplace(fresh, "contrastive", backend=cc.ContrastiveGGN, backend_kwargs=options, **how)
    la.fit(batches)
    la.optimize_prior_precision()
    assert close(diagonal(found), diagonal(la), tolerance=1e-8)
    assert torch.allclose(found.prior_precision, la.prior_precision, rtol=1e-8)
    assert found.temperature == pytest.approx(la.temperature, rel=1e-8)
    assert float(found.loss) == pytest.approx(float(la.loss), rel=1e-8, abs=1e-12)
    assert float(found.cost) == pytest.approx(float(la.cost), rel=1e-8)
    assert found.n_data == la.n_data
    assert torch.equal(found.mean, la.mean)
    assert float(found.log_marginal_likelihood()) == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-6)
    ours, theirs = found(x), la(x)
    assert close(ours.variance, theirs.variance, tolerance=1e-7)


@covering(1, structure=STRUCTURES, subset=SUBSETS)
def test_a_taken_posterior_is_saved_and_stays(structure: str, subset: str, tmp_path: Path, device: str) -> None:
    how = {"subset_of_weights": subset, "hessian_structure": structure}
    online, x, labels = trained(device, **how)
    la = online.laplace()
    torch.save(la.state_dict(), tmp_path / "la.pt")
    whole = {"backend_kwargs": {"rank": "full"}} if tuple(how.values()) == ("last_layer", "kron") else {}
    fresh = Laplace(copy.deepcopy(online.encoder), "contrastive", **how, **whole)
    fresh.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    assert torch.equal(diagonal(fresh), diagonal(la))
    assert torch.equal(fresh(x).kappa, la(x).kappa)
    # Further steps train the encoder, and leave the curvature that was taken.
    before = diagonal(la).clone()
    online(x, labels)
    assert torch.equal(diagonal(la), before)
    assert not torch.equal(diagonal(online.laplace()), before)


@pytest.mark.filterwarnings("ignore:la.x.. the weights of la.model have changed")
def test_it_is_the_encoder_of_the_user_and_not_a_copy_of_it(device: str) -> None:
    for subset in SUBSETS:
        encoder, x, labels = toy(device)
        online = OnlineLaplace(encoder, probe=x, n_data=12, subset_of_weights=subset)
        online(x, labels).backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in encoder.parameters())
        assert {id(p) for p in online.parameters()} == {id(p) for p in encoder.parameters()}
        la = online.laplace()
        with torch.no_grad():
            encoder[-1].weight.mul_(-1)
            encoder[-1].bias.mul_(-1)
        assert torch.allclose(la(x).raw_mean, encoder(x))


def test_given_prior_and_temperature_are_kept(device: str) -> None:
    for subset in SUBSETS:
        online, _, _ = trained(device, subset_of_weights=subset, prior_precision=3.0, temperature=0.2)
        la = online.laplace()
        assert float(la.prior_precision) == 3.0
        assert la.temperature == 0.2
        h = 12 / online.discounted.points * online.discounted.curvature_0
        assert close(la.posterior_precision, h / 0.2 + 3)
        online, _, _ = trained(device, subset_of_weights=subset, prior_precision=3.0)
        la = online.laplace()
        assert la.temperature == pytest.approx(float(online.discounted.cost / online.discounted.points))


def test_no_posterior_without_a_step_or_a_positive_pair(device: str) -> None:
    encoder, x, _ = toy(device)
    fix = {"pd_fix": "positive"}
    online = OnlineLaplace(encoder, probe=x, n_data=12, hessian_structure="diag", backend_kwargs=fix)
    refused(lambda: online.laplace(), "laplace(): expected at least one training step")
    online(x, torch.arange(12, device=device))
    refused(lambda: online.laplace(), "positive pairs, got 1 steps, and no positive curvature")


@each(
    "options, factor, prior",
    [
        ({}, None, None),
        ({}, None, 2.0),
        ({"sampling_temperature": 0.01}, 0.01, None),
        ({"temperature": 0.5}, 1.0, 2.0),
        ({"temperature": 0.5, "sampling_temperature": 0.25}, 0.25, None),
    ],
)
def test_width_of_the_sampled_weights(options: Any, factor: Any, prior: Any, device: str) -> None:
    """The standard deviation of many deviations is that of a posterior at its own, colder temperature."""
    online, _, _ = trained(device, prior_precision=prior, memory_factor=0.1, **options)
    la = online.laplace()
    if "temperature" not in options:
        la.temperature = float(la.cost) / la.n_data
    curvature = la.posterior_precision - la.prior_precision_diag
    if prior is None:
        la.prior_precision = curvature.mean()  # weights are drawn with a prior as strong as the data
    steps = int(online.discounted.steps)
    if factor is None:
        factor = 1 / sum(0.9**k for k in range(steps))
    wanted = curvature / factor + (la.prior_precision_diag / factor if prior is None else prior)
    torch.manual_seed(0)
    drawn = torch.stack(online._posterior.draw(online.discounted, 4000))
    assert torch.allclose(drawn.std(0) * wanted.sqrt(), torch.ones_like(wanted), atol=0.08)
    assert float((drawn.mean(0) * wanted.sqrt()).abs().max()) < 0.08

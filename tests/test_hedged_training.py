"""Sampling, divergences and the objective of hedged embeddings, against loops and torch.distributions."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

from contrastive_curvature.errors import InputError
from contrastive_curvature.hedged import (
    kl_bound,
    kl_estimate,
    match_loss,
    self_mismatch,
    stratified_samples,
    vib_objective,
)

BATCHES = st.sampled_from([(), (0,), (1,), (2, 3)])
FILLED = st.sampled_from([(), (1,), (2, 3)])
"""torch.distributions has no empty batches."""


def mixture(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean, spread = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return mean.to(dtype), spread.exp().to(dtype)


def distribution(mean: Tensor, variance: Tensor) -> MixtureSameFamily:
    parts = Independent(Normal(mean, variance.sqrt()), 1)
    return MixtureSameFamily(Categorical(torch.ones(mean.shape[:-1], dtype=mean.dtype)), parts)


def standard(mean: Tensor) -> Independent:
    return Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)


@given(
    seed=st.integers(0, 10**6),
    components=st.integers(1, 4),
    each=st.integers(1, 3),
    dim=st.integers(1, 4),
    batch=BATCHES,
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_each_component_gets_its_samples(seed, components, each, dim, batch, dtype):
    mean, variance = mixture(seed, *batch, components, dim, dtype=dtype)
    drawn = stratified_samples(mean, variance, components * each, torch.Generator().manual_seed(seed))
    again = stratified_samples(mean, variance, components * each, torch.Generator().manual_seed(seed))
    assert drawn.shape == (*batch, components * each, dim)
    assert drawn.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert torch.equal(drawn, again)
    # Components that are far apart tell which one a sample comes from.
    place = 1e3 * torch.arange(components, dtype=torch.float64).unsqueeze(1).expand(mean.shape)
    apart = stratified_samples(place, torch.full_like(place, 0.1), components * each)
    found = (apart / 1e3).round()
    assert torch.equal(found, (place / 1e3).repeat_interleave(each, -2))


def test_samples_have_the_moments_of_their_component():
    mean, variance = mixture(0, 2, 3)
    drawn = stratified_samples(mean, variance, 40_000, torch.Generator().manual_seed(1)).unflatten(0, (2, -1))
    n = drawn.shape[1]
    assert bool(((drawn.mean(1) - mean).abs() < 4.5 * (variance / n).sqrt()).all())
    assert bool(((drawn.var(1) - variance).abs() < 4.5 * variance * math.sqrt(2 / n)).all())


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), FILLED)
def test_bound_is_the_mean_of_closed_forms(seed, components, dim, batch):
    mean, variance = mixture(seed, *batch, components, dim)
    right = kl_divergence(Independent(Normal(mean, variance.sqrt()), 1), standard(mean)).mean(-1)
    found = kl_bound(mean, variance)
    assert found.shape == batch
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), FILLED)
def test_estimate_is_the_mean_log_ratio(seed, components, dim, batch):
    mean, variance = mixture(seed, *batch, components, dim)
    drawn = stratified_samples(mean, variance, 2 * components)
    # The library's axes of samples come last, torch's first.
    first = drawn.movedim(-2, 0)
    right = (distribution(mean, variance).log_prob(first) - standard(mean[..., 0, :]).log_prob(first)).mean(0)
    found = kl_estimate(drawn, mean, variance)
    assert found.shape == batch
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@given(
    seed=st.integers(0, 10**6),
    k1=st.integers(1, 4),
    k2=st.integers(1, 4),
    dim=st.integers(1, 4),
    batch=BATCHES,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_match_loss_is_its_loop(seed, k1, k2, dim, batch, dtype):
    first, second = mixture(seed, *batch, k1, dim, dtype=dtype)[0], mixture(seed + 1, *batch, k2, dim, dtype=dtype)[0]
    matches = torch.rand(batch, generator=torch.Generator().manual_seed(seed)) < 0.5
    by_log, by_probability = (
        match_loss(first, second, matches, 1.4, 0.6, average=how, reduction="none") for how in ("log", "probability")
    )
    assert by_log.shape == by_probability.shape == batch
    assert by_log.dtype == dtype
    rows = zip(first.reshape(-1, k1, dim), second.reshape(-1, k2, dim), matches.flatten().tolist(), strict=True)
    for row, (one, two, match) in enumerate(rows):
        pairs = [math.dist(z, w) for z in one.tolist() for w in two.tolist()]
        so = [1 / (1 + math.exp((1 if match else -1) * (1.4 * distance - 0.6))) for distance in pairs]
        close = {"rel": 1e-4 if dtype == torch.float32 else 1e-10, "abs": 1e-6}
        assert float(by_log.flatten()[row]) == pytest.approx(-sum(map(math.log, so)) / len(so), **close)
        assert float(by_probability.flatten()[row]) == pytest.approx(-math.log(sum(so) / len(so)), **close)
    assert bool((by_probability <= by_log + 1e-5).all())


def test_log_of_the_mean_stays_finite_far_away():
    far = torch.full((1, 8, 2), 1e4, requires_grad=True)
    loss = match_loss(far, torch.zeros(1, 8, 2), torch.tensor([True]), 1.0, 0.0, average="probability")
    loss.backward()
    assert loss.item() == pytest.approx(1e4 * math.sqrt(2), rel=1e-6)
    assert far.grad is not None
    assert float(far.grad.sum()) == pytest.approx(math.sqrt(2), rel=1e-3)


@given(
    seed=st.integers(0, 10**6),
    components=st.sampled_from([1, 2, 4]),
    other=st.sampled_from([1, 2]),
    batch=BATCHES,
    average=st.sampled_from(["log", "probability"]),
    divergence=st.sampled_from(["bound", "sampled"]),
    weight=st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_objective_is_the_sum_of_its_parts(seed, components, other, batch, average, divergence, weight):
    first, second = mixture(seed, *batch, components, 2), mixture(seed + 1, *batch, other, 2)
    matches = torch.rand(batch, generator=torch.Generator().manual_seed(seed)) < 0.5
    options: dict[str, Any] = {"kl_weight": weight, "average": average, "divergence": divergence}
    found = vib_objective(
        first, second, matches, 1.2, 0.4, **options, reduction="none", generator=torch.Generator().manual_seed(seed)
    )
    generator = torch.Generator().manual_seed(seed)
    samples = [stratified_samples(*one, 8, generator) for one in (first, second)]
    right = match_loss(*samples, matches, 1.2, 0.4, average=average, reduction="none")
    for drawn, one in zip(samples, (first, second), strict=True):
        right = right + weight * (kl_bound(*one) if divergence == "bound" else kl_estimate(drawn, *one))
    assert found.shape == batch
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("average", ["log", "probability"])
@pytest.mark.parametrize("divergence", ["bound", "sampled"])
def test_gradients_of_the_objective(average, divergence):
    flat = [t.requires_grad_() for seed in (0, 1) for t in mixture(seed, 2, 2, 2)]
    a, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.3, 0.2))
    matches = torch.tensor([True, False])

    def loss(*t: Tensor) -> Tensor:
        source = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"average": average, "divergence": divergence, "generator": source}
        return vib_objective(t[0:2], t[2:4], matches, *t[4:], kl_weight=0.3, n_samples=4, **options)

    assert torch.autograd.gradcheck(loss, (*flat, a, b))


ONE = mixture(0, 2, 2, 3)
YES = torch.ones(2, dtype=torch.bool)


@each(
    "call, says",
    [
        (lambda: stratified_samples(*ONE, 3), "n_samples: expected a multiple of the 2 components"),
        (lambda: stratified_samples(ONE[0][0, 0], ONE[1][0, 0]), r"mean: expected shape .*unsqueeze\(-2\)"),
        (lambda: stratified_samples(ONE[0], 0 * ONE[1]), "variance: expected variances > 0"),
        (lambda: kl_bound(ONE[0] + math.inf, ONE[1]), "mean: expected finite"),
        (lambda: kl_estimate(ONE[0][..., :2], *ONE), "one dimension D, got samples"),
        (lambda: match_loss(*ONE, YES, 1.0, 0.0, average="mean"), "average: expected one of"),  # type: ignore
        (lambda: vib_objective(ONE, ONE, YES, 1.0, 0.0, kl_weight=-1.0), "kl_weight"),
        (lambda: vib_objective(ONE, ONE, YES, 1.0, 0.0, kl_weight=1.0, divergence="kl"), "divergence"),  # type: ignore
        (lambda: self_mismatch(*ONE, 0.0, 0.0), "a: expected a finite number > 0"),
    ],
)
def test_bad_values(call: Any, says: str):
    with pytest.raises(InputError, match=says):
        call()

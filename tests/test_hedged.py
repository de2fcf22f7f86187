"""Hedged embeddings: match probabilities, losses, sampling and the objective, against loops, quadrature and torch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from tables import refuses
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

from contrastive_curvature.errors import InputError
from contrastive_curvature.hedged import (
    MatchParameters,
    hard_contrastive_loss,
    kl_bound,
    kl_estimate,
    match_logits,
    match_loss,
    match_probability,
    self_mismatch,
    soft_contrastive_loss,
    stratified_samples,
    vib_objective,
)

BATCHES = st.sampled_from([(), (0,), (1,), (2, 3)])


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sigmoid(t: float) -> float:
    return 1 / (1 + math.exp(-t))


@given(
    seed=st.integers(0, 10**6),
    k1=st.integers(1, 4),
    k2=st.integers(1, 4),
    dim=st.integers(1, 5),
    batch=BATCHES,
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    a=st.floats(0.1, 5),
    b=st.floats(-3, 3),
)
def test_probability_is_the_loop_over_all_pairs_of_samples(seed, k1, k2, dim, batch, dtype, a, b):
    first, second = normal(seed, *batch, k1, dim, dtype=dtype), normal(seed + 1, k2, dim, dtype=dtype)
    found = match_probability(first, second, a, b)
    assert found.shape == batch
    assert found.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    for one, value in zip(first.reshape(-1, k1, dim).tolist(), found.flatten().tolist(), strict=True):
        right = [sigmoid(b - a * math.dist(z, w)) for z in one for w in second.tolist()]
        assert value == pytest.approx(sum(right) / len(right), rel=1e-5 if dtype != torch.float64 else 1e-12)


def exact(mean1: list[float], var1: list[float], mean2: list[float], var2: list[float], a: float, b: float) -> float:
    """The match probability of two mixtures in one dimension, by quadrature over the difference of two components."""
    total = 0.0
    for m1, v1 in zip(mean1, var1, strict=True):
        for m2, v2 in zip(mean2, var2, strict=True):
            mean, sd = m1 - m2, math.sqrt(v1 + v2)

            def integrand(t: float, mean: float = mean, sd: float = sd) -> float:
                density = math.exp(-(((t - mean) / sd) ** 2) / 2) / (sd * math.sqrt(2 * math.pi))
                return sigmoid(b - a * abs(t)) * density

            total += quad(integrand, mean - 12 * sd, mean + 12 * sd, points=[0.0], limit=200)[0]
    return total / len(mean1) / len(mean2)


def test_many_samples_approach_the_integral():
    mean1, mean2 = normal(0, 2, 1), normal(1, 1, 1)
    var1, var2 = normal(2, 2, 1).exp(), normal(3, 1, 1).exp()
    generator = torch.Generator().manual_seed(4)
    n, repeats = 16, 20_000

    def draw(mean: Tensor, variance: Tensor) -> Tensor:
        many = (repeats, *mean.shape)
        return stratified_samples(mean.expand(many), variance.expand(many), n, generator)

    estimates = match_probability(draw(mean1, var1), draw(mean2, var2), 1.7, 0.8)
    lists = [t.flatten().tolist() for t in (mean1, var1, mean2, var2)]
    error = float(estimates.std()) / math.sqrt(repeats)
    assert error < 1e-3
    assert float(estimates.mean()) == pytest.approx(exact(*lists, 1.7, 0.8), abs=4 * error)
    mismatch = self_mismatch(
        mean1.expand(repeats, -1, -1), var1.expand(repeats, -1, -1), 1.7, 0.8, n_samples=n, generator=generator
    )
    error = float(mismatch.std()) / math.sqrt(repeats)
    assert float(mismatch.mean()) == pytest.approx(1 - exact(*lists[:2], *lists[:2], 1.7, 0.8), abs=4 * error)


@given(st.integers(0, 10**6), st.integers(1, 4), BATCHES, st.floats(0.1, 5), st.floats(-3, 3), st.floats(0.1, 3))
def test_losses_of_points_are_their_formulas(seed, dim, batch, a, b, margin):
    z1, z2 = normal(seed, *batch, dim), normal(seed + 1, *batch, dim)
    matches = normal(seed + 2, *batch) > 0
    soft = soft_contrastive_loss(z1, z2, matches, a, b, reduction="none")
    hard = hard_contrastive_loss(z1, z2, matches, margin, reduction="none")
    logits = match_logits(z1, z2, a, b)
    assert soft.shape == hard.shape == logits.shape == batch
    rows = zip(z1.reshape(-1, dim).tolist(), z2.reshape(-1, dim).tolist(), matches.flatten().tolist(), strict=True)
    for row, (one, two, match) in enumerate(rows):
        distance = math.dist(one, two)
        probability = sigmoid(b - a * distance)
        assert float(logits.flatten()[row]) == pytest.approx(b - a * distance)
        assert float(soft.flatten()[row]) == pytest.approx(-math.log(probability if match else 1 - probability))
        wanted = distance**2 if match else max(margin - distance, 0) ** 2
        assert float(hard.flatten()[row]) == pytest.approx(wanted, abs=1e-12)


def test_reductions():
    z1, z2, matches = normal(0, 4, 2), normal(1, 4, 2), torch.tensor([True, False, False, True])
    for loss, options in ((soft_contrastive_loss, (1.0, 0.5)), (hard_contrastive_loss, ())):
        whole = loss(z1, z2, matches, *options, reduction="none")
        found = [loss(z1, z2, matches, *options, reduction=kind) for kind in ("mean", "sum")]
        torch.testing.assert_close(found, [whole.mean(), whole.sum()])


def test_gradients():
    z1, z2 = normal(0, 4, 2).requires_grad_(), normal(1, 4, 2).requires_grad_()
    a, b = torch.tensor(1.3).double().requires_grad_(), torch.tensor(0.2).double().requires_grad_()
    matches = torch.tensor([True, False, False, True])
    assert torch.autograd.gradcheck(lambda *t: soft_contrastive_loss(*t[:2], matches, *t[2:]), (z1, z2, a, b))
    assert torch.autograd.gradcheck(lambda *t: hard_contrastive_loss(*t, matches, 2.0), (z1, z2))
    s1, s2 = normal(2, 2, 3, 2).requires_grad_(), normal(3, 2, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(match_probability, (s1, s2, a, b))


@pytest.mark.parametrize("match", [True, False])
def test_points_in_one_place_have_a_finite_gradient(match):
    z = torch.zeros(1, 2, requires_grad=True)
    matches = torch.tensor([match])
    losses = soft_contrastive_loss(z, z.detach(), matches, 1.0, 0.0) + hard_contrastive_loss(z, z.detach(), matches)
    losses.backward()
    assert torch.equal(z.grad, torch.zeros(1, 2))


def test_loss_stays_finite_where_the_probability_does_not():
    z = torch.tensor([[1e4, 0.0]], requires_grad=True)
    loss = soft_contrastive_loss(z, torch.zeros(1, 2), torch.tensor([True]), 1.0, 0.0)
    loss.backward()
    assert loss.item() == pytest.approx(1e4)
    torch.testing.assert_close(z.grad, torch.tensor([[1.0, 0.0]]))


Z = torch.zeros(2, 3)


YES = torch.ones(2, dtype=torch.bool)


test_bad_values = refuses(
    InputError,
    (lambda: match_logits(Z, Z[:, :2], 1.0, 0.0), "one dimension D, got z1 3, z2 2"),
    (lambda: match_logits(Z, Z + math.nan, 1.0, 0.0), "z2: expected finite"),
    (lambda: match_logits(Z, Z, 0.0, 0.0), "a: expected a finite number > 0"),
    (lambda: match_logits(Z, Z, 1.0, math.inf), "b: expected a finite number"),
    (lambda: match_probability(Z[0], Z, 1.0, 0.0), r"samples1: expected shape \(..., K, D\)"),
    (lambda: soft_contrastive_loss(Z, Z, YES[:1].expand(3), 1.0, 0.0), "matches: expected a shape that broad"),
    (lambda: soft_contrastive_loss(Z, Z, torch.ones(2), 1.0, 0.0), "matches: expected a tensor of booleans"),
    (lambda: soft_contrastive_loss(Z[:0], Z[:0], YES[:0], 1.0, 0.0), "at least one pair"),
    (lambda: hard_contrastive_loss(Z, Z, YES, 0.0), "margin: expected a finite number > 0"),
    (lambda: hard_contrastive_loss(Z, Z, YES, reduction="max"), "reduction: expected one of"),
    (lambda: MatchParameters(0.0), "a: expected a finite number > 0"),
)


FILLED = st.sampled_from([(), (1,), (2, 3)])
"""torch.distributions has no empty batches."""


def mixture(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    mean, spread = normal(seed, 2, *shape)
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


test_bad_values_of_mixtures = refuses(
    InputError,
    (lambda: stratified_samples(*ONE, 3), "n_samples: expected a multiple of the 2 components"),
    (lambda: stratified_samples(ONE[0][0, 0], ONE[1][0, 0]), r"mean: expected shape .*unsqueeze\(-2\)"),
    (lambda: stratified_samples(ONE[0], 0 * ONE[1]), "variance: expected variances > 0"),
    (lambda: kl_bound(ONE[0] + math.inf, ONE[1]), "mean: expected finite"),
    (lambda: kl_estimate(ONE[0][..., :2], *ONE), "one dimension D, got samples"),
    (lambda: match_loss(*ONE, YES, 1.0, 0.0, average="mean"), "average: expected one of"),
    (lambda: vib_objective(ONE, ONE, YES, 1.0, 0.0, kl_weight=-1.0), "kl_weight"),
    (lambda: vib_objective(ONE, ONE, YES, 1.0, 0.0, kl_weight=1.0, divergence="kl"), "divergence"),
    (lambda: self_mismatch(*ONE, 0.0, 0.0), "a: expected a finite number > 0"),
)

"""The statistic of "is this input of a known kind?" by hand, and its conformal p-values against their definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_ndtr
from scipy.stats import median_abs_deviation
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.embedding.known import (
    Reference,
    TrainingGaussians,
    check_alpha,
    combine,
    components,
    held_out_distances,
    points_needed,
    split,
    unit_features,
)
from contrastive_curvature.embedding.spread import DenseSpread, DiagonalSpread
from contrastive_curvature.io.serving import served_encoder as module
from contrastive_curvature.pairs.rows import content_numbers, point_keys

KINDS = ("variance", "covariance")


def embedding(kind: str, mean: Tensor, covariance: Tensor) -> cc.EmbeddingDistribution:
    spread = DiagonalSpread(covariance.diagonal(dim1=1, dim2=2)) if kind == "variance" else DenseSpread(covariance)
    return cc.EmbeddingDistribution.trusted(mean, spread)


def covariances(n: int, dim: int, seed: int = 0) -> Tensor:
    root = torch.randn(n, dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT


@given(
    n=st.integers(1, 6),
    dim=st.integers(2, 7),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    features=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_components_by_hand(n: int, dim: int, kind: str, dtype: torch.dtype, features: bool, size: float) -> None:
    z = size * torch.randn(n, dim, dtype=torch.float64)
    covariance = covariances(n, dim)
    norms = torch.rand(n, dtype=torch.float64) + 0.1
    found = components(embedding(kind, z.to(dtype), covariance.to(dtype)), norms.to(dtype) if features else None)
    assert found.dtype == torch.float64
    assert found.shape == (n, 3)
    for i in range(n):
        v = covariance[i].diagonal().diag() if kind == "variance" else covariance[i]
        length = float(z[i].norm())
        across = torch.eye(dim, dtype=torch.float64) - z[i, :, None] * z[i] / length**2
        total = float((across @ v @ across).trace())
        scale = float(norms[i]) if features else 1.0
        truth = [total / scale, total / (scale if features else length) ** 2, 1 / length]
        assert found[i].exp().tolist() == pytest.approx(truth, rel=1e-9 if dtype is torch.float64 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_components_are_finite_at_every_extreme(kind: str, dtype: torch.dtype, device: str) -> None:
    """Zero variance, or along the mean only; zero outputs and features; numbers whose squares float64 just holds."""
    most, least = min(torch.finfo(dtype).max, 1e150), max(torch.finfo(dtype).tiny, 1e-150)
    u = torch.tensor([3.0, 4.0, 0.0], dtype=dtype, device=device)
    for mean in (u, 0 * u, u * least, u * (most / 4)):
        along = torch.outer(u, u) / 25
        for covariance in (0 * along, along, torch.eye(3, dtype=dtype, device=device) * most, along * (most / 2)):
            for norm in (0.0, 1.0, most):
                made = embedding(kind, mean.expand(2, -1), covariance.expand(2, -1, -1))
                found = components(made, torch.full((2,), norm, dtype=dtype, device=device))
                assert found.isfinite().all()
                assert torch.equal(found[0], found[1])


def test_a_variance_along_the_mean_is_its_rounding() -> None:
    """It does not turn the direction, so a wide one of them is as good as a narrow one: no noise decides."""
    z = torch.randn(50, 3, dtype=torch.float64)
    along = z.unsqueeze(2) * z.unsqueeze(1)
    found = components(embedding("covariance", z, along))[:, 0].exp()
    rounding = 3 * torch.finfo(torch.float64).eps * z.square().sum(1)
    assert bool((found > 0.999 * rounding).all())
    assert bool((found < 2 * rounding).all())
    assert bool((components(embedding("covariance", z, 0 * along))[:, 0] < -700).all())


def test_the_statistic_is_fishers_combination_of_normal_tails() -> None:
    """Of scipy's tails, also far beyond where probabilities underflow; by a polynomial where there are no tails."""
    far = torch.logspace(-6, 6, 400, dtype=torch.float64)
    one = torch.cat([-far.flip(0), torch.zeros(1), far])
    for z in (one.unsqueeze(1), torch.stack([one, one.flip(0), one / 2], 1)):
        both = np.concatenate([z.numpy(), -z.numpy()[:, :1]], 1)
        found, truth = combine(z), np.sqrt(2 * -log_ndtr(-both).sum(1))
        np.testing.assert_allclose(found, truth, rtol=1e-11, atol=1e-15)
        np.testing.assert_allclose(module._combine(z), found, rtol=1e-12, atol=1e-12)
    # The first counts on both sides, the others on one.
    second = torch.stack([torch.zeros_like(one), one], 1)
    assert bool((combine(second).diff() >= 0).all())
    assert torch.equal(combine(one.unsqueeze(1)), combine(-one.unsqueeze(1)))


def dense_distance(x: Tensor, y: Tensor, new: Tensor) -> Tensor:
    """The relative distance of its paper with inverse covariances; a class of one input has none."""
    u, v = (nn.functional.normalize(part.double()) for part in (x, new))
    several = [u[y == label] for label in y.unique() if int((y == label).sum()) > 1]
    left = torch.cat([(part - part.mean(0)) * (len(part) / (len(part) - 1)) ** 0.5 for part in several])

    def squared(rows: Tensor, mean: Tensor) -> Tensor:
        axes = (v - mean) @ torch.linalg.inv(rows.T @ rows / len(rows))
        return (axes * (v - mean)).sum(1)

    near = torch.stack([squared(left, part.mean(0)) for part in several]).amin(0)
    return (near - squared(u - u.mean(0), u.mean(0))) / x.shape[1]


def dense_outputs(z: Tensor, new: Tensor) -> Tensor:
    """The logarithm of the squared Mahalanobis distance with numpy's covariance."""
    apart = new.double() - z.double().mean(0)
    precision = torch.linalg.inv(torch.from_numpy(np.cov(z.double().numpy().T, ddof=0)))
    return ((apart @ precision) * apart).sum(1).log()


@pytest.mark.parametrize("width", [3, 64])
def test_class_gaussians_are_the_dense_ones(width: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, centres, new = (torch.randn(n, width, generator=generator) for n in (400, 5, 50))
    y = torch.arange(400) % 5
    x = x * torch.linspace(0.1, 1, width) + centres[y]
    y[7] = 9
    z, out = x[:, :3] @ torch.diag(torch.tensor([3.0, 1.0, 0.1])) + 5, 7 * new[:, :3]
    gaussians = TrainingGaussians.of(x.to(device), z.to(device), y.to(device))
    found = gaussians(unit_features(new.to(device))[0], out.to(device))
    assert (found.device.type, found.dtype) == (device, torch.float64)
    truth = torch.stack([dense_outputs(z, out), dense_distance(x, y, new)], 1)
    torch.testing.assert_close(found.cpu(), truth, rtol=1e-9, atol=1e-9)
    # Only the direction of features counts, and the rounding of float32 does not.
    torch.testing.assert_close(
        gaussians(unit_features(7 * new.to(device))[0], out.to(device)), found, rtol=0, atol=3e-6
    )
    held_out = held_out_distances(x.to(device), z.to(device), y.to(device)).cpu()
    mixed = torch.randperm(len(x), generator=generator)
    again = held_out_distances(x[mixed].to(device), z[mixed].to(device), y[mixed].to(device)).cpu()
    torch.testing.assert_close(again, held_out[mixed], rtol=1e-9, atol=1e-9)
    for fold in point_keys(content_numbers(z), seed=1).argsort().chunk(5):
        rest = torch.ones(len(x), dtype=torch.bool).index_fill(0, fold, False)
        truth_of_fold = [dense_outputs(z[rest], z[fold]), dense_distance(x[rest], y[rest], x[fold])]
        torch.testing.assert_close(held_out[fold], torch.stack(truth_of_fold, 1), rtol=1e-9, atol=1e-9)
    # Two classes of two inputs: without any of them, one class.
    few, pairs = held_out_distances(x[:4], z[:4], y[:4] // 2), TrainingGaussians.of(x[:4], z[:4], y[:4] // 2)
    assert torch.equal(few[:, 1], pairs(unit_features(x[:4])[0], z[:4])[:, 1])
    for one_class in (TrainingGaussians.of(x[:6], z, y[:6]), TrainingGaussians.of(x, z)):
        torch.testing.assert_close(one_class(new, out), truth[:, :1])


def test_wide_class_gaussians_keep_the_leading_axes() -> None:
    """Of exactly 64 axes and an isotropic rest nothing is lost, and a direction without variance stays finite."""
    width, n = 80, 4000
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 4
    scale = torch.cat([torch.linspace(3, 1, 64), torch.full((width - 64,), 0.05)])
    new = torch.randn(30, width, generator=generator) * scale
    x = torch.randn(n, width, generator=generator) * scale + torch.randn(4, width, generator=generator)[y] * (scale > 1)
    gaussians = TrainingGaussians.of(x, x, y)
    assert gaussians.basis.shape == (width, 128)
    # The rest of a sample is isotropic up to its noise.
    truth = torch.stack([dense_outputs(x, new), dense_distance(x, y, new)], 1)
    torch.testing.assert_close(gaussians(unit_features(new)[0], new), truth, rtol=0.1, atol=0.05)
    x[:, 5:] = 0
    many = torch.cat([new, 0 * new, x])
    for z in (x, 0 * x):
        assert TrainingGaussians.of(x, z, y)(unit_features(many)[0], many).isfinite().all()


@given(n=st.integers(1, 30).map(lambda k: 2 * k + 1), scale=st.sampled_from([0.1, 1.0, 40.0]))
def test_standard_is_median_and_median_deviation(n: int, scale: float) -> None:
    known = 5 + scale * torch.randn(n, 3, dtype=torch.float64)
    found = Reference.of(known, known)
    assert torch.equal(found.location, known.quantile(0.5, dim=0))
    truth = median_abs_deviation(known.numpy(), scale="normal")
    assert found.scale.tolist() == pytest.approx(truth.tolist(), rel=1e-4)


def test_a_standard_without_a_spread_stays_finite() -> None:
    """One point, equal points, and more than half of them equal."""

    def standard(known: Tensor) -> Reference:
        return Reference.of(known, known)

    assert standard(torch.full((1, 2), 3.0)).scale.tolist() == pytest.approx([1e-3] * 2)
    assert standard(torch.full((9, 2), 3.0)).scale.tolist() == pytest.approx([1e-3] * 2)
    mostly = torch.zeros(9, 1)
    mostly[0] = 6.0
    assert float(standard(mostly).scale) == pytest.approx(2.0)


def _p_value(reference: Reference, values: Tensor) -> Tensor:
    return reference.p_value(reference.novelty(values))


@given(n=st.integers(1, 40), b=st.integers(1, 8), draw=st.data())
def test_p_values_by_definition(n: int, b: int, draw: st.DataObject) -> None:
    """Whole numbers, so that ties occur."""
    numbers = draw.draw(st.lists(st.integers(-4, 4), min_size=n + b, max_size=n + b))
    values = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    known, new = values[:n], values[n:]
    reference = Reference(torch.zeros(1).double(), torch.ones(1).double(), combine(known).sort().values)
    found = _p_value(reference, new)
    # The statistic of one component increases with its size.
    of_known, of_new = ([abs(float(z)) for z in part] for part in (known, new))
    truth = [(1 + sum(k >= s for k in of_known)) / (n + 1) for s in of_new]
    assert found.tolist() == truth
    assert bool(((found > 0) & (found <= 1)).all())


@each("n, alpha", [(8, 1 / 7), (17, 0.1), (29, 0.05)])
def test_at_most_a_share_alpha_of_known_inputs_is_flagged(n: int, alpha: float) -> None:
    """And as many as the number of inputs allows: nothing is wasted. Each against known inputs of its own."""
    rest, repeats = n - n // 3, 1200
    truth = math.floor(alpha * (rest + 1) + 1e-9) / (rest + 1)
    drawn = torch.randn(repeats, n + 1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flagged = [_p_value(Reference.of(*split(values[:n])), values[n:]) <= alpha for values in drawn]
    noise = 3 * (truth * (1 - truth) / repeats) ** 0.5
    assert abs(sum(map(bool, flagged)) / repeats - truth) < noise


def test_split_takes_every_input_once() -> None:
    for n in (2, 3, 4, 10, 100):
        values = torch.arange(n, dtype=torch.float64).unsqueeze(1)
        for_scale, rest = split(values)
        assert len(for_scale) == max(1, n // 3)
        assert torch.cat([for_scale, rest]).flatten().sort().values.tolist() == list(range(n))
        assert torch.equal(split(values)[1], rest)


def test_points_needed() -> None:
    numbers = {0.01: 99, 0.05: 19, 0.1: 9, 1 / 3: 2, 0.5: 1, 0.9: 1, 0.001: 999, 0.07: 14, 1 / 50: 49}
    assert {alpha: points_needed(alpha) for alpha in numbers} == numbers
    for alpha, n in numbers.items():
        assert check_alpha(alpha, n) == alpha
        given_ = points_needed(alpha, splits=True)
        assert len(split(torch.zeros(given_, 1))[1]) >= n
        assert len(split(torch.zeros(given_ - 1, 1))[1]) < n or given_ == 2


def test_by_class_the_share_holds_for_every_predicted_class() -> None:
    """Over 600 calibration sets, where the scores of one class are larger than those of the others."""
    alpha, splits, new, generator = 0.1, 600, 60, np.random.default_rng(0)
    flagged, wide = np.zeros((2, splits, 3)), 1 + np.arange(3)
    for split_ in range(splits):
        classes = generator.integers(3, size=150)
        scores = wide[classes] * generator.normal(size=150)
        of = torch.zeros(1, 1).double(), torch.zeros(150, 1).double()
        known = Reference.of(*of, torch.tensor(classes), 3, torch.tensor(scores), "uncertainty")
        others = np.arange(3).repeat(new)
        drawn = torch.tensor(wide[others] * generator.normal(size=3 * new))
        for row, p in enumerate((known.p_value(drawn, torch.tensor(others)), known.p_value(drawn))):
            flagged[row, split_] = (p <= alpha).numpy().reshape(3, new).mean(1)
    noise = 4 * flagged.std(1) / splits**0.5
    assert (flagged[0].mean(0) < alpha + noise[0]).all()
    # Neither wasteful: of about 50 inputs a class, whole numbers allow 0.08 and more.
    assert (flagged[0].mean(0) > 0.08).all()
    # Compared with all known inputs, the widest class is flagged too often.
    assert flagged[1].mean(0)[2] > 1.5 * alpha

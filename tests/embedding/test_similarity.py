"""The distribution of the cosine between two uncertain embeddings, against quadrature, samples and exact limits."""

import functools
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import covering, each, refuses
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature import EmbeddingDistribution, InputError, InputTypeError, similarity
from contrastive_curvature.embedding.similarity import directions
from contrastive_curvature.embedding.spread import Axes, DenseSpread, DiagonalSpread, Spread

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def normalized(z: Tensor) -> Tensor:
    return torch.nn.functional.normalize(z, dim=1)


def covariances(n: int, dim: int, seed: int = 0) -> Tensor:
    root = draw(n, dim, dim, seed=seed) / dim**0.5
    return root @ root.mT


def build(kind: str, n: int, dim: int, seed: int, size: float = 0.05) -> EmbeddingDistribution | Tensor:
    """N uncertain embeddings of a kind; ``size`` scales the variances."""
    mean = torch.nn.functional.normalize(draw(n, dim, seed=seed), dim=1) * (1 + draw(n, 1, seed=seed + 1).abs())
    if kind == "point":
        return mean
    if kind == "diagonal":
        return EmbeddingDistribution(mean, variance=size * draw(n, dim, seed=seed + 2).square())
    if kind == "dense":
        return EmbeddingDistribution(mean, covariance=size * covariances(n, dim, seed + 2))
    if kind == "joint":
        return EmbeddingDistribution(mean, joint_covariance=size * covariances(1, n * dim, seed + 2)[0])
    return EmbeddingDistribution.from_samples(mean + size**0.5 * draw(12, n, dim, seed=seed + 2))


KINDS = ("diagonal", "dense", "joint", "samples", "point")


def exact_directions(mean: Tensor, covariance: Tensor, nodes: int = 48) -> tuple[Tensor, Tensor]:
    """Mean and covariance of ``z / |z|`` by Gauss-Hermite quadrature, shapes (D,) and (D, D)."""
    x, w = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(nodes))
    dim = len(mean)
    grid = torch.cartesian_prod(*[x] * dim)
    weight = torch.cartesian_prod(*[w / w.sum()] * dim).prod(1)
    z = mean + grid @ torch.linalg.cholesky(covariance).mT
    z = z / z.norm(dim=1, keepdim=True)
    first = weight @ z
    return first, (z * weight.unsqueeze(1)).mT @ z - torch.outer(first, first)


@pytest.mark.parametrize("dim", [2, 3])
def test_the_expansion_has_the_order_that_is_claimed(dim):
    """Covariances t V: the errors shrink as the powers of t that the docstring leaves out."""
    mean = draw(dim, seed=3)
    mean, spread = mean / mean.norm(), covariances(1, dim, seed=4)[0]
    errors: dict[str, list[float]] = {"mean": [], "length": [], "covariance": [], "radial": []}
    for t in (2e-3, 1e-3):
        first, second = exact_directions(mean, t * spread)
        guess = directions("a", EmbeddingDistribution(mean[None], covariance=t * spread[None]))
        errors["mean"].append(float((guess.mean[0] - first).norm()))
        errors["length"].append(abs(float(mean @ (guess.mean[0] - first))))
        errors["covariance"].append(float((guess.dense()[0] - second).norm()))
        errors["radial"].append(abs(float(mean @ (guess.dense()[0] - second) @ mean)))
    # Halving t divides an error of order t^2 by 4 and one of order t^3 by 8, up to higher orders.
    for name, order in {"mean": 2, "length": 3, "covariance": 2, "radial": 3}.items():
        assert errors[name][0] / errors[name][1] > 0.8 * 2**order, name


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("angle", [0.0, 0.4, 1.5, math.pi])
def test_mean_and_variance_are_those_of_quadrature(dim, angle):
    u, v = torch.zeros(2, dim, dtype=DOUBLE)
    u[0], v[0], v[1] = 1, math.cos(angle), math.sin(angle)
    spreads = [0.002 * covariances(1, dim, seed=s)[0] + 1e-4 * torch.eye(dim, dtype=DOUBLE) for s in (5, 6)]
    (ma, ca), (mb, cb) = (exact_directions(m, s) for m, s in zip((u, v), spreads, strict=True))
    a, b = (EmbeddingDistribution(2 * m[None], covariance=4 * s[None]) for m, s in zip((u, v), spreads, strict=True))
    out = similarity(a, b)
    variance = ma @ cb @ ma + mb @ ca @ mb + (ca * cb).sum()
    # The neglected powers are relative errors of the size of the spread, 0.01 here, times single-digit factors.
    assert float(out.mean) == pytest.approx(float(ma @ mb), abs=0.02 * float(variance) ** 0.5)
    assert float(out.variance) == pytest.approx(float(variance), rel=0.1)


@functools.lru_cache(maxsize=1)
def noise(n: int, dim: int) -> Tensor:
    """Standard normal numbers for both sides, shape (2, n, D)."""
    return draw(2, n, dim)


@covering(2, kappa=[1.0, 1e2, 1e4], angle=[0.0, 0.5, math.pi / 2, math.pi], dim=[2, 16, 512])
def test_probabilities_are_those_of_ten_thousand_samples(dim, angle, kappa):
    n = 10_000
    u, v = torch.zeros(2, dim, dtype=DOUBLE)
    u[0], v[0], v[1] = 1, math.cos(angle), math.sin(angle)
    low, high = 1e-9, 1e9
    for _ in range(80):
        size = math.sqrt(low * high)
        reached = float(cc.vmf.concentration_from_gaussian(u, variance=size * torch.ones(dim, dtype=DOUBLE)))
        low, high = (size, high) if reached > kappa else (low, size)
    a, b = (EmbeddingDistribution(m[None], variance=torch.full((1, dim), low, dtype=DOUBLE)) for m in (u, v))
    one, other = (
        torch.nn.functional.normalize(m + low**0.5 * e, dim=1) for m, e in zip((u, v), noise(n, dim), strict=True)
    )
    drawn = (one * other).sum(1).sort().values
    at = torch.arange(0, n, 20)
    out = similarity(a, b)
    many = cc.CosineDistribution(out.mean.expand(len(at)), out.variance.expand(len(at)))
    gap = (many.probability(drawn[at]) - (1 - at / n)).abs().max()
    # 0.0223 is exceeded by samples of a right distribution once in ten thousand times (Kolmogorov); 0.03 is about the
    # largest error of isotropic spreads in the table of docs/statistics.md.
    assert float(gap) < 0.0223 + 0.03


@given(
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)).filter(lambda k: k != ("point", "point")),
    n=st.integers(1, 5),
    m=st.integers(1, 5),
    dim=st.integers(2, 6),
    size=st.sampled_from([1e-30, 1e-8, 1e-2, 1.0, 1e4, 1e12]),
    entries=st.sampled_from([1, 7, 60, 2**24]),
    single=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_rows_sides_and_bounds_agree(device, kinds, n, m, dim, size, entries, single, seed):
    def side(kind: str, count: int, shift: int) -> Any:
        out = build(kind, count, dim, seed + shift, size)
        if isinstance(out, Tensor):
            return out.to(device, torch.float32 if single else DOUBLE)
        return out.to(device, torch.float32 if single else DOUBLE)

    a, b = side(kinds[0], n, 0), side(kinds[1], m, 50)
    eps = 1e-5 if single else 1e-13
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["contrastive_curvature.embedding.similarity"], "_ENTRIES", entries)
        pairs = similarity(a, b, pairwise=True)
        turned = similarity(b, a, pairwise=True)
    assert pairs.mean.shape == pairs.variance.shape == (n, m)
    assert pairs.mean.dtype == (torch.float32 if single else DOUBLE)
    assert torch.allclose(pairs.mean, turned.mean.mT, rtol=0, atol=eps)
    assert torch.allclose(pairs.variance, turned.variance.mT, rtol=0, atol=eps)
    assert bool((pairs.mean.abs() <= 1).all())
    assert bool((pairs.variance >= 0).all())
    assert bool((pairs.variance <= 1 - pairs.mean**2).all())
    chance = pairs.probability(0.2)
    assert chance.dtype == pairs.mean.dtype
    assert bool(((chance >= 0) & (chance <= 1)).all())
    assert bool((pairs.probability(0.7) <= chance).all())
    if n == m:
        rows = similarity(a, b)
        assert torch.allclose(rows.mean, pairs.mean.diagonal(), rtol=0, atol=eps)
        assert torch.allclose(rows.variance, pairs.variance.diagonal(), rtol=0, atol=eps)
        assert torch.allclose(rows.std.square(), rows.variance, rtol=1e-5, atol=0)


@given(n=st.integers(1, 4), dim=st.integers(2, 6), size=st.floats(1e-6, 10), seed=st.integers(0, 99))
def test_a_diagonal_covariance_is_one_of_the_dense_ones(n, dim, size, seed):
    a, b = build("diagonal", n, dim, seed, size), build("diagonal", n, dim, seed + 50, size)
    thin = similarity(a, b, pairwise=True)
    dense = [EmbeddingDistribution(d.raw_mean, covariance=torch.diag_embed(d.variance)) for d in (a, b)]
    for pair in (dense, [a, dense[1]], [dense[0], b]):
        full = similarity(*pair, pairwise=True)
        assert torch.allclose(thin.mean, full.mean, rtol=0, atol=1e-13)
        assert torch.allclose(thin.variance, full.variance, rtol=1e-9, atol=1e-15)


@given(dim=st.integers(2, 6), seed=st.integers(0, 99))
def test_without_spread_it_is_the_cosine(dim, seed):
    mean, other = draw(3, dim, seed=seed), draw(3, dim, seed=seed + 1)
    cosine = torch.nn.functional.cosine_similarity(mean, other)
    out = similarity(EmbeddingDistribution(mean, variance=torch.zeros(3, dim, dtype=DOUBLE)), other)
    assert torch.allclose(out.mean, cosine, rtol=0, atol=1e-14)
    assert torch.equal(out.variance, torch.zeros(3, dtype=DOUBLE))
    assert torch.equal(out.probability(out.mean), torch.ones(3, dtype=DOUBLE))
    assert torch.equal(out.probability((out.mean + 1e-9).clamp(max=1)), (out.mean >= 1 - 1e-12).double())


@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_endless_spread_is_the_uniform_distribution(dim):
    wide = EmbeddingDistribution(draw(2, dim), variance=torch.full((2, dim), 1e30, dtype=DOUBLE))
    out = similarity(wide, wide)
    assert float(out.mean.abs().max()) < 1e-3
    assert torch.allclose(out.variance, torch.full((2,), 1 / dim, dtype=DOUBLE), rtol=1 / dim)
    assert torch.allclose(out.probability(0.0), torch.full((2,), 0.5, dtype=DOUBLE), atol=1e-2)


def test_samples_enter_with_their_own_moments():
    """All S x S cosines: their mean, and by rows, columns and the rest the three parts of the variance."""
    one, other = (build("samples", 1, 4, seed) for seed in (0, 50))
    x, y = (d.sample(12)[:, 0] for d in (one, other))
    cosines = x @ y.mT
    rest = cosines - cosines.mean(0) - cosines.mean(1, keepdim=True) + cosines.mean()
    variance = cosines.mean(0).var() + cosines.mean(1).var() + rest.square().sum() / 11**2
    out = similarity(one, other)
    assert float(out.mean) == pytest.approx(float(cosines.mean()), abs=1e-14)
    assert float(out.variance) == pytest.approx(float(variance), rel=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
@pytest.mark.parametrize("pairwise", [True, False])
def test_gradients(kind, pairwise):
    mean, other = draw(2, 3, seed=1), build("dense", 2, 3, 2)
    spread = draw(2, 3, seed=3).square() if kind == "diagonal" else covariances(2, 3, 3)
    made = DiagonalSpread if kind == "diagonal" else DenseSpread

    def both(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        s = s if kind == "diagonal" else (s + s.mT) / 2
        out = similarity(EmbeddingDistribution.trusted(m, made(0.1 * s)), other, pairwise=pairwise)
        return out.mean, out.variance

    assert torch.autograd.gradcheck(both, (mean.requires_grad_(), spread.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_lifted(dtype):
    mean, variance = draw(3, 4).to(dtype), draw(3, 4).square().to(dtype)
    half = similarity(EmbeddingDistribution(mean, variance=variance), mean.float())
    full = similarity(EmbeddingDistribution(mean.float(), variance=variance.float()), mean.double())
    assert half.mean.dtype == torch.float32
    assert full.mean.dtype == DOUBLE
    assert torch.allclose(half.variance.double(), full.variance, atol=1e-5)


def test_thresholds_broadcast():
    out = similarity(build("dense", 3, 4, 0), build("dense", 2, 4, 9), pairwise=True)
    many = out.probability(torch.tensor([0.1, -0.5]))
    assert torch.equal(many[:, 0], out.probability(0.1)[:, 0])
    assert torch.equal(many[:, 1], out.probability(-0.5)[:, 1])
    assert torch.equal(out.probability(-1), torch.ones_like(out.mean))
    assert bool((out.probability(1.0) == 0).all())


@pytest.mark.parametrize(
    "kinds", [("diagonal", "diagonal"), ("dense", "diagonal"), ("samples", "dense"), ("dense", "point")]
)
@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-5])
def test_near_duplicates_in_float32_are_those_of_float64(kinds, size):
    """``1 - cosine`` is far below the rounding of a cosine in float32, and the variance below that of its terms."""
    mean = draw(20, 8, seed=1).float()
    moved = (mean + size * draw(20, 8, seed=2)).float()

    def side(kind: str, z: Tensor, dtype: torch.dtype) -> Any:
        z, dim = z.to(dtype), z.shape[1]
        if kind == "samples":
            return EmbeddingDistribution.from_samples(z + (size * draw(6, *z.shape)).to(dtype))
        if kind == "point":
            return z
        spread = torch.full_like(z, size**2)
        if kind == "diagonal":
            return EmbeddingDistribution(z, variance=spread)
        return EmbeddingDistribution(z, covariance=torch.eye(dim, dtype=dtype) * spread[:, :, None])

    narrow, wide = (
        similarity(side(kinds[0], mean, dtype), side(kinds[1], moved, dtype)) for dtype in (torch.float32, DOUBLE)
    )
    pairs = similarity(side(kinds[0], mean, torch.float32), side(kinds[1], moved, torch.float32), pairwise=True)
    assert narrow.mean.dtype == narrow.std.dtype == torch.float32
    # Samples in float32 are other samples.
    close = 0.1 if "samples" in kinds else 1e-4
    assert torch.allclose(narrow.std.double(), wide.std, rtol=close, atol=0)
    assert torch.allclose(pairs.std.diagonal(), narrow.std, rtol=1e-4, atol=0)
    assert torch.allclose(narrow.complement, wide.complement, rtol=close, atol=0)
    for share in (0.5, 1.0, 2.0):
        threshold = 1 - share * wide.complement
        chance = wide.probability(threshold)
        assert 0.01 < float(chance.mean()) < 0.99
        assert torch.allclose(narrow.probability(threshold).double(), chance, atol=close)
        assert torch.allclose(pairs.probability(threshold).diagonal().double(), chance, atol=close)


@given(
    dim=st.integers(2, 40),
    scale=st.sampled_from([1.0, 4.0, 3.0, 1e-12]),
    dtype=st.sampled_from([torch.float32, DOUBLE]),
    pairwise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equal_directions_without_spread_reach_every_cosine(dim, scale, dtype, pairwise, seed):
    mean = draw(3, dim, seed=seed).to(dtype)
    certain = EmbeddingDistribution(mean, variance=torch.zeros_like(mean))
    out = similarity(certain, scale * mean.double() if dtype == DOUBLE else mean, pairwise=pairwise)
    chance = out.probability(1.0)
    assert torch.equal(chance.diagonal() if pairwise else chance, torch.ones(3, dtype=dtype))
    assert bool((similarity(certain, certain).mean == 1).all())
    # A cosine below one in all but its rounding.
    other = mean + 1e-5 * draw(3, dim, seed=seed + 1).to(dtype)
    assert torch.equal(similarity(certain, other).probability(1.0), torch.zeros(3, dtype=dtype))


@given(
    kind=st.sampled_from(["diagonal", "dense", "samples"]),
    n=st.integers(1, 4),
    dim=st.integers(2, 6),
    size=st.sampled_from([1e-2, 1.0, 1e4]),
    entries=st.sampled_from([1, 60, 2**24]),
    seed=st.integers(0, 99),
)
def test_what_a_mean_lacks_of_norm_one(kind, n, dim, size, entries, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["contrastive_curvature.embedding.similarity"], "_ENTRIES", entries)
        found = directions("a", build(kind, n, dim, seed, size))
    assert found.mean.shape == (n, dim)
    assert torch.allclose(found.lost, 1 - found.mean.square().sum(1), rtol=0, atol=1e-14)


GOOD = EmbeddingDistribution(torch.ones(3, 2), variance=torch.ones(3, 2))


test_refused = refuses(
    InputError,
    (lambda: similarity(torch.ones(3, 2), torch.ones(3, 2)), "two tensors", InputTypeError),
    (lambda: similarity(GOOD, [[1.0, 2.0]]), "b: expected an EmbeddingDistribution", InputTypeError),
    (lambda: similarity(None, GOOD), "a: expected an EmbeddingDistribution", InputTypeError),
    (lambda: similarity(GOOD, torch.ones(4, 2)), "pairwise=True"),
    (lambda: similarity(GOOD, torch.ones(3, 5)), "D = 2"),
    (lambda: similarity(GOOD, torch.ones(0, 2), pairwise=True), "N >= 1"),
    (lambda: similarity(GOOD, torch.ones(2)), "b: expected"),
    (lambda: similarity(GOOD, torch.ones(3, 2).long()), "floating-point", InputTypeError),
    (lambda: similarity(GOOD, torch.full((3, 2), math.nan)), "b: expected finite"),
    (lambda: similarity(torch.zeros(3, 2), GOOD), "a: expected non-zero"),
    (lambda: similarity(GOOD, torch.ones(3, 2, device="meta")), "device"),
    (lambda: similarity(GOOD, GOOD, pairwise="no"), "pairwise", InputTypeError),
)


@each(
    "threshold, error",
    [
        (1.1, InputError),
        (math.nan, InputError),
        (torch.zeros(2), InputError),
        ("0.5", InputTypeError),
        (True, InputTypeError),
        (torch.zeros(3, dtype=torch.complex64), InputTypeError),
    ],
)
def test_thresholds_refused(threshold, error):
    with pytest.raises(error, match="threshold"):
        similarity(GOOD, GOOD).probability(threshold)


@given(dim=st.integers(2, 5), size=st.floats(1e-3, 1e6), dense=st.booleans(), seed=st.integers(0, 99))
def test_means_stay_inside_the_sphere_and_leave_room_for_the_spread(dim, size, dense, seed):
    """Also where nearly all variance is along the mean, and mixes with the rest."""
    axis = normalized(draw(1, dim, seed=seed))
    across = normalized(axis + 0.3 * draw(1, dim, seed=seed + 1))
    spread = size * (across.mT @ across + 1e-4 * torch.eye(dim, dtype=DOUBLE))
    if dense:
        found = directions("a", EmbeddingDistribution(axis, covariance=spread[None]))
    else:
        found = directions("a", EmbeddingDistribution(axis, variance=spread.diagonal()[None]))
    assert float(found.mean.norm()) <= 1
    assert float(found.dense()[0].trace()) > 0.1 * min(size, 1) * 1e-4


def by_hand(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of one direction, as the docstring of ``directions`` has them, with whole matrices."""
    n, dim = m.norm(), len(m)
    u, s = m / n, v / n**2
    p = torch.eye(dim, dtype=DOUBLE) - u.outer(u)
    tangent, rho, c = p @ s @ p, u @ s @ u, p @ s @ u
    tau, q = tangent.trace(), (tangent @ tangent).trace()
    g = (3 * rho * tau + 6 * c @ c - 1.5 * q) / (1 + tau) ** 2
    length = 1 / (1 + tau) * (1 / (1 + g) if g > 0 else 1 - g)
    zeta = (q / 2 + rho * tau**2) / ((1 + tau) ** 2 * (1 + tau + rho))
    mean = length.sqrt() * u - c * (1 + tau + rho) ** -1.5
    return mean, (1 - length - zeta) / tau * tangent + zeta * u.outer(u)


@covering(
    2,
    kind=["diagonal", "dense", "joint", "axes", "axes and more"],
    dim=[2, 5, 128],
    size=[1e-4, 0.05, 3.0],
    long=[1.0, 30.0],
    dtype=[torch.float32, DOUBLE],
)
def test_every_kind_of_spread_gives_the_numbers_of_dense_matrices(kind, dim, size, long, dtype, monkeypatch):
    """Also where the spread along the mean is ``long`` times that across."""
    mean = draw(4, dim, seed=1).to(dtype)
    values = size / dim * draw(4, dim, seed=3).square()
    values[:, 0] *= long
    axes, made = torch.linalg.qr(draw(dim, dim, seed=4))[0], covariances(4, dim, 5) * size / dim
    a: Spread = DiagonalSpread(values.to(dtype))
    if kind == "dense":
        a = DenseSpread((made + long * size / dim * (mean.unsqueeze(2) * mean.unsqueeze(1))).to(dtype))
    if "axes" in kind:
        a = Axes(axes, values, made[0] if "more" in kind else None, dtype)
    given = EmbeddingDistribution.trusted(mean, a)
    if kind == "joint":
        given = EmbeddingDistribution(mean, joint_covariance=torch.block_diag(*made).to(dtype))
    wanted = [by_hand(m, v) for m, v in zip(mean.double(), given.covariance.double(), strict=True)]
    with monkeypatch.context() as patch:
        if "axes" in kind:
            patch.delattr(Axes, "covariance")
        found = directions("a", given)
    # The oracle reads the covariance along axes rounded to its dtype.
    rounded = dtype != DOUBLE and "axes" in kind
    close = {"rtol": 1e-5, "atol": 1e-7} if rounded else {"rtol": 1e-9, "atol": 1e-13}
    assert torch.allclose(found.mean, torch.stack([m for m, _ in wanted]), **close)
    assert torch.allclose(found.dense(), torch.stack([c for _, c in wanted]), **close)

"""Match probabilities: against known truths, against scikit-learn, and what is refused."""

import io
import math
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from tables import each, refused
from torch import Tensor
from torch.nn.functional import normalize

from contrastive_curvature import EmbeddingDistribution, InputError, MatchProbability, NotFittedError
from contrastive_curvature.codec import sealed
from contrastive_curvature.embedding.match_probability import Side, pair_features
from contrastive_curvature.embedding.similarity import directions

DOUBLE = torch.float64


class Pairs(NamedTuple):
    a: EmbeddingDistribution
    b: EmbeddingDistribution
    same: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy_pairs(n: int, seed: int, dim: int = 8, *, known: bool = True) -> Pairs:
    """Class directions plus noise of a size of each input's own, which the distribution knows or only pretends to."""
    g = generator(seed)
    same = torch.rand(n, generator=g) < 0.5
    one = normalize(torch.randn(n, dim, generator=g, dtype=DOUBLE), dim=1)
    two = torch.where(same[:, None], one, normalize(torch.randn(n, dim, generator=g, dtype=DOUBLE), dim=1))
    sizes = torch.exp(torch.randn(2, n, 1, generator=g, dtype=DOUBLE) - 1.5)
    raw = [c + s * torch.randn(n, dim, generator=g, dtype=DOUBLE) for c, s in zip((one, two), sizes, strict=True)]
    if not known:
        # Unit norms, because a long output would tell of much noise.
        raw, sizes = [normalize(z, dim=1) for z in raw], sizes[:, torch.randperm(n, generator=g)]
    a, b = (EmbeddingDistribution(z, variance=s.square().expand_as(z)) for z, s in zip(raw, sizes, strict=True))
    return Pairs(a, b, same)


def spread_along(one: EmbeddingDistribution, other: EmbeddingDistribution) -> Tensor:
    """Variance of directions on the way to others, pair by pair, from dense matrices."""
    out = []
    for u, v, spread in zip(one.mu, other.mu, directions("one", one).dense(), strict=True):
        way = (v - u) @ (torch.eye(len(u), dtype=DOUBLE) - u.outer(u))
        out.append(way @ spread @ way / (way @ way))
    return torch.stack(out)


@pytest.mark.parametrize("curve", ["logistic", "isotonic"])
def test_scikit_learn_says_the_same(curve):
    train, test = noisy_pairs(500, 0), noisy_pairs(200, 1)
    p = MatchProbability(curve=curve).fit_pairs(*train).same(test.a, test.b)

    def columns(pairs: Pairs) -> Tensor:
        one, other = pairs.a, pairs.b
        both = torch.stack([one.uncertainty, other.uncertainty], 1)
        angle = spread_along(one, other) + spread_along(other, one)
        return torch.stack([(one.mu * other.mu).sum(1), angle.log(), both.amax(1).log(), both.amin(1).log()], 1)

    x, z = columns(train), columns(test)
    z[:, 1:] = torch.minimum(torch.maximum(z, x.amin(0)), x.amax(0))[:, 1:]
    shift, scale = x.mean(0), x.std(0)
    x, z = ((v - shift) / scale for v in (x, z))
    x, z = (torch.cat([v, v[:, :1] * v[:, 1:2]], 1) for v in (x, z))
    model = LogisticRegression(max_iter=10_000, tol=1e-8).fit(x.numpy(), train.same.numpy())
    wanted = model.predict_proba(z.numpy())[:, 1]
    if curve == "isotonic":
        edge = 1 / 502
        bent = IsotonicRegression(y_min=edge, y_max=1 - edge, out_of_bounds="clip")
        wanted = bent.fit(model.decision_function(x.numpy()), train.same.numpy()).predict(
            model.decision_function(z.numpy())
        )
    rising = model.coef_[0, 0] + model.coef_[0, 4] * z[:, 1] > 0
    assert int(rising.sum()) > 150
    assert torch.allclose(p[rising], torch.from_numpy(wanted)[rising], rtol=0, atol=1e-9)


@cache
def fitted_match(dim: int, curve: Literal["logistic", "isotonic"], seed: int) -> MatchProbability:
    return MatchProbability(curve=curve).fit_pairs(*noisy_pairs(300, seed, dim))


@given(
    dim=st.sampled_from([3, 8]),
    curve=st.sampled_from(["logistic", "isotonic"]),
    fit=st.integers(0, 3),
    seed=st.integers(0, 10**6),
    size=st.floats(1e-3, 2),
    shape=st.floats(0, 1),
)
def test_it_never_falls_as_the_cosine_grows(dim, curve, fit, seed, size, shape):
    """One side turns towards the other on their great circle, and its covariance with it."""
    match, angles = fitted_match(dim, curve, fit), torch.linspace(math.pi, 0, 40, dtype=DOUBLE)
    g = generator(seed)
    frame = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=DOUBLE))[0]
    spreads = [torch.diag(size**2 * torch.exp(shape * torch.randn(dim, generator=g, dtype=DOUBLE))) for _ in range(2)]
    turns = torch.eye(dim, dtype=DOUBLE).repeat(40, 1, 1)
    turns[:, 0, 0] = turns[:, 1, 1] = angles.cos()
    turns[:, 1, 0] = angles.sin()
    turns[:, 0, 1] = -angles.sin()
    a, b = (
        EmbeddingDistribution((frame @ turn)[..., 0], covariance=frame @ turn @ spread @ turn.mT @ frame.T)
        for turn, spread in zip((turns[-1:].expand_as(turns), turns), spreads, strict=True)
    )
    # At the ends, where the two agree or are opposite, no great circle is the one between them.
    p = match.same(a, b)[1:-1]
    assert bool((p.diff() >= -1e-9).all())
    assert bool(((p >= 0) & (p <= 1)).all())


@pytest.mark.parametrize("dim", [3, 8])
@pytest.mark.parametrize("end", [-1.0, 1.0])
def test_where_directions_agree_or_are_opposite_their_mean_spread_counts(dim, end):
    way = torch.eye(dim)
    for spread in (torch.ones(dim), torch.arange(1.0, dim + 1)):
        a, b = (EmbeddingDistribution(z[None], variance=1e-4 * spread[None]) for z in (way[0], end * way[0]))
        sides = [Side.of("x", x, use_uncertainty=True) for x in (a, b)]
        found = pair_features(*sides)[0, 1].exp()
        assert float(found) == pytest.approx(2e-4 * float(spread[1:].mean()), rel=1e-2)


@given(n=st.integers(1, 10), dim=st.integers(2, 6), seed=st.integers(0, 20), use=st.booleans())
def test_sides_may_be_exchanged_and_rows_stand_alone(n, dim, seed, use):
    match = MatchProbability(use_uncertainty=use).fit_pairs(*noisy_pairs(300, seed, dim))
    test = noisy_pairs(n, seed + 1, dim)
    p = match.same(test.a, test.b)
    assert p.shape == (n,)
    assert torch.allclose(p, match.same(test.b, test.a), rtol=0, atol=1e-12)
    single = EmbeddingDistribution(test.a.raw_mean[-1:], variance=test.a.variance[-1:])
    other = EmbeddingDistribution(test.b.raw_mean[-1:], variance=test.b.variance[-1:])
    assert torch.allclose(p[-1:], match.same(single, other), rtol=0, atol=1e-12)


def test_uncertainties_beyond_the_range_count_as_its_end():
    match = MatchProbability().fit_pairs(*noisy_pairs(500, 0))
    a, b, _ = noisy_pairs(5, 1)
    out = []
    for factor in (1e4, 1e8, 0.0, 1e-14):
        wide = [EmbeddingDistribution(d.raw_mean, variance=factor * torch.ones_like(d.raw_mean)) for d in (a, b)]
        out.append(match.same(*wide))
    assert torch.allclose(out[0], out[1], rtol=0, atol=1e-6)
    assert torch.allclose(out[2], out[3], rtol=0, atol=1e-6)
    assert bool(torch.stack(out).isfinite().all())


def test_uncertainties_that_are_all_zero_leave_the_cosine():
    train, test = noisy_pairs(300, 0), noisy_pairs(20, 1)
    sure = [EmbeddingDistribution(d.raw_mean, variance=torch.zeros_like(d.raw_mean)) for d in (train.a, train.b)]
    p = MatchProbability().fit_pairs(*sure, train.same).same(test.a, test.b)
    plain = MatchProbability(use_uncertainty=False).fit_pairs(train.a.raw_mean, train.b.raw_mean, train.same)
    assert torch.allclose(p, plain.same(test.a.raw_mean, test.b.raw_mean), rtol=0, atol=1e-6)


@pytest.mark.parametrize("curve", ["logistic", "isotonic"])
@pytest.mark.parametrize("use", [True, False])
def test_saved_and_loaded(use, curve):
    options: dict[str, Any] = {"use_uncertainty": use, "curve": curve}
    pairs = noisy_pairs(300, 0)
    match = MatchProbability(**options).fit_pairs(*pairs)
    file = io.BytesIO()
    torch.save(match.state_dict(), file)
    file.seek(0)
    loaded = MatchProbability(**options)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded.same(pairs.a, pairs.b), match.same(pairs.a, pairs.b))
    assert repr(loaded) == repr(match)
    # Not fitted stays not fitted.
    loaded.load_state_dict(MatchProbability(**options).state_dict())
    refused(lambda: loaded.same(pairs.a, pairs.b), "fit_pairs", kind=NotFittedError)
    for other in ({**options, "use_uncertainty": not use}, {**options, "curve": "?"}):
        with pytest.raises(InputError, match="state_dict"):
            match.load_state_dict({**match.state_dict(), **other})


@each("curve", ["logistic", "isotonic"])
def test_another_share_of_matches(curve):
    """Bayes' rule: where a fiftieth of the pairs match, as many are expected, and the Brier score falls."""
    match, test = MatchProbability(curve=curve).fit_pairs(*noisy_pairs(2000, 0)), noisy_pairs(40_000, 1)
    matches, others = test.same.nonzero()[:400, 0], (~test.same).nonzero()[:19_600, 0]
    rows = torch.cat([matches, others])
    a, b, same = test.a[rows], test.b[rows], test.same[rows].double()
    fitted, moved = match.same(a, b), match.same(a, b, prevalence=0.02)
    share = noisy_pairs(2000, 0).same.double().mean()
    odds = (fitted / (1 - fitted)) * (0.02 / 0.98) / (share / (1 - share))
    torch.testing.assert_close(moved, odds / (1 + odds))
    assert 0.014 < moved.mean() < 0.026  # 0.02, up to the model's own error
    assert fitted.mean() > 0.1
    assert (moved - same).square().mean() < 0.5 * (fitted - same).square().mean()
    unchanged = match.same(a, b, prevalence=float(share))
    torch.testing.assert_close(unchanged, fitted)


@each(
    "key, value",
    [
        ("curve", "logistic"),
        ("use_uncertainty", 1),
        ("version", 3),
        ("pairs.dim", 0),
        ("pairs.shift", [0.0] * 4),
        ("pairs.shift", torch.zeros(4)),
        ("pairs.weight", torch.ones(4, dtype=DOUBLE)),
        ("pairs.bias", torch.tensor(math.nan, dtype=DOUBLE)),
        ("pairs.levels", torch.tensor([0.5], dtype=DOUBLE)),
        ("pairs.knots", torch.zeros(0, dtype=DOUBLE)),
    ],
)
def test_malformed_states_are_refused_and_change_nothing(key, value):
    match, test = MatchProbability(curve="isotonic").fit_pairs(*noisy_pairs(100, 3)), noisy_pairs(5, 4)
    p, state = match.same(test.a, test.b), match.state_dict()
    without = {name: part for name, part in state.items() if name != "pairs.shift"}
    unsealed = state | {"pairs.dim": 1}
    for wrong in (sealed(state | {key: value}), sealed(without), unsealed, without, []):
        with pytest.raises(InputError, match="state_dict"):
            match.load_state_dict(wrong)
    assert torch.equal(match.same(test.a, test.b), p)


@each("dtype", [torch.float16, torch.float32, DOUBLE])
def test_dtypes_and_kinds_of_distributions(dtype, device):
    train, test = noisy_pairs(300, 0), noisy_pairs(20, 1)
    match = MatchProbability().fit_pairs(*train)
    p = match.same(test.a, test.b)
    moved = [
        EmbeddingDistribution(d.raw_mean.to(device, dtype), variance=d.variance.to(device, dtype)) for d in test[:2]
    ]
    out = match.same(*moved)
    assert out.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert out.device.type == device
    assert torch.allclose(out.cpu().double(), p, rtol=0, atol=0.02 if dtype == torch.float16 else 1e-4)
    dense = [EmbeddingDistribution(d.raw_mean, covariance=torch.diag_embed(d.variance)) for d in test[:2]]
    assert torch.allclose(match.same(*dense), p, rtol=0, atol=1e-9)
    samples = [EmbeddingDistribution.from_samples(d.raw_samples(500, generator(0))) for d in test[:2]]
    assert bool(match.same(*samples).isfinite().all())


A, B, SAME = noisy_pairs(40, 0)
SMALL = EmbeddingDistribution(torch.ones(40, 3), variance=torch.ones(40, 3))


@each(
    "change, words",
    [
        ({"same": torch.ones(40, dtype=torch.bool)}, "same: expected at least 10 .* got 40 and 0"),
        ({"same": SAME[:39]}, r"same: expected shape \(40,\)"),
        ({"same": SAME.double()}, "same"),
        ({"same": torch.arange(40)}, "labels_a == labels_b"),
        ({"same": SAME.tolist()}, "same"),
        ({"same": ~SAME}, "does not tell the two kinds apart"),
        ({"b": B.raw_mean}, "use_uncertainty=False"),
        ({"b": SMALL}, "D = 8"),
        ({"b": None}, "b: expected"),
        ({"a": noisy_pairs(39, 0).a}, "39 embeddings"),
    ],
)
def test_pairs_refused(change, words):
    with pytest.raises(InputError, match=words):
        MatchProbability().fit_pairs(**({"a": A, "b": B, "same": SAME} | change))


def test_options_and_use_refused(monkeypatch):
    match = MatchProbability()
    for options in ({"use_uncertainty": 1}, {"curve": "platt"}, {"curve": None}):
        refused(partial(MatchProbability, **options), *options)
    refused(lambda: match.same(A, B), "fit_pairs", kind=NotFittedError)
    match.fit_pairs(A, B, SAME)
    refused(lambda: match.same(SMALL, SMALL), "D = 8, that of the fit")
    refused(lambda: match.same(A, B, prevalence=1.0), "prevalence")
    plain, broken = MatchProbability(use_uncertainty=False), B.raw_mean.clone()
    broken[3, 0] = math.nan
    refused(lambda: plain.fit_pairs(A.raw_mean, broken, SAME), "b: expected finite")
    monkeypatch.setattr(EmbeddingDistribution, "uncertainty", property(lambda self: self.raw_mean[:, 0] * math.nan))
    refused(lambda: MatchProbability().fit_pairs(A, B, SAME), "a: expected finite uncertainties")

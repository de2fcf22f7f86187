"""Distributions of embeddings as containers: rows, concatenation, dtype, covariances kept as their parts."""

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import covering, each, refused
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.embedding.known import components
from contrastive_curvature.embedding.spread import Axes, DenseSpread
from contrastive_curvature.fit.class_centres import ClassCentres

pytestmark = pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")

N, D = 5, 3
KINDS = ("variance", "covariance", "axes", "joint", "samples")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(kind: str, device: str, n: int = N, seed: int = 0) -> cc.EmbeddingDistribution:
    mean, root = draw(n, D, seed=seed).to(device), draw(n, D, D, seed=seed + 1).to(device)
    if kind == "variance":
        return cc.EmbeddingDistribution(mean, variance=root[:, 0].square(), typical_norm=2.0)
    if kind == "covariance":
        return cc.EmbeddingDistribution(mean, covariance=root @ root.mT)
    if kind == "joint":
        root = draw(n * D, n * D, seed=seed + 1).to(device)
        return cc.EmbeddingDistribution(mean, joint_covariance=root @ root.mT)
    if kind == "samples":
        return cc.EmbeddingDistribution.from_samples(draw(7, n, D, seed=seed).to(device)).relative_to(2.0)
    axes = torch.linalg.qr(draw(D, D, seed=9).to(device)).Q
    common = torch.eye(D, dtype=torch.float64, device=device)
    parts = Axes(axes, root[:, 0].square(), common, torch.float64)
    return cc.EmbeddingDistribution.trusted(mean, parts).relative_to(1.5)


def answers(found: cc.EmbeddingDistribution) -> dict[str, Tensor]:
    names = ("raw_mean", "mu", "kappa", "uncertainty", "tangential_variance", "variance", "covariance")
    return {name: getattr(found, name) for name in names}


def check(found: cc.EmbeddingDistribution, truth: dict[str, Tensor], rows: Any = slice(None)) -> None:
    for name, value in answers(found).items():
        # Products of matrices may round in another order in a batch of another size.
        torch.testing.assert_close(value, truth[name][rows], rtol=1e-12, atol=1e-14)


INDICES: list[Any] = [
    slice(1, 4),
    slice(None, None, -2),
    slice(4, 2),
    [0, -1, 0],
    [True, False, True, True, False],
    [],
    torch.tensor([4, 4, 1]),
    torch.tensor([False, True, True, False, False]),
    np.array([2, 0]),
    range(1, 3),
]


def plain(rows: Any) -> Any:
    """The index as numpy takes it."""
    return rows.numpy() if isinstance(rows, Tensor) else np.array(rows, dtype=int) if len(rows) == 0 else rows


@covering(1, rows=INDICES, kind=KINDS)
def test_rows_answer_what_the_whole_answers_for_them(kind: str, rows: Any, device: str) -> None:
    whole = build(kind, device)
    index = torch.as_tensor(np.arange(N)[rows if isinstance(rows, slice) else plain(rows)].copy(), device=device)
    found = whole[rows]
    assert type(found) is type(whole)
    assert len(found) == len(index)
    check(found, answers(whole), index)
    if kind == "samples":
        assert torch.equal(found.raw_samples(7), whole.raw_samples(7)[:, index])
    if kind == "joint":
        blocks = whole.joint_covariance.view(N, D, N, D)
        expected = blocks[index][:, :, index].reshape(len(index) * D, len(index) * D)
        assert torch.equal(found.joint_covariance, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_is_a_distribution(kind: str, device: str) -> None:
    whole = build(kind, device)
    assert len(whole) == N
    for number, row in ((3, 3), (-1, 4), (np.int64(2), 2), (torch.tensor(1), 1)):
        found = whole[number]
        check(found, answers(whole), slice(row, row + 1))
    torch.testing.assert_close(whole[2].kappa, whole.kappa[2:3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "joint"])
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_concatenation_answers_what_its_parts_answer(kind: str, device: str, sizes: list[int], seed: int) -> None:
    parts = [build(kind, device, n, seed + 10 * i) for i, n in enumerate(sizes)]
    found = cc.EmbeddingDistribution.cat(parts)
    assert type(found) is type(parts[0])
    assert len(found) == sum(sizes)
    check(found, {name: torch.cat([answers(part)[name] for part in parts]) for name in answers(parts[0])})
    # The axes are shared, so no dense covariance was made for them.
    assert isinstance(found.spread, Axes) == (kind == "axes")
    if kind == "samples":
        assert torch.equal(found.raw_samples(7), torch.cat([part.raw_samples(7) for part in parts], 1))


def test_other_axes_are_concatenated_as_covariances(device: str) -> None:
    parts = [build("axes", device), build("covariance", device).relative_to(1.5)]
    for pair in (parts, parts[::-1]):
        found = cc.EmbeddingDistribution.cat(pair)
        assert torch.equal(found.covariance, torch.cat([part.covariance for part in pair]))
        truth = torch.cat([part.uncertainty for part in pair])
        torch.testing.assert_close(found.uncertainty, truth, rtol=1e-12, atol=0)


@each("kind", KINDS)
def test_another_dtype_and_the_cpu(kind: str, device: str) -> None:
    whole = build(kind, device)
    single = whole.to(torch.float32)
    assert single.raw_mean.dtype == single.covariance.dtype == single.mu.dtype == single.kappa.dtype == torch.float32
    for name, value in answers(single).items():
        torch.testing.assert_close(value.double(), answers(whole)[name], rtol=2e-5, atol=1e-5)
    assert whole.raw_mean.dtype == torch.float64
    there = whole.cpu()
    assert {value.device.type for value in answers(there).values()} == {"cpu"}
    check(there.to(device), answers(whole))
    check(single.to(device, dtype=torch.float64).to(torch.float32), answers(single))


@each(
    "rows, kind, words",
    [
        (5, IndexError, "size 5"),
        (-6, IndexError, "-6"),
        ([0, 9], IndexError, "9"),
        ([True, False], cc.InputError, "5 booleans"),
        (1.0, TypeError, "1.0"),
        (True, cc.InputError, "5 booleans"),
        ((0, 1), TypeError, "(0, 1)"),
        (torch.ones(2), TypeError, "integers or booleans"),
        (torch.zeros(2, 2).long(), TypeError, "integers or booleans"),
        ([0.5], TypeError, "0.5"),
    ],
)
def test_wrong_indices(rows: Any, kind: type[Exception], words: str, device: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        build("variance", device)[rows]


def test_parts_that_do_not_fit_are_refused(device: str) -> None:
    one = build("variance", device)
    wide = cc.EmbeddingDistribution(draw(2, 4).to(device), variance=draw(2, 4).square().to(device), typical_norm=2.0)
    for others, words in (
        ([build("covariance", device)], "kind of spread"),
        ([wide], "dimension"),
        ([one.to(torch.float32)], "dtype"),
        ([one[:0], one[:1].relative_to(3.0)], "typical_norm"),
        ([3], "list of EmbeddingDistributions"),
    ):
        with pytest.raises(cc.InputError, match=words):
            cc.EmbeddingDistribution.cat([one, *others])
    for bad in ([], one, draw(2, 3)):
        with pytest.raises(cc.InputError, match="list of EmbeddingDistributions"):
            cc.EmbeddingDistribution.cat(bad)
    joint = [build("joint", device)] * 2
    refused(lambda: cc.EmbeddingDistribution.cat(joint), "joint=True", kind=cc.UnsupportedError)
    centres = [ClassCentres.of(draw(4, D, seed=seed).to(device), torch.arange(4, device=device) % 2) for seed in (0, 1)]
    compared = [build("variance", device).relative_to(2.0, made) for made in centres]
    assert len(cc.EmbeddingDistribution.cat([compared[0], compared[0]])) == 2 * N
    for pair in (compared, [one, compared[0]]):
        with pytest.raises(cc.InputError, match="class centres"):
            cc.EmbeddingDistribution.cat(pair)
    samples = build("samples", device)
    fewer = cc.EmbeddingDistribution.from_samples(samples.raw_samples(6)).relative_to(2.0)
    refused(lambda: cc.EmbeddingDistribution.cat([samples, fewer]), "7 samples")
    for dtype in (torch.int64, "float16"):
        with pytest.raises(cc.InputError, match=r"dtype: .*floating-point"):
            one.to(dtype=dtype)
    assert one.to(torch.device(device)).raw_mean.device.type == torch.device(device).type


@covering(1, dtype=[torch.float16, torch.bfloat16], kind=KINDS)
def test_samples_in_half_precision(kind: str, dtype: torch.dtype, device: str) -> None:
    """They are those of the rounded mean and spread in float32, rounded."""
    half = build(kind, device).to(dtype)
    single = half.to(torch.float32)
    if kind == "axes":
        # Axes are put together before they are rounded.
        single = cc.EmbeddingDistribution.trusted(half.raw_mean.float(), DenseSpread(half.covariance.float()))
    found, truth = (one.raw_samples(6, torch.Generator(device).manual_seed(0)) for one in (half, single))
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), truth, rtol=eps, atol=1e-6)
    directions = half.sample(6, torch.Generator(device).manual_seed(0))
    torch.testing.assert_close(directions.float().norm(dim=2), torch.ones(6, N, device=device), rtol=4 * eps, atol=0)


def parts(n: int, dim: int, common: bool, size: float = 1.0, device: str = "cpu") -> Axes:
    like = {"dtype": torch.float64, "device": device}
    axes = torch.linalg.qr(torch.randn(dim, dim, **like))[0]
    root = torch.randn(dim, dim, **like)
    values, shared = size * torch.rand(n, dim, **like), size * root @ root.T if common else None
    return Axes(axes, values, shared, torch.float64)


def by_hand(made: Axes) -> Tensor:
    wide = torch.stack([made.axes @ v.diag() @ made.axes.T for v in made.values.unbind()] or [made.axes[:0, :0]])
    wide = wide if len(made.values) else made.values.new_zeros(0, *made.axes.shape)
    return wide if made.common is None else wide + made.common


@given(n=st.integers(0, 5), dim=st.integers(2, 7), common=st.booleans(), size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_every_figure_is_that_of_the_dense_covariances(device, n, dim, common, size) -> None:
    made = parts(n, dim, common, size, device)
    z = torch.randn(n, dim, dtype=torch.float64, device=device)
    out = cc.EmbeddingDistribution.trusted(z, made).relative_to(2.0)
    truth = cc.EmbeddingDistribution.trusted(z, DenseSpread(by_hand(made))).relative_to(2.0)
    for name in ("variance", "tangential_variance", "uncertainty", "kappa", "mu", "covariance"):
        torch.testing.assert_close(getattr(out, name), getattr(truth, name), rtol=1e-9, atol=1e-12 * size)
    norm = z.norm(dim=1)
    u = z / norm.unsqueeze(1)
    tangential = torch.eye(dim, dtype=z.dtype, device=device) - u.unsqueeze(2) * u.unsqueeze(1)
    across = (tangential @ by_hand(made)).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(out.tangential_variance * norm.square(), across, rtol=1e-9, atol=1e-12 * size)
    torch.testing.assert_close(components(out), components(truth), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(copy.deepcopy(out).covariance, truth.covariance)


def test_no_dense_covariance_is_made_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    out = cc.EmbeddingDistribution.trusted(torch.randn(5, 3).double(), parts(5, 3, True)).relative_to(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Axes, "covariance", property(lambda _: pytest.fail("made")))
        assert out.uncertainty.shape == out.kappa.shape == (5,)
        assert components(out).shape == (5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("common", [False, True])
def test_components_are_finite_at_every_extreme(dtype: torch.dtype, common: bool) -> None:
    most, least = min(torch.finfo(dtype).max, 1e150), max(torch.finfo(dtype).tiny, 1e-150)
    for size in (0.0, least, most / 8):
        values = torch.full((2, 3), size, dtype=dtype)
        made = Axes(torch.eye(3).double(), values, values[0].diag().double() if common else None, dtype)
        for length in (0.0, least, most / 4):
            z = torch.full((2, 3), length, dtype=dtype)
            assert components(cc.EmbeddingDistribution.trusted(z, made)).isfinite().all()


def test_overflow_is_refused_where_an_entry_overflows() -> None:
    most = torch.finfo(torch.float32).max
    z = torch.ones(1, 3)
    fine = Axes(torch.eye(3).double(), torch.full((1, 3), 0.9 * most), None, torch.float32)
    assert cc.EmbeddingDistribution.trusted(z, fine).covariance.isfinite().all()
    for bad in (torch.full((1, 3), torch.inf), torch.tensor([[1.0, torch.nan, 1.0]])):
        with pytest.raises(cc.InputError, match=r"covariance.*finite numbers"):
            cc.EmbeddingDistribution.trusted(z, Axes(torch.eye(3).double(), bad, None, torch.float32))

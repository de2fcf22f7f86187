"""Inputs without a finite output: refused with their rows, or rows of NaN that change nothing else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc

pytestmark = pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")

N, F, D = 8, 4, 3
NAMES = ("raw_mean", "mu", "kappa", "uncertainty", "tangential_variance", "variance", "covariance")


def inputs(device: str, n: int = N) -> Tensor:
    return torch.randn(n, F, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)


def fitted(device: str, weights: str = "last_layer", structure: str = "kron_lowrank", **options: Any) -> Any:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(F, 6), nn.Tanh(), nn.Linear(6, D, bias=False)).double().to(device)
    la: Any = Laplace(encoder, "contrastive", weights, structure, **options)
    x = torch.randn(20, F, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device)
    la.fit([(x, (torch.arange(20) % 2).to(device))])
    la.optimize_prior_precision()
    la.calibrate([inputs(device, 30)])
    return la


@pytest.fixture(scope="module")
def last_layer() -> Callable[[str], Any]:
    made: dict[str, Any] = {}
    return lambda device: made.setdefault(device, fitted(device))


def check(found: cc.EmbeddingDistribution, truth: cc.EmbeddingDistribution | None, bad: list[int]) -> None:
    """``found`` is ``truth`` in its rows, exactly, and NaN in the others."""
    good = [row for row in range(len(found)) if row not in bad]
    for name in (*NAMES, *(("novelty", "p_value") if found[good]._compared is not None or not good else ())):
        value = getattr(found, name)
        assert bool(value[bad].isnan().all()), name
        if truth is not None:
            assert torch.equal(value[good], getattr(truth, name)), name


@given(bad=st.lists(st.integers(0, N - 1), min_size=1, unique=True), number=st.sampled_from([torch.nan, torch.inf]))
def test_bad_rows_are_nan_and_the_others_as_without_them(
    last_layer: Callable[[str], Any], device: str, bad: list[int], number: float
) -> None:
    la, x = last_layer(device), inputs(device)
    good = [row for row in range(N) if row not in bad]
    spoilt = x.clone()
    # Tanh maps infinities to finite numbers, but the sum of two of different signs is none.
    spoilt[bad] = number * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=x.dtype, device=device)
    found = la(spoilt, on_invalid="nan")
    assert len(found) == N
    check(found, la(x[good]) if good else None, bad)
    assert not bool(found.is_known(0.3)[bad].any())
    if good:
        assert torch.equal(found.is_known(0.3)[good], la(x[good]).is_known(0.3))
    with pytest.raises(cc.InputError, match=rf"x: .*rows {sorted(bad)[:5]}".replace("[", r"\[")):
        la(spoilt)


@pytest.mark.parametrize(
    ("weights", "structure", "options"),
    [
        ("last_layer", "full", {"pred_type": "nn", "n_samples": 5}),
        ("last_layer", "kron", {"joint": True}),
        ("all", "kron", {"diagonal_output": True}),
        ("all", "kron", {"joint": True}),
    ],
)
def test_every_prediction_has_rows_of_nan(weights: str, structure: str, options: dict[str, Any], device: str) -> None:
    la, x, bad = fitted(device, weights, structure), inputs(device), [0, 3]
    good = [row for row in range(N) if row not in bad]
    spoilt = x.clone()
    spoilt[bad, 1] = torch.nan
    torch.manual_seed(5)
    found = la(spoilt, on_invalid="nan", **options)
    torch.manual_seed(5)
    truth = la(x[good], **options)
    check(found, truth, bad)
    drawn = found.sample(4, torch.Generator(device).manual_seed(0))
    assert bool(drawn[:, bad].isnan().all())
    assert torch.equal(drawn[:, good], truth.sample(4, torch.Generator(device).manual_seed(0)))
    if "joint" in options:
        blocks = found.joint_covariance.view(N, D, N, D)
        assert torch.equal(blocks[good][:, :, good].reshape_as(truth.joint_covariance), truth.joint_covariance)
        assert bool(blocks[bad].isnan().all())
        assert bool(blocks[:, :, bad].isnan().all())


def test_rows_of_nan_are_containers_too(last_layer: Callable[[str], Any], device: str) -> None:
    la, x = last_layer(device), inputs(device)
    x[[1, 4]] = torch.nan
    found = la(x, on_invalid="nan")
    whole = cc.EmbeddingDistribution.cat([la(part, on_invalid="nan") for part in (x[:1], x[1:2], x[2:])])
    torch.testing.assert_close(whole.kappa, found.kappa, equal_nan=True, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole.p_value, found.p_value, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(found[[3, 0]].mu, found.mu[[3, 0]])
    assert bool(cc.EmbeddingDistribution.cat([found[1], found[4]]).p_value.isnan().all())
    torch.testing.assert_close(found.to(torch.float32).cpu().mu, found.mu.float().cpu(), equal_nan=True)
    with pytest.raises(cc.InputError):
        cc.similarity(found, found)


def test_rows_of_nan_are_compared_with_another_norm(last_layer: Callable[[str], Any], device: str) -> None:
    la, x, good = last_layer(device), inputs(device), [0, 2, 3, 5, 6, 7]
    x[[1, 4]] = torch.nan
    found = la(x, on_invalid="nan")
    before = found.uncertainty
    other = copy.copy(found).relative_to(3 * la.typical_norm)
    truth = la(x[good]).relative_to(3 * la.typical_norm).uncertainty
    assert torch.equal(other.uncertainty[good], truth)
    assert torch.equal(other[good].to(torch.float64).uncertainty, truth)
    torch.testing.assert_close(found.uncertainty, before, rtol=0, atol=0, equal_nan=True)


ASKED = (*NAMES, "joint_covariance", "novelty", "p_value")


@each("options", [{}, {"joint": True}, {"diagonal_output": True}, {"pred_type": "nn", "n_samples": 3}])
def test_no_good_row_answers_and_refuses_as_one(options: dict[str, Any], device: str) -> None:
    la, x = fitted(device, "all", "kron"), inputs(device)[:3]
    x[1:] = torch.nan
    one, none = (la(rows, on_invalid="nan", **options) for rows in (x, x[1:]))

    def answer(found: cc.EmbeddingDistribution, name: str) -> Any:
        try:
            value = getattr(found, name)
        except cc.UnsupportedError as error:
            return str(error)
        return value.ndim, value.dtype, value.device

    for name in ASKED:
        assert answer(one, name) == answer(none, name), name
        if not isinstance(answer(none, name), str):
            assert bool(getattr(none, name).isnan().all()), name
    assert none.sample(2).shape == (2, 2, D)
    assert bool(none.raw_samples(2).isnan().all())


def test_batches_and_rows_of_the_loaders_are_named(device: str, tmp_path: Any) -> None:
    la, x = fitted(device), inputs(device)
    spoilt = x.clone()
    spoilt[6] = torch.nan
    labels = (torch.arange(N) % 2).to(device)
    batches = [(x, labels), (spoilt, labels)]

    for use in (
        lambda: la.calibrate([x, spoilt]),
        lambda: la.fit(batches),
        lambda: Laplace(la.model.model, "contrastive", backend_kwargs={"pairs": "batch"}).fit(batches),
        lambda: Laplace(la.model.model, "contrastive", backend_kwargs={"loss": cc.SupConLoss(0.1)}).fit(batches),
    ):
        with pytest.raises(cc.InputError, match=r"(?s)batch 1 .*rows \[6\]"):
            use()

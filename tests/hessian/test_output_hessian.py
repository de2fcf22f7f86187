"""The output Hessian against autograd, and the properties it promises."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, cases, close

import contrastive_curvature as cc
from contrastive_curvature.testing import dense_output_hessian

pytestmark = pytest.mark.parametrize("device", DEVICES)


def hessian(case: Case) -> cc.OutputHessian:
    return cc.output_hessian(case.z, **case.all)


def scale(case: Case) -> float:
    """Size of the terms that may cancel: the weights over the smallest squared norm."""
    found = hessian(case)
    weights = found.derivatives.dense()[0].abs().sum()
    return float(weights / found.n.min() ** 2)


@given(case=cases())
def test_equals_autograd_for_every_distance_fix_and_pair_set(case: Case, device: str) -> None:
    truth = dense_output_hessian(case.z, **case.all).to(device)
    found = hessian(case.to(device))
    # Exact up to rounding: the truth may itself be a cancellation, so errors are relative to what cancels.
    assert close(found.dense(), truth, 1e-3 * scale(case))
    assert close(found.diagonal().flatten(), truth.diagonal(), 1e-3 * scale(case))


@given(case=cases())
def test_full_arccos_is_the_hessian_of_the_loss(case: Case, device: str) -> None:
    case = case.to(device)
    case.options.update(distance="arccos", pd_fix="full")
    loss = cc.ContrastiveLoss(*(case.options[k] for k in ("margin", "negative_weight", "normalization")))
    truth = torch.autograd.functional.hessian(lambda z: loss(z, **case.given), case.z)
    assert close(hessian(case).dense(), truth.reshape(case.z.numel(), -1), 1e-3 * scale(case))


@given(case=cases(), columns=st.integers(1, 3), seed=st.integers(0, 99))
def test_products_blocks_and_diagonal_agree_with_dense(case: Case, columns: int, seed: int, device: str) -> None:
    found = hessian(case.to(device))
    dense, (n, dim) = found.dense(), case.z.shape
    v = torch.randn(n, dim, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    size = 10 * scale(case)
    assert close(found.matvec(v).reshape(n * dim, columns), dense @ v.reshape(n * dim, columns), size, 1e-13)
    assert close(found.matvec(v[..., 0]), found.matvec(v)[..., 0], size, 1e-13)
    blocks = torch.stack([dense[i * dim : (i + 1) * dim, i * dim : (i + 1) * dim] for i in range(n)])
    assert close(found.point_blocks(), blocks, size, 1e-14)


@given(case=cases())
def test_factor_exists_exactly_where_the_hessian_is_psd(case: Case, device: str) -> None:
    found = hessian(case.to(device))
    dense = found.dense()
    low = float(torch.linalg.eigvalsh(dense).min()) if dense.numel() else 0.0
    if low < -1e-9 * scale(case):
        assert not found.is_psd()
        with pytest.raises(cc.UnsupportedError, match="psd"):
            found.factor()
        return
    if not found.is_psd():
        assert low > -1e-9 * scale(case)
        return
    s = found.factor()
    if found.coupled:
        flat = s.reshape(dense.shape[0], -1)
        assert close(flat @ flat.T, dense, scale(case))
    else:
        assert close(s @ s.mT, found.point_blocks(), scale(case))


@given(case=cases())
def test_promised_psd(case: Case, device: str) -> None:
    """psd always; positive with euclidean; fixed with euclidean and anchor weights of balanced classes."""
    options = case.options
    promised = options["pd_fix"] == "psd" or (options["pd_fix"] == "positive" and options["distance"] == "euclidean")
    found = hessian(case.to(device))
    if promised:
        assert float(torch.linalg.eigvalsh(found.dense()).min()) >= -1e-13 * scale(case)
        assert found.is_psd()


def test_fixed_euclidean_may_be_indefinite_with_global_normalisation(device: str) -> None:
    """Proposition F.3 needs Eq. 119: with Eq. 23 and unbalanced classes a degree turns negative."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.15]], dtype=torch.float64, device=device)
    labels = torch.tensor([0, 0, 0, 0, 1], device=device)
    found = cc.output_hessian(z, labels, distance="euclidean", normalization="type", margin=None)
    assert float(found.derivatives.node_sums().degree.min()) < 0
    assert not found.is_psd()
    assert cc.output_hessian(z, labels, distance="euclidean", normalization="type", margin=None, pd_fix="psd").is_psd()


@given(case=cases(), seed=st.integers(0, 99))
def test_order_of_points_does_not_matter(case: Case, seed: int, device: str) -> None:
    n, dim = case.z.shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    where = order.argsort()
    pairs, labels = case.pairs, case.labels
    if isinstance(pairs, tuple):
        pairs = tuple(m[order][:, order] if m.dtype == torch.bool else where[m] for m in pairs)
    if labels is not None:
        labels = labels[order]
    moved = hessian(Case(case.z[order], labels, pairs, case.options).to(device)).dense().view(n, dim, n, dim)
    assert close(moved[where][:, :, where], hessian(case.to(device)).dense().view(n, dim, n, dim), scale(case), 1e-13)


@given(case=cases(), seed=st.integers(0, 99))
def test_order_and_repetition_of_listed_pairs(case: Case, seed: int, device: str) -> None:
    """Pairs have no order, and listing every pair twice doubles the sum and leaves the means alone."""
    if not isinstance(case.pairs, tuple) or case.pairs[0].dtype == torch.bool:
        return
    order = torch.randperm(case.pairs[0].numel(), generator=torch.Generator().manual_seed(seed))
    truth = hessian(case.to(device)).dense()
    shuffled = tuple(t[order] for t in case.pairs)
    assert close(hessian(Case(case.z, None, shuffled, case.options).to(device)).dense(), truth, scale(case), 1e-13)
    twice = tuple(torch.cat([t, t]) for t in case.pairs)
    factor = 2 if case.options["normalization"] == "sum" else 1
    doubled = hessian(Case(case.z, None, twice, case.options).to(device)).dense()
    assert close(doubled, factor * truth, scale(case), 1e-13)


@given(case=cases(), factor=st.sampled_from((0.01, 3.0, 100.0)))
def test_scales_with_the_inverse_square_of_the_norm(case: Case, factor: float, device: str) -> None:
    truth = hessian(case.to(device)).dense()
    scaled = hessian(Case(factor * case.z, case.labels, case.pairs, case.options).to(device)).dense()
    assert close(factor**2 * scaled, truth, scale(case), 1e-12)


@given(case=cases())
def test_half_precision_is_computed_in_float32(case: Case, device: str) -> None:
    case = case.to(device)
    z = case.z.half()
    found = cc.output_hessian(z, **case.all)
    assert found.z.dtype == torch.float32
    assert torch.equal(found.dense(), cc.output_hessian(z.float(), **case.all).dense())


def test_psd_equals_fixed_at_a_stationary_point(device: str) -> None:
    """Where the loss pulls no point along the sphere, arccos blocks are a P / n^2, and here a >= 0."""
    labels = torch.tensor([0, 0, 1, 1], device=device)
    z = torch.tensor([[2.0, 0, 0], [1, 0, 0], [0, 3, 0], [0, 1, 0]], dtype=torch.float64, device=device)
    fixed, psd = (cc.output_hessian(z, labels, pd_fix=fix).dense() for fix in ("fixed", "psd"))
    assert torch.equal(fixed, psd)
    assert float(fixed.abs().max()) > 0

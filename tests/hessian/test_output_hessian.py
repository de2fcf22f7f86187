"""Output Hessians: factors, half precision, collapsed embeddings, no points, weights that vanish, parts of the pairs.

They are compared with autograd in tests/losses.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, cases, close
from tables import covering, refused
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses import Terms


@covering(2, dtype=[torch.float32, torch.float64], kind=["same", "opposite", "close"], seed=range(4))
def test_signed_factors_of_points_without_a_tangent(kind: str, dtype: torch.dtype, seed: int, device: str) -> None:
    # What is left of the tangent is rounding, along the embedding itself: a basis with both would be none.
    z = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    z = {"same": z[:1].expand(6, 3), "opposite": torch.cat([z, -z]), "close": torch.cat([z, z * (1 + 1e-6)])}[kind]
    for labels in (torch.zeros(len(z)).long(), torch.arange(len(z)), torch.arange(len(z)) % 2):
        found = cc.output_hessian(z, labels.to(device))
        factor = found.signed_factor()
        rebuilt = torch.einsum("cnd,cn,cne->nde", factor.columns, factor.signs, factor.columns)
        blocks = found.point_blocks()
        assert float((rebuilt - blocks).abs().max()) <= 64 * torch.finfo(dtype).eps * float(blocks.abs().max())


@covering(1, fix=["fixed", "psd", "full", "positive"], loss=[cc.ContrastiveLoss, cc.LogisticLoss])
def test_products_of_no_points(loss: type[cc.PairLoss], fix: str, device: str) -> None:
    z = torch.zeros(0, 3, device=device)
    found = cc.output_hessian(z, torch.zeros(0, dtype=torch.int64, device=device), loss=loss(pd_fix=fix))
    assert found.matvec(z).shape == (0, 3)
    assert found.matvec(z.unsqueeze(2)).shape == (0, 3, 1)


def test_weights_that_vanish_are_not_the_fault_of_the_norms(device: str) -> None:
    # exp(-95) is below the normal numbers of float32, at norms of one.
    z = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.3]], device=device)
    loss = cc.LogisticLoss(1.0, 94.0)
    found = cc.output_hessian(z, torch.zeros(3, dtype=torch.int64, device=device), loss=loss).dense()
    assert float(found.abs().max()) < torch.finfo(torch.float32).tiny * 8


class SecondOrder(cc.PairLoss):
    """``50 (s - 1/2)^2``: at the cosine 1/2 there is a second derivative, and no first one."""

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        return 50 * ((attract + repel) * (cosine - 0.5) ** 2).sum()

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        return Terms(100 * (attract + repel) * (cosine - 0.5), 100 * (attract + repel).expand_as(cosine))


def test_a_second_order_part_that_overflows_is_refused(device: str) -> None:
    angle = torch.tensor([0.0, torch.pi / 3], dtype=torch.float64)
    z = torch.stack([angle.cos(), angle.sin()], dim=1).to(device, torch.float32)
    labels, loss = torch.zeros(2, dtype=torch.int64, device=device), SecondOrder(normalization="sum")
    assert loss.output_hessian(1e-17 * z, labels).dense().isfinite().all()
    with pytest.raises(UnrepresentableError, match="norms"):
        loss.output_hessian(1.5e-19 * z, labels)


@given(case=cases(), loss=st.sampled_from((cc.ContrastiveLoss, cc.LogisticLoss)), data=st.data())
def test_parts_of_the_derivatives(case: Case, loss: type[cc.PairLoss], data: st.DataObject, device: str) -> None:
    n = len(case.z)
    moved = case.to(device)
    hessian = cc.output_hessian(moved.z, **moved.given, loss=loss(pd_fix="full"))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for _ in range(2)]
    rows, columns = (slice(*end) for end in ends)
    whole = hessian.derivatives.dense()
    found = hessian.derivatives.rows(rows.start, rows.stop, columns)
    for part, all_pairs in zip(found, whole, strict=True):
        assert (part is None) == (all_pairs is None)
        if part is not None:
            torch.testing.assert_close(part, all_pairs[rows, columns], rtol=1e-12, atol=1e-14)


def scale(found: cc.OutputHessian) -> float:
    """Size of the terms that may cancel: the weights over the smallest squared norm."""
    return float(found.derivatives.dense()[0].abs().sum() / found.n.min() ** 2)


@given(case=cases())
def test_factor_exists_exactly_where_the_hessian_is_psd(case: Case, device: str) -> None:
    """With psd always; with positive and euclidean too."""
    found = cc.output_hessian(case.to(device).z, **case.to(device).all)
    dense, options = found.dense(), case.options
    low = float(torch.linalg.eigvalsh(dense).min())
    if options["pd_fix"] == "psd" or (options["pd_fix"] == "positive" and options["distance"] == "euclidean"):
        assert found.is_psd()
        assert low >= -1e-13 * scale(found)
    if not found.is_psd():
        refused(lambda: found.factor(), "psd", kind=cc.UnsupportedError)
        return
    assert low >= -1e-9 * scale(found)
    s = found.factor()
    if found.coupled:
        flat = s.reshape(dense.shape[0], -1)
        assert close(flat @ flat.T, dense, scale(found))
    else:
        assert close(s @ s.mT, found.point_blocks(), scale(found))


@given(case=cases())
def test_half_precision_is_computed_in_float32(case: Case, device: str) -> None:
    case = case.to(device)
    z = case.z.half()
    found = cc.output_hessian(z, **case.all)
    assert found.z.dtype == torch.float32
    assert torch.equal(found.dense(), cc.output_hessian(z.float(), **case.all).dense())

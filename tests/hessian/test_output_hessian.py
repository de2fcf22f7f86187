"""Factors of output Hessians, and half precision; they are compared with autograd in tests/losses."""

import pytest
import torch
from hypothesis import given
from strategies import Case, cases, close

import contrastive_curvature as cc


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
        with pytest.raises(cc.UnsupportedError, match="psd"):
            found.factor()
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

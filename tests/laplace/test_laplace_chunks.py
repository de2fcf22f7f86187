"""Predictions with all parameters: Jacobians in chunks, variances alone; no pass over all of them at once."""

from typing import Any

import pytest
import torch
from strategies import close
from tables import covering
from test_laplace import body, data, fitted
from test_laplace_predict import PRIOR, TEMPERATURE, jacobian_of
from test_laplace_predict import posterior as parametric
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace import prediction
from contrastive_curvature.network import pullback

CHUNKED = [
    ("all", "diag"),
    ("all", "kron"),
    ("all", "full"),
    ("all", "lowrank"),
    ("all", "gp"),
    ("subnetwork", "diag"),
    ("subnetwork", "full"),
]
"""Posteriors whose predictions take Jacobians."""


def posterior(weights: str, structure: str, device: str = "cpu") -> tuple[Any, Tensor, Tensor]:
    """A fitted object, its dense precision, and inputs; the Gaussian process stands on all points."""
    if structure != "gp":
        return parametric(weights, structure, device)
    _, precision, x = parametric(weights, "full", device, pd_fix="psd")
    host = {"prior_precision": PRIOR, "temperature": TEMPERATURE, "n_subset": len(x)}
    model = body(cc.L2Norm(), device=device)
    return fitted(model, weights, "gp", *data(device), host=host, pd_fix="psd"), precision, x


MODULES = (prediction, pullback)


@covering(1, elements=[1, 200, 400], weights__structure=CHUNKED)
def test_bounded_chunks_change_nothing(
    weights: str, structure: str, elements: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output of a point, a point, or some points at a time: the body has 51 parameters and 3 outputs."""
    la, precision, x = posterior(weights, structure, device)
    for module in MODULES:
        monkeypatch.setattr(module, "JACOBIAN_ELEMENTS", elements)
    monkeypatch.setattr(prediction, "_POINTS_AT_ONCE", 2)
    jacobian, covariance = jacobian_of(x, weights), torch.linalg.inv(precision)
    truth = jacobian @ covariance @ jacobian.mT
    assert close(la(x).covariance, truth)
    assert close(la(x, diagonal_output=True).variance, truth.diagonal(dim1=1, dim2=2))
    flat = jacobian.flatten(0, 1)
    assert close(la(x, joint=True).joint_covariance, flat @ covariance @ flat.T)


class Counting:
    """A pullback that notes the largest Jacobian it was asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.largest = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        out: Tensor = self.inner.vjp(context, cotangents)
        self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(("structure", "diagonal", "outputs"), [("kron", False, 6), ("kron", True, 1), ("gp", True, 6)])
def test_jacobians_stay_within_the_bound(
    structure: str, diagonal: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two points of three outputs each; of variances alone, one output."""
    la, _, x = posterior("all", structure)
    counting = Counting(la.backend.pullback(x))
    monkeypatch.setattr(la.backend, "pullback", lambda _: counting)
    for module in MODULES:
        monkeypatch.setattr(module, "JACOBIAN_ELEMENTS", outputs * counting.width)
    la(x, diagonal_output=diagonal)
    assert 0 < counting.largest <= outputs * counting.width


def test_a_graph_to_the_prior_precision_is_kept() -> None:
    la, _, x = posterior("all", "kron")
    prior = torch.ones(1, dtype=torch.float64, requires_grad=True)
    la.prior_precision = prior
    (gradient,) = torch.autograd.grad(la(x).variance.sum(), prior)
    step = 1e-5
    ends = []
    for value in (1 + step, 1 - step):
        la.prior_precision = value
        ends.append(float(la(x).variance.sum()))
    # Central differences have an error of step^2.
    assert float(gradient) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("structure", ["diag", "gp"])
def test_a_joint_covariance_that_does_not_fit_is_refused_before_anything_runs(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    la, _, x = posterior("all", structure)
    needed = (len(x) * la.n_outputs) ** 2 + (0 if structure == "gp" else len(x) * la.n_outputs * la.mean.numel())
    monkeypatch.setattr(prediction, "JOINT_ELEMENTS", needed)
    assert la(x, joint=True).joint_covariance.shape == (len(x) * la.n_outputs,) * 2
    monkeypatch.setattr(prediction, "JOINT_ELEMENTS", needed - 1)

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(nn.Linear, "forward", fail)
    with pytest.raises(cc.InputError, match=rf"joint=True: expected .*got {len(x)} inputs, {needed:,} numbers"):
        la(x, joint=True)

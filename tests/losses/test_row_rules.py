"""Losses of anchors that a user wrote: they work everywhere, and wrong rules are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from row_cases import Towers, check_ggn_is_psd, check_hessian, check_products, check_towers, numbers, towers
from strategies import Case, cases, close
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses.rows import RowLoss, RowTerms
from contrastive_curvature.testing import dense_jacobian

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Alignment(RowLoss):
    """The mean of ``(1 - s)^2 / 2`` over the positives of an anchor: single pairs, without roots."""

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (positive > 0).any(1).double()

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return (positive * (1 - cosine) ** 2).sum(1) / (2 * positive.sum(1))

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return positive.sum(1, keepdim=True).clamp(min=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> Any:
        return RowTerms(positive * (cosine - 1) / statistics, positive / statistics)


class MeanNegative(RowLoss):
    """``max(0, mean of the negatives + margin)^2 / 2``: all negatives of an anchor together, a root of sign +1."""

    root_signs = (1,)

    def __init__(self, margin: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.margin = margin

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (negative > 0).any(1).double()

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return ((negative * cosine).sum(1) / negative.sum(1) + self.margin).relu() ** 2 / 2

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        total = negative.sum(1).clamp(min=1)
        return torch.stack([total, (negative * cosine).sum(1) / total + self.margin], dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> Any:
        total, over = statistics.unsqueeze(2).unbind(1)
        share = negative / total
        return RowTerms(over.relu() * share, torch.zeros_like(share), ((over > 0) * share,))


LOSSES: dict[str, Callable[..., RowLoss]] = {"alignment": Alignment, "mean negative": MeanNegative}
kinds = st.sampled_from(tuple(LOSSES))


@given(case=cases(), kind=kinds, reduction=st.sampled_from(("mean", "sum")), seed=st.integers(0, 99))
def test_output_hessian_is_that_of_autograd(case: Case, kind: str, reduction: str, seed: int, device: str) -> None:
    make = LOSSES[kind]
    check_hessian(make(reduction=reduction), case, device, 10.0)
    check_products(make(pd_fix="full"), case, device, 10.0, seed)
    check_ggn_is_psd(make(), case, device, 10.0)


@given(drawn=towers(), kind=kinds)
def test_two_towers(drawn: Towers, kind: str, device: str) -> None:
    check_towers(LOSSES[kind], drawn, device, 10.0)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("fix", ["ggn", "full"])
def test_parameter_curvature(kind: str, fix: str, device: str) -> None:
    """``J^T H J`` with the Hessian of autograd; ``ggn`` with the output Hessian of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, labels = numbers(0, 9, 4), torch.arange(9) % 3
    loss, jacobian, z = LOSSES[kind](pd_fix=fix), dense_jacobian(model, x), model(x).detach()
    hessian = torch.autograd.functional.hessian(lambda z: loss(z, labels), z).reshape(27, 27)
    if fix == "ggn":
        hessian = loss.output_hessian(z, labels).dense()
    truth = jacobian.T @ hessian @ jacobian
    model, x, labels = model.to(device), x.to(device), labels.to(device)
    for structure in ("full", "diag"):
        found = cc.ggn(model, x, labels, loss=loss, pd_fix=fix, structure=structure, clamp=False)
        assert close(torch.as_tensor(found).cpu(), truth if structure == "full" else truth.diagonal())


def test_no_loss_without_its_four_rules(device: str) -> None:
    del device

    class Half(RowLoss):
        def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
            return positive.sum(1)

    with pytest.raises(TypeError, match="_statistics"):
        Half()  # type: ignore[abstract]


WRONG: dict[str, tuple[Callable[[Tensor, RowTerms], Any], str]] = {
    "no tuple": (lambda _, t: t.first, "RowTerms"),
    "no second": (lambda _, t: RowTerms(t.first, None, t.roots), "linear = False"),
    "summed": (lambda _, t: RowTerms(t.first.sum(1), t.second, t.roots), "shape"),
    "second of another shape": (lambda _, t: RowTerms(t.first, t.first[:1], t.roots), "shape"),
    "root of another shape": (lambda _, t: RowTerms(t.first, t.second, (t.roots[0][:, :1],)), "shape"),
    "no root": (lambda _, t: RowTerms(t.first, t.second), "1 roots"),
    "two roots": (lambda _, t: RowTerms(t.first, t.second, t.roots * 2), "1 roots"),
    "NaN": (lambda s, t: RowTerms(t.first + torch.log(-2 - s), t.second, t.roots), "finite"),
    "NaN in the second": (lambda s, t: RowTerms(t.first, torch.log(-2 - s), t.roots), "finite"),
    "NaN in a root": (lambda s, t: RowTerms(t.first, t.second, (torch.log(-2 - s),)), "finite"),
}


# The Gauss-Newton has no use for the first derivatives.
@each(
    "name, fix",
    [
        (name, fix)
        for name in WRONG
        for fix in ("fixed", "psd", "full", "positive", "ggn")
        if (name, fix) != ("NaN", "ggn")
    ],
)
def test_wrong_derivatives_are_named(name: str, fix: str, device: str) -> None:
    change, words = WRONG[name]

    class Wrong(MeanNegative):
        def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> Any:
            return change(cosine, super()._terms(cosine, positive, negative, statistics))

    z, labels = numbers(0, 6, 3).to(device), (torch.arange(6) % 2).to(device)
    with pytest.raises(cc.InputError, match=f"Wrong.*{words}") as caught:
        Wrong(pd_fix=fix).output_hessian(z, labels)
    assert isinstance(caught.value, UnrepresentableError) == name.startswith("NaN")


def test_second_derivatives_of_a_linear_loss(device: str) -> None:
    class Linear(Alignment):
        linear = True

    z, labels = numbers(0, 6, 3).to(device), (torch.arange(6) % 2).to(device)
    with pytest.raises(cc.InputError, match=r"Linear\._terms: expected None as second derivatives, as linear = True"):
        Linear(pd_fix="full").output_hessian(z, labels)
    with pytest.raises(cc.UnsupportedError, match="pd_fix='ggn': Linear is piecewise linear"):
        Linear(pd_fix="ggn")


def test_options_of_a_loss_are_shown(device: str) -> None:
    del device
    shown = repr(MeanNegative(0.25, reduction="sum", directions="a"))
    for text in ("margin=0.25", "reduction='sum'", "directions='a'", "pd_fix='psd_parts'"):
        assert text in shown


@covering(1, rule=["_counts", "_value"], wrong=["a number", "one for all", "a column", "NaN"])
def test_numbers_of_anchors_are_checked(rule: str, wrong: str, device: str) -> None:
    made = {
        "a number": lambda found: float(found.sum()),
        "one for all": lambda found: found.sum(),
        "a column": lambda found: found.unsqueeze(1),
        "NaN": lambda found: found * torch.nan,
    }[wrong]
    right = getattr(Alignment, rule)
    kind = type("Wrong", (Alignment,), {rule: lambda self, *given: made(right(self, *given))})
    z, labels = numbers(0, 6, 3).to(device), (torch.arange(6) % 2).to(device)
    for call in (lambda: kind()(z, labels), lambda: kind().output_hessian(z, labels).loss_and_cost()):
        with pytest.raises((cc.InputError, cc.InputTypeError), match=f"Wrong.{rule}"):
            call()

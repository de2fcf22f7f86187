"""``cc.testing.check_loss``: right losses of a user's own pass, and wrong ones are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from tables import each
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.losses import RowTerms, Terms

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Squared(cc.PairLoss):
    """``(1 - s)^2 / 2`` and ``max(0, s - 1 + margin)^2 / 2``."""

    def __init__(self, margin: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.margin = margin

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        short = (self.margin - (1 - cosine)).relu()
        return (attract * (1 - cosine).square() + repel * short.square()).sum() / 2

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        short = (self.margin - (1 - cosine)).relu()
        return Terms(repel * short - attract * (1 - cosine), attract + repel * (short > 0))


class Cauchy(cc.PairLoss):
    """``log(1 + d)`` and ``-log(d / (1 + d))`` with ``d = 2 - 2 s``, infinite for a negative at itself; not convex."""

    convex = False

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        d = 2 - 2 * cosine
        return (attract * (1 + d).log() + repel * ((1 + d).log() - d.log())).sum()

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        d = 2 - 2 * cosine
        far, near = 1 / (1 + d), 1 / d
        first = -2 * ((attract + repel) * far - repel * near)
        return Terms(first, 4 * (repel * near.square() - (attract + repel) * far.square()))


class Decoupled(cc.RowLoss):
    """``log sum_n exp(s_n / tau) - s_p / tau`` for every positive p."""

    root_signs = (-1,)
    shift_invariant = True

    def __init__(self, temperature: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.temperature = temperature

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return positive.sum(1) * (negative > 0).any(1)

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        log_sum = (cosine / self.temperature + negative.log()).logsumexp(1)
        return positive.sum(1) * log_sum - (positive * cosine).sum(1) / self.temperature

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        log_sum = (cosine / self.temperature + negative.log()).logsumexp(1)
        return torch.stack([log_sum, positive.sum(1)], dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        tau, (log_sum, count) = self.temperature, statistics.unsqueeze(2).unbind(1)
        p = negative * (cosine / tau - log_sum).exp()
        return RowTerms((count * p - positive) / tau, count * p / tau**2, (count.sqrt() * p / tau,))


RIGHT = [Squared(), Squared(1.5, normalization="type"), Decoupled(), Decoupled(0.2, reduction="sum"), cc.LogisticLoss()]


@pytest.mark.parametrize("loss", RIGHT, ids=repr)
def test_right_losses_pass(loss: Any, device: str) -> None:
    cc.testing.check_loss(loss, device)


def spoilt(kind: type[Any], terms: Any = None, **rules: Any) -> Any:
    """A loss with another rule, or other terms made of its own."""
    if terms is not None:
        rules["_terms"] = lambda self, *args: terms(kind._terms(self, *args), *args)
    return type("Mine", (kind,), rules)()


def forgets(self: Any, power: float = 3.0) -> None:
    del power
    Squared.__init__(self)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "first": (spoilt(Squared, lambda t, *_: Terms(-t.first, t.second)), AssertionError, "first derivatives are not"),
    "second": (spoilt(Squared, lambda t, *_: Terms(t.first, 2 * t.second)), AssertionError, "second derivatives are"),
    "row first": (spoilt(Decoupled, lambda t, *_: t._replace(first=2 * t.first)), AssertionError, "first derivatives"),
    "root": (spoilt(Decoupled, root_signs=(1,)), AssertionError, "second derivatives are not those of _value"),
    "columns": (
        spoilt(Decoupled, lambda t, *_: t._replace(first=t.first - t.first.mean(1, keepdim=True))),
        AssertionError,
        "some of the columns",
    ),
    "not invariant": (spoilt(cc.SigLIPLoss, shift_invariant=True), AssertionError, "shift_invariant = True"),
    "a lost option": (spoilt(Squared, __init__=forgets), AssertionError, "keep power as attributes"),
    "no terms": (spoilt(Squared, lambda t, *_: t.first), cc.InputTypeError, "Terms"),
    "proxies": (cc.ProxyLoss(torch.eye(3)), cc.InputTypeError, "loss: expected a PairLoss or a RowLoss"),
    "a class": (Squared, cc.InputTypeError, "loss: expected a PairLoss or a RowLoss"),
}


@each("case", WRONG)
def test_wrong_losses_are_named(case: str, device: str) -> None:
    loss, kind, says = WRONG[case]
    with pytest.raises(kind, match=says):
        cc.testing.check_loss(loss, device)


def test_a_value_that_is_infinite_at_a_point_itself(device: str) -> None:
    """A point and itself are no pair, so the value and its gradient are those of the listed pairs."""
    z = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
    i, j = torch.triu_indices(6, 6, 1, device=device)
    same = labels[i] == labels[j]
    loss = Cauchy(normalization="sum")
    found, listed = loss(z, labels), loss(z, pairs=(i[same], j[same], i[~same], j[~same]))
    torch.testing.assert_close(found, listed, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, z)[0] for value in (found, listed)), rtol=1e-10, atol=1e-12)
    cc.testing.check_loss(loss, device)


def test_negative_second_derivatives_have_to_be_said(device: str) -> None:
    class Silent(Cauchy):
        convex = True

    with pytest.raises(AssertionError, match="convex = False"):
        cc.testing.check_loss(Silent(), device)

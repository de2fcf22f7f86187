"""Losses that a user wrote: ``cc.testing.check_loss`` passes right ones, and wrong rules are named."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from loss_cases import numbers
from strategies import close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses import RowTerms, Terms
from contrastive_curvature.testing import dense_output_hessian


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


class Silent(Cauchy):
    convex = True


class Decoupled(cc.RowLoss):
    """``log sum_n exp(s_n / tau) - s_p / tau`` for every positive p: a root of sign -1."""

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


class MeanNegative(cc.RowLoss):
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

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        total, over = statistics.unsqueeze(2).unbind(1)
        share = negative / total
        return RowTerms(over.relu() * share, torch.zeros_like(share), ((over > 0) * share,))


RIGHT = [Squared(1.5, normalization="type"), Cauchy(), Decoupled(0.2, reduction="sum"), MeanNegative()]


@pytest.mark.parametrize("loss", RIGHT, ids=lambda loss: type(loss).__name__)
def test_right_losses_pass(loss: Any, device: str) -> None:
    cc.testing.check_loss(loss, device)


def spoilt(kind: type[Any], terms: Any = None, **rules: Any) -> Any:
    """A loss with another rule, or other terms made of its own."""
    if terms is not None:
        rules["_terms"] = lambda self, cosine, *args: terms(kind._terms(self, cosine, *args), cosine)
    return type("Mine", (kind,), rules)()


def forgets(self: Any, power: float = 3.0) -> None:
    del power
    Squared.__init__(self)


def less_the_mean(t: RowTerms, *_: Any) -> RowTerms:
    return t._replace(first=t.first - t.first.mean(1, keepdim=True))


@each(
    "loss, kind, says",
    [
        (spoilt(Squared, lambda t, *_: Terms(-t.first, t.second)), AssertionError, "first derivatives are not"),
        (spoilt(Squared, lambda t, *_: Terms(t.first, 2 * t.second)), AssertionError, "second derivatives are"),
        (spoilt(Decoupled, lambda t, *_: t._replace(first=2 * t.first)), AssertionError, "first derivatives"),
        (spoilt(Decoupled, root_signs=(1,)), AssertionError, "second derivatives are not those of _value"),
        (spoilt(Decoupled, less_the_mean), AssertionError, "some of the columns"),
        (spoilt(cc.SigLIPLoss, shift_invariant=True), AssertionError, "shift_invariant = True"),
        (spoilt(Squared, __init__=forgets), AssertionError, "keep power as attributes"),
        (Silent(), AssertionError, "convex = False"),
        (spoilt(Squared, lambda t, *_: t.first), cc.InputTypeError, "Terms"),
        (Squared, cc.InputTypeError, "loss: expected a PairLoss or a RowLoss"),
    ],
)
def test_wrong_losses_are_named(loss: Any, kind: type[Exception], says: str, device: str) -> None:
    with pytest.raises(kind, match=says):
        cc.testing.check_loss(loss, device)


def points(kind: str, device: str) -> dict[str, Any]:
    z = numbers(0, 6, 3).to(device)
    if kind == "labels":
        return {"z": z, "labels": torch.arange(6, device=device) % 2}
    return {"z": z, "pairs": tuple(torch.tensor(ends, device=device) for ends in ([0, 1], [2, 3], [0, 1], [1, 2]))}


def nan_of(cosine: Tensor) -> Tensor:
    return torch.log(-2 - cosine)


WRONG_TERMS: list[tuple[Any, Any, str]] = [
    (Squared, lambda t, _: t.first, "Terms"),
    (Squared, lambda t, _: Terms(t.first, None), "linear = True"),
    (Squared, lambda t, _: Terms(t.first.sum(), t.second), "shape of the cosines"),
    (Squared, lambda t, _: (t.first.tolist(), t.second), "a list"),
    (Squared, lambda t, _: Terms(t.first.float(), t.second), "float32"),
    (Squared, lambda t, s: Terms(t.first + nan_of(s), t.second), "finite"),
    (Squared, lambda t, s: Terms(t.first, nan_of(s)), "finite"),
    (MeanNegative, lambda t, _: t.first, "RowTerms"),
    (MeanNegative, lambda t, _: RowTerms(t.first, None, t.roots), "linear = False"),
    (MeanNegative, lambda t, _: RowTerms(t.first.sum(1), t.second, t.roots), "shape"),
    (MeanNegative, lambda t, _: RowTerms(t.first, t.second, (t.roots[0][:, :1],)), "shape"),
    (MeanNegative, lambda t, _: RowTerms(t.first, t.second), "1 roots"),
    (MeanNegative, lambda t, s: RowTerms(t.first + nan_of(s), t.second, t.roots), "finite"),
    (MeanNegative, lambda t, s: RowTerms(t.first, t.second, (nan_of(s),)), "finite"),
]


@each("kind, change, words", WRONG_TERMS)
def test_wrong_derivatives_are_named(kind: Any, change: Any, words: str, device: str) -> None:
    for given in (points("labels", device), points("pairs", device)):
        for fix in ("fixed", "psd", "full", "positive"):
            with pytest.raises(cc.InputError, match=f"Mine.*{words}") as caught:
                cc.output_hessian(**given, loss=spoilt(kind, change), pd_fix=fix)
            assert isinstance(caught.value, UnrepresentableError) == (words == "finite")


WRONG_VALUES = [
    (Squared, "_value", lambda found: found.expand(2), "one number"),
    (Squared, "_value", float, "one number"),
    *((MeanNegative, rule, lambda found: found.unsqueeze(1), "") for rule in ("_counts", "_value")),
    *((MeanNegative, rule, lambda found: found * torch.nan, "") for rule in ("_counts", "_value")),
]


@each("kind, rule, change, words", WRONG_VALUES)
def test_wrong_values_are_named(kind: Any, rule: str, change: Any, words: str, device: str) -> None:
    loss = spoilt(kind, **{rule: lambda self, *given: change(getattr(kind, rule)(self, *given))})
    given = points("labels", device)
    for call in (lambda: loss(**given), lambda: loss.output_hessian(**given).loss_and_cost()):
        with pytest.raises(cc.InputError, match=rf"Mine\.{rule}.*{words}"):
            call()


def test_promises_of_a_class(device: str) -> None:
    given = points("labels", device)
    for kind in (Squared, MeanNegative):
        with pytest.raises(cc.InputError, match=r"Mine\._terms.*None"):
            spoilt(kind, linear=True).output_hessian(**given)
    with pytest.raises(TypeError, match="_statistics"):
        type("Half", (cc.RowLoss,), {"_counts": lambda *_: None})()
    with pytest.raises(cc.InputTypeError, match=r"Doubled.*PairLoss"):
        type("Doubled", (cc.ContrastiveLoss,), {"_value": lambda *_: None})


def test_a_point_and_itself_are_no_pair(device: str) -> None:
    """Also where the value there is infinite: value and gradient are those of the listed pairs."""
    z = numbers(0, 6, 3).to(device).requires_grad_()
    labels, (i, j) = torch.tensor([0, 0, 1, 1, 2, 2], device=device), torch.triu_indices(6, 6, 1, device=device)
    same, loss = labels[i] == labels[j], Cauchy(normalization="sum")
    found, listed = loss(z, labels), loss(z, pairs=(i[same], j[same], i[~same], j[~same]))
    assert close(found.detach().reshape(1), listed.detach().reshape(1), tolerance=1e-12)
    assert close(*(torch.autograd.grad(value, z)[0] for value in (found, listed)), tolerance=1e-10)


def test_a_single_zero_stands_for_no_pairs(device: str) -> None:
    loss = Squared(negative_weight=1.0)
    found = cc.output_hessian(**points("labels", device), loss=loss).dense().cpu()
    assert close(found, dense_output_hessian(**points("labels", "cpu"), loss=loss))


def test_options_of_a_loss_are_part_of_a_saved_posterior(device: str) -> None:
    shown = repr(MeanNegative(0.25, reduction="sum", directions="a"))
    for text in ("margin=0.25", "reduction='sum'", "directions='a'", "pd_fix='psd_parts'"):
        assert text in shown
    encoder, x = nn.Linear(4, 3).to(device), torch.randn(6, 4, device=device)
    la, same, other = (
        Laplace(encoder, "contrastive", "all", "diag", backend_kwargs={"loss": Squared(m, pd_fix="psd")})
        for m in (0.5, 0.5, 0.25)
    )
    la.fit([(x, torch.arange(6, device=device) % 2)])
    same.load_state_dict(la.state_dict())
    with pytest.raises(cc.InputError, match=r"margin=0\.5"):
        other.load_state_dict(la.state_dict())

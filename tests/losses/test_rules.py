"""Losses that a user wrote: wrong rules are named, and their options are part of what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from tables import covering
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses import Terms
from contrastive_curvature.testing import dense_output_hessian

pytestmark = pytest.mark.parametrize("device", DEVICES)

PAIRS = ([0, 1], [2, 3], [0, 1], [1, 2])


class Squared(cc.PairLoss):
    """Positives: ``(1 - s)^2 / 2``. Negatives: ``s^2 / 2``."""

    def __init__(self, power: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.power = power

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Any:
        return (attract * (1 - cosine) ** 2 + repel * cosine**2).sum() / 2

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Any:
        return Terms(repel * cosine - attract * (1 - cosine), attract + repel)


def given(kind: str, device: str) -> dict[str, Any]:
    z = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    if kind == "labels":
        return {"z": z, "labels": torch.arange(6, device=device) % 2}
    return {"z": z, "pairs": tuple(torch.tensor(index, device=device) for index in PAIRS)}


WRONG: dict[str, tuple[Callable[[Any, Terms], Any], str]] = {
    "no tuple": (lambda _, t: t.first, "Terms"),
    "no second": (lambda _, t: Terms(t.first, None), "linear = True"),
    "summed": (lambda _, t: Terms(t.first.sum(), t.second), "shape of the cosines"),
    "rows": (lambda _, t: Terms(t.first[:1], t.second), "shape of the cosines"),
    "list": (lambda _, t: (t.first.tolist(), t.second), "a list"),
    "float32": (lambda _, t: Terms(t.first.float(), t.second), "float32"),
    "NaN": (lambda s, t: Terms(t.first + torch.log(-1 - s), t.second), "finite"),
    "NaN in the second": (lambda s, t: Terms(t.first, torch.log(-1 - s)), "finite"),
}


@covering(2, kind=["labels", "pairs"], name=WRONG, fix=["fixed", "psd", "full", "positive"])
def test_wrong_derivatives_are_named(name: str, kind: str, fix: str, device: str) -> None:
    change, words = WRONG[name]

    class Wrong(Squared):
        def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Any:
            return change(cosine, super()._terms(cosine, attract, repel))

    with pytest.raises(cc.InputError, match=f"Wrong.*{words}") as caught:
        cc.output_hessian(**given(kind, device), loss=Wrong(pd_fix=fix))
    assert isinstance(caught.value, UnrepresentableError) == name.startswith("NaN")


@pytest.mark.parametrize("kind", ["labels", "pairs"])
def test_a_second_derivative_of_a_linear_loss_is_refused(kind: str, device: str) -> None:
    class Linear(Squared):
        linear = True

    with pytest.raises(cc.InputError, match=r"Linear\._terms.*None"):
        cc.output_hessian(**given(kind, device), loss=Linear())


@pytest.mark.parametrize("kind", ["labels", "pairs"])
@pytest.mark.parametrize("change", [lambda value: value.expand(2), float], ids=["two numbers", "a float"])
def test_wrong_values_are_named(change: Callable[[Tensor], Any], kind: str, device: str) -> None:
    class Wrong(Squared):
        def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Any:
            return change(super()._value(cosine, attract, repel))

    for call in (Wrong(), Wrong().output_hessian):
        with pytest.raises(cc.InputError, match=r"Wrong\._value.*one number"):
            call(**given(kind, device))


@pytest.mark.parametrize("fix", ["fixed", "positive"])
def test_a_single_zero_stands_for_no_pairs(fix: str, device: str) -> None:
    # With both weights zero, attract + repel is one number.
    loss = Squared(negative_weight=1.0, pd_fix=fix)
    found = cc.output_hessian(**given("labels", device), loss=loss).dense().cpu()
    torch.testing.assert_close(found, dense_output_hessian(**given("labels", "cpu"), loss=loss), rtol=1e-10, atol=1e-12)


def test_the_contrastive_loss_keeps_its_rules(device: str) -> None:
    with pytest.raises(cc.InputTypeError, match=r"Doubled.*PairLoss"):
        type("Doubled", (cc.ContrastiveLoss,), {"_value": lambda *_: None})


def test_options_of_a_loss_are_part_of_a_saved_posterior(device: str) -> None:
    assert "power=3.0" in repr(Squared(3.0))
    encoder, x = nn.Linear(4, 3).to(device), torch.randn(6, 4, device=device)
    la, same, other = (
        Laplace(encoder, "contrastive", "all", "diag", backend_kwargs={"loss": Squared(p, pd_fix="psd")})
        for p in (2.0, 2.0, 3.0)
    )
    la.fit([(x, torch.arange(6, device=device) % 2)])
    same.load_state_dict(la.state_dict())
    with pytest.raises(cc.InputError, match="power=2"):
        other.load_state_dict(la.state_dict())

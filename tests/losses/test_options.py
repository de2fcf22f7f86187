"""Options of losses: wrong ones are refused by name, and what belongs to a loss is not given beside it."""

import math
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each
from torch import nn

import contrastive_curvature as cc

EYE = torch.eye(3)


@each(
    "kind, options, name",
    [
        (cc.InfoNCELoss, {"temperature": 0.0}, "temperature"),
        (cc.InfoNCELoss, {"temperature": 1e-9}, "temperature.*1e-06"),
        (cc.InfoNCELoss, {"scale": 0.0}, "scale"),
        (cc.InfoNCELoss, {"scale": 20.0, "temperature": 0.05}, "temperature, scale"),
        (cc.InfoNCELoss, {"reduction": "none"}, "reduction"),
        (cc.InfoNCELoss, {"directions": "ab"}, "directions"),
        (cc.InfoNCELoss, {"pd_fix": "none"}, "pd_fix"),
        (cc.SupConLoss, {"temperature": math.nan}, "temperature"),
        (cc.SupConLoss, {"temperature": "0.1"}, "temperature"),
        (cc.SigLIPLoss, {"scale": 0.0}, "scale"),
        (cc.SigLIPLoss, {"bias": math.inf}, "bias"),
        (cc.MultiSimilarityLoss, {"alpha": 0.0}, "alpha"),
        (cc.MultiSimilarityLoss, {"beta": -1.0}, "beta"),
        (cc.MultiSimilarityLoss, {"base": math.inf}, "base"),
        (cc.TripletLoss, {"margin": -0.1}, "margin"),
        (cc.TripletLoss, {"margin": True}, "margin"),
        (cc.LogisticLoss, {"scale": 0.0}, "scale"),
        (cc.LogisticLoss, {"bias": math.inf}, "bias"),
        (cc.SoftContrastiveLoss, {"a": 0.0}, "a"),
        (cc.SoftContrastiveLoss, {"b": math.nan}, "b"),
        (cc.SoftContrastiveLoss, {"negative_weight": 2.0}, "negative_weight"),
        (cc.SoftContrastiveLoss, {"normalization": "none"}, "normalization"),
        (cc.ProxyLoss, {"proxies": [[1.0]]}, "proxies.*Tensor"),
        (cc.ProxyLoss, {"proxies": torch.ones(3)}, "proxies.*shape"),
        (cc.ProxyLoss, {"proxies": torch.tensor([[1.0, 0], [0, 0]])}, r"proxies.*rows \[1\]"),
        (cc.ProxyLoss, {"proxies": EYE / 0}, "proxies.*NaN"),
        (cc.ProxyLoss, {"proxies": EYE, "scale": 0.0}, "scale"),
        (cc.ProxyLoss, {"proxies": EYE, "margin": 0.1}, "margin.*softmax.*cosface"),
        (cc.ProxyLoss, {"proxies": EYE, "margin": 28.6, "kind": "arcface"}, "margin.*pi.*radians"),
        (cc.ProxyLoss, {"proxies": EYE, "kind": "sphereface"}, "kind.*arcface"),
        (cc.ProxyLoss, {"proxies": EYE, "distance": "l1"}, "distance"),
    ],
)
def test_wrong_options_are_named(kind: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(cc.InputError, match=f"^{name}"):
        kind(**options)


@each("fix", ["ggn", "ggn_fixed", "psd_parts"])
def test_what_a_loss_that_is_not_convex_or_curved_has_no_meaning_for(fix: str) -> None:
    with pytest.raises(cc.UnsupportedError, match=f"{fix}.*ProxyLoss is not convex.*psd"):
        cc.ProxyLoss(EYE, margin=0.5, kind="arcface", pd_fix=fix)
    with pytest.raises(cc.UnsupportedError, match=f"{fix}.*ProxyLoss is not convex.*psd"):
        cc.ProxyLoss(EYE, margin=0.5, kind="arcface").output_hessian(EYE + 0.1, torch.arange(3), pd_fix=fix)
    with pytest.raises(cc.UnsupportedError, match=f"{fix}.*SoftContrastiveLoss is not convex.*psd"):
        cc.SoftContrastiveLoss(pd_fix=fix)
    assert cc.LogisticLoss(pd_fix=fix).pd_fix == fix
    if fix != "psd_parts":
        with pytest.raises(cc.UnsupportedError, match=f"pd_fix='{fix}': TripletLoss is piecewise linear"):
            cc.TripletLoss(pd_fix=fix)


@each("name, value", [("margin", 0.7), ("margin", None), ("negative_weight", 0.5), ("normalization", "anchor")])
def test_what_belongs_to_the_loss_is_refused_beside_it(name: str, value: Any) -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 2
    given: dict[str, Any] = {"loss": cc.LogisticLoss(), name: value}
    with pytest.raises(cc.InputError, match=f"loss, {name}"):
        cc.ggn(model, x, y, **given)
    with pytest.raises(cc.InputError, match=f"loss, {name}"):
        cc.output_hessian(x, y, **given)
    with pytest.raises(cc.InputError, match=f"loss, {name}"):
        Laplace(model, "contrastive", backend_kwargs=given)


@each("wrong", [nn.MSELoss(), cc.LogisticLoss, "logistic"])
def test_other_things_are_no_losses(wrong: Any) -> None:
    with pytest.raises(cc.InputTypeError, match="loss"):
        cc.ggn(nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 2, loss=wrong)


def test_losses_are_replaced_in_their_shared_options_alone() -> None:
    with pytest.raises(cc.InputError, match=r"replaced.*normalization.*InfoNCELoss"):
        cc.InfoNCELoss().replaced(normalization="sum")


def test_split_options_win_over_those_of_the_loss() -> None:
    """``distance`` and ``pd_fix`` are matters of the Hessian; a loss only has defaults for them."""
    x, y, loss = torch.randn(6, 4), torch.arange(6) % 2, cc.LogisticLoss(pd_fix="psd", distance="euclidean")
    assert cc.output_hessian(x, y, loss=loss).pd_fix == "psd"
    other = cc.output_hessian(x, y, loss=loss, pd_fix="full", distance="arccos")
    assert (other.pd_fix, other.distance) == ("full", "arccos")
    assert (loss.pd_fix, loss.distance) == ("psd", "euclidean")


class Fixed(cc.PairLoss):
    """A loss of one's own whose class decides the normalisation, and that may forget its argument."""

    def __init__(self, power: float, keep: bool = True) -> None:
        super().__init__(normalization="sum")
        self.keep, self.power = keep, power if keep else 1.0

    def _value(self, cosine: torch.Tensor, attract: torch.Tensor, repel: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    _terms = _value  # type: ignore[assignment]


@each(
    "loss",
    [
        *(cc.ContrastiveLoss(None, 0.25), cc.InfoNCELoss(scale=20.0, directions="a"), cc.TripletLoss(reduction="sum")),
        cc.ProxyLoss(nn.Parameter(EYE), 4.0, reduction="sum"),
    ],
)
def test_a_config_makes_the_same_loss(loss: Any) -> None:
    config = loss.config()
    assert not any(value.requires_grad for value in config.values() if isinstance(value, torch.Tensor))
    made = type(loss).from_config(config)
    assert made.description == loss.description == str(loss)
    assert type(loss).from_config({**config, "distance": "euclidean"}).distance == "euclidean"


def test_a_config_that_the_class_does_not_make_is_refused() -> None:
    assert Fixed.from_config(Fixed(2.0).config()).description == Fixed(2.0).description
    with pytest.raises(cc.InputError, match=r"config: .*power=3\.0.*got one with power=1\.0.*attributes"):
        Fixed.from_config({**Fixed(3.0).config(), "keep": False})
    with pytest.raises(cc.InputError, match=r"config: .*normalization='type'.*normalization='sum'"):
        Fixed.from_config({**Fixed(3.0).config(), "normalization": "type"})

"""An object built again from its attributes, by the names of the constructor's arguments, as tools do."""

import copy
import inspect
from typing import Any

import laplace
import pytest
import torch
from laplace import Laplace
from laplace_cases import INDICES
from laplace_combinations import COMBINATIONS
from tables import each, refused
from tiny import data, encoder

import contrastive_curvature as cc

HOST_CLASSES = [
    getattr(laplace, f"{structure}{weights}Laplace")
    for structure in ("Diag", "Kron", "Full")
    for weights in ("", "LL", "Subnet")
    if (structure, weights) != ("Kron", "Subnet")
]


class Spiced(cc.ContrastiveGGN):
    """A backend of a user's own, with an option of its own."""

    def __init__(self, *args: Any, flavour: str = "plain", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flavour = flavour


class Secret(cc.ContrastiveGGN):
    """A backend that does not show its option."""

    def __init__(self, *args: Any, flavour: str = "plain", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


OPTIONS: list[dict[str, Any]] = [
    {"backend_kwargs": {"margin": None, "pd_fix": "psd_parts", "negative_samples": None}},
    {"backend_kwargs": {"loss": cc.SupConLoss(0.2), "distance": "euclidean", "positives": "labels"}},
    {"backend": cc.BackPackContrastiveGGN, "backend_kwargs": {"pairs": "batch", "negative_weight": 0.3}},
    {"backend": Spiced, "backend_kwargs": {"flavour": "salt", "pd_fix": "psd_parts"}},
]

SOME = [("last_layer", "kron_lowrank"), ("all", "diag"), ("subnetwork", "full")]
ROWS = [*((*kind, {}) for kind in COMBINATIONS), *((*kind, options) for kind in SOME for options in OPTIONS)]


def names(la: Any) -> set[str]:
    """All arguments of our class and of the classes of laplace-torch."""
    ours = list(inspect.signature(type(la)).parameters)[:-1]
    theirs = [name for kind in HOST_CLASSES for name in inspect.signature(kind).parameters]
    return {*ours, *theirs, "asdl_fisher_kwargs"}


def rebuilt(la: Any) -> Any:
    arguments = {name: getattr(la, name) for name in names(la)}
    return type(la)(**{**arguments, "model": copy.deepcopy(la.model)})


def fitted(la: Any) -> Any:
    x, y = data()
    la.fit([(x[:6], y[:6]), (x[6:], y[6:])])
    return la


def make(weights: str, structure: str, **options: Any) -> Any:
    if weights == "subnetwork":
        options["subnetwork_indices"] = INDICES
    if weights == "last_layer":
        options["last_layer_name"] = [n for n, m in encoder().named_modules() if isinstance(m, torch.nn.Linear)][-1]
    return Laplace(
        encoder(),
        "contrastive",
        weights,
        structure,
        prior_precision=2.5,
        prior_mean=0.1,
        temperature=0.5,
        enable_backprop=options.get("backend") is not cc.BackPackContrastiveGGN,
        dict_key_x="x",
        dict_key_y="classes",
        **options,
    )


@each("weights, structure, options", ROWS)
@pytest.mark.filterwarnings("ignore:hessian_structure='kron'")
def test_the_attributes_build_an_equal_object(weights: str, structure: str, options: dict[str, Any]) -> None:
    la = make(weights, structure, **options)
    again = fitted(rebuilt(la))
    assert again.state_dict()["checksum"] == fitted(la).state_dict()["checksum"]
    assert type(again.backend) is type(la.backend)
    assert vars(again.backend).get("flavour") == vars(la.backend).get("flavour")
    assert (again.dict_key_x, again.dict_key_y) == ("x", "classes")
    la.optimize_prior_precision()
    # The numbers that a fit or the optimisation chose are arguments now.
    later = fitted(rebuilt(la))
    assert later.prior.keeps_temperature
    assert later.prior.chosen
    assert later.state_dict()["checksum"] == la.state_dict()["checksum"]


def test_the_options_of_an_object_hold_without_backend_kwargs_and_below_them() -> None:
    la = make("all", "diag", backend=Spiced, backend_kwargs={"flavour": "salt", "margin": 1.2, "pd_fix": "psd"})
    for given, margin in (({}, 1.2), ({"margin": 0.4}, 0.4)):
        again = Laplace(encoder(), "contrastive", "all", "diag", backend=la.backend, backend_kwargs=given)
        assert again.plain_options() == {**la.plain_options(), "margin": margin}
        assert (type(again.backend), again.backend.flavour) == (Spiced, "salt")
        assert again.backend_kwargs == given


def test_an_object_that_hides_an_option_is_refused() -> None:
    hidden = make("all", "diag", backend=Secret, backend_kwargs={"flavour": "salt"}).backend
    refused(lambda: Laplace(encoder(), "contrastive", "all", "diag", backend=hidden), "backend", "flavour")

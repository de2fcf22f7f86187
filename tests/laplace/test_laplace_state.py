"""``la.load_state_dict``: a state that cannot be right is refused, and leaves the object as it was."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace_cases import fitted, make
from tables import each, refused
from tiny import data
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.codec import sealed
from contrastive_curvature.laplace.state_dict import SEALED

KINDS = [
    *(("last_layer", structure) for structure in ("diag", "kron", "kron_lowrank")),
    ("all", "full"),
    ("subnetwork", "diag"),
]
_STATES: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}


def kept(weights: str, structure: str) -> tuple[Any, dict[str, Any]]:
    """A fitted object, made once, and its state."""
    if (weights, structure) not in _STATES:
        la = fitted(weights, structure)
        la.optimize_prior_precision()
        _STATES[weights, structure] = la, copy.deepcopy(la.state_dict())
    la, state = _STATES[weights, structure]
    return la, copy.deepcopy(state)


def damaged(value: Any) -> Iterator[Any]:
    """Copies of a nest, in each of which one bit, digit or letter is another."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: other} for other in damaged(part))
    elif isinstance(value, (list, tuple)):
        for k, part in enumerate(value):
            yield from (type(value)([*value[:k], other, *value[k + 1 :]]) for other in damaged(part))
    elif isinstance(value, Tensor) and value.numel():
        changed = value.clone().contiguous()
        changed.view(-1).view(torch.uint8)[0] ^= 1
        yield changed
    elif isinstance(value, str):
        yield value[:-1] + chr(ord(value[-1]) ^ 1)
    elif isinstance(value, (bool, int, float)):
        yield not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * (1 + 1e-15)


@pytest.mark.parametrize(("weights", "structure"), KINDS)
def test_every_damaged_entry_is_noticed(weights: str, structure: str) -> None:
    la, state = kept(weights, structure)
    rest = {key: state[key] for key in ("data", "_last_layer_name") if key in state}
    wrong = list(damaged({key: value for key, value in state.items() if key not in rest}))
    assert len(wrong) > len(state)
    for other in wrong:
        with pytest.raises(cc.InputError, match=r"state_dict"):
            la.load_state_dict({**other, **rest})
    la.load_state_dict(state)


def test_the_checksum_is_of_the_numbers_and_not_of_how_they_lie_in_memory() -> None:
    la, state = kept("last_layer", "full")
    other = {key: v.t().contiguous().t() if isinstance(v, Tensor) and v.ndim == 2 else v for key, v in state.items()}
    other["curvature"] = {**state["curvature"], "matrix": state["curvature"]["matrix"].t().contiguous().t()}
    assert other["curvature"]["matrix"].stride() != state["curvature"]["matrix"].stride()
    la.load_state_dict({**dict(reversed(other.items())), "data": 2 * state["data"], "of a user": 1})


def test_a_missing_key_is_named() -> None:
    la, state = kept("last_layer", "diag")
    for key in state.keys() - {"data"}:
        with pytest.raises(cc.InputError, match=rf"state_dict.*\b{key}\b"):
            la.load_state_dict({name: value for name, value in state.items() if name != key})


def test_a_state_of_another_version_is_refused() -> None:
    """It has another entry, of which its checksum is too."""
    la, state = kept("last_layer", "diag")
    older = sealed({**state, "curvature_error": 0.1}, (*SEALED, "curvature_error"))
    refused(lambda: la.load_state_dict(older), "saved by another version", "fit again")


INF = float("inf")
ATTACKS: list[tuple[str, str, str, Callable[[Any], Any], str]] = [
    ("last_layer", "diag", "curvature", lambda h: {**h, "entries": h["entries"][:1]}, "shape"),
    ("all", "diag", "curvature", lambda h: {**h, "entries": h["entries"] * float("nan")}, "NaN"),
    ("all", "full", "curvature", lambda h: {**h, "matrix": h["matrix"].diagonal()}, "shape"),
    ("last_layer", "kron", "curvature", lambda h: {**h, "factors": h["factors"][:1]}, "parts|factors"),
    ("last_layer", "kron", "curvature", lambda h: {**h, "points": h["points"].float()}, "float64"),
    ("last_layer", "kron", "curvature", lambda h: {"$class": h["$class"], "points": h["points"]}, "fields"),
    ("all", "kron", "curvature", lambda h: {**h, "factors": [[f * INF for f in g] for g in h["factors"]]}, "NaN"),
    ("all", "full", "curvature", lambda h: {**h, "$class": "Diagonal"}, "one of Dense"),
    ("last_layer", "diag", "mean", lambda m: m.float(), "float64"),
    ("last_layer", "diag", "data", lambda _: None, "data"),
    ("last_layer", "diag", "n_data", lambda _: -12, "whole number"),
    ("last_layer", "diag", "temperature", lambda _: 0.0, "temperature"),
    ("last_layer", "diag", "cost", lambda _: -1.0, "not negative"),
    ("last_layer", "diag", "loss", lambda loss: loss * float("inf"), "finite"),
    ("last_layer", "diag", "prior_precision", lambda p: -p, "positive numbers"),
    ("last_layer", "kron", "prior_precision", lambda p: p.repeat(18), "entries"),
    ("last_layer", "diag", "subset_of_weights", lambda _: "all", "same arguments"),
    ("last_layer", "diag", "n_data", lambda _: torch.ones(2), "a value of type.*got a tensor of torch.float32, shape"),
    ("last_layer", "diag", "_last_layer_name", lambda _: "head", "_last_layer_name.*got 'head'"),
    ("all", "full", "curvature", lambda h: {**h, "matrix": "text"}, "a tensor of shape.*got 'text'"),
    ("all", "full", "curvature", lambda h: {**h, "matrix": None}, "curvature"),
    ("last_layer", "kron", "curvature", lambda h: {**h, "factors": 3}, "curvature"),
    ("last_layer", "diag", "likelihood", lambda _: "regression", "contrastive"),
    ("last_layer", "diag", "backend", lambda _: "CurvlinopsContrastiveGGN", r"backend'\].*Fit with ContrastiveGGN"),
]


@each("weights, structure, key, change, words", ATTACKS)
def test_numbers_that_cannot_be_right(
    weights: str, structure: str, key: str, change: Callable[[Any], Any], words: str
) -> None:
    """Into an object that has seen no data, where lengths are not known before."""
    la, state = kept(weights, structure)
    fresh = make(weights, structure)
    with pytest.raises(cc.InputError, match=words):
        fresh.load_state_dict(sealed({**state, key: change(state[key])}, SEALED))
    assert not fresh.n_data
    # And it takes the true one.
    fresh.load_state_dict(kept(weights, structure)[1])
    assert torch.equal(fresh(data()[0]).kappa, la(data()[0]).kappa)


@each("structure", ["full", "kron"])
def test_float32_states_of_many_points_are_taken(structure: str) -> None:
    """The rounding of sums over data is no asymmetry, and no negative curvature."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    x, y = 10 * torch.randn(600, 20), torch.arange(600) % 5
    la, other = (Laplace(model, "contrastive", "all", structure, backend_kwargs={"margin": None}) for _ in range(2))
    la.fit([(x[k : k + 100], y[k : k + 100]) for k in range(0, 600, 100)])
    other.load_state_dict(la.state_dict())
    assert torch.equal(other(x[:3]).covariance, la(x[:3]).covariance)


class Mine(cc.ContrastiveGGN):
    """A backend of a user's own."""


def test_a_backend_of_ones_own_is_kept_and_asked_for() -> None:
    la = fitted("last_layer", "diag", backend=Mine)
    state = la.state_dict()
    assert state["backend"] == "Mine"
    again = make("last_layer", "diag", backend=Mine)
    again.load_state_dict(state)
    assert type(again.backend) is Mine
    with pytest.raises(cc.InputError, match=r"backend'\].*'Mine'.*backend=\.\.\."):
        make("last_layer", "diag").load_state_dict(state)


def test_what_is_no_state() -> None:
    for state in (None, [], "state", 3, {}, {"contrastive": {}}):
        with pytest.raises(cc.InputError, match="state_dict"):
            make("last_layer", "diag").load_state_dict(state)

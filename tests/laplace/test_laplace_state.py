"""``la.load_state_dict``: a state that cannot be right is refused, and leaves the object as it was."""

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from laplace_cases import fitted, make
from tables import each
from tiny import data
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.codec import sealed
from contrastive_curvature.laplace.state import SEALED


def picture(la: Any, x: Tensor) -> list[Any]:
    """All that an object says and is made of."""
    found = la(x)
    parts: list[Any] = [found.mu.detach(), found.kappa.detach(), la.mean.detach(), la.H]
    parts += [la.prior_precision, la.prior_mean.reshape(-1)]
    parts += [la.temperature, la.n_data, float(la.loss), float(la.cost), la.H_raw, la.enable_backprop, la.n_outputs]
    parts += [type(la.backend).__name__, la._temperature_given, la.likelihood, la.model.output_size]
    return copy.deepcopy(parts)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))
    if hasattr(a, "eigenvalues"):
        return same([a.eigenvalues, a.eigenvectors], [b.eigenvalues, b.eigenvectors])
    if is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    return type(a) is type(b) and a == b


KINDS = [
    *(("last_layer", structure) for structure in ("diag", "kron", "kron_lowrank")),
    *(("all", structure) for structure in ("full", "lowrank", "gp")),
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


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a state that can be replaced."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, part in value.items():
            found += leaves(part, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            found += leaves(part, (*path, number))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a nest with one place changed, tuples too."""
    if not path:
        return new
    if isinstance(value, tuple):
        return tuple(put(part, path[1:], new) if n == path[0] else part for n, part in enumerate(value))
    out = dict(value) if isinstance(value, dict) else list(value)
    out[path[0]] = put(value[path[0]], path[1:], new)
    return out


def spoilt(value: Any) -> list[Callable[[], Any]]:
    """Ways to make of a value what it cannot be."""
    ways: list[Callable[[], Any]] = [lambda: "text", lambda: None, lambda: [], lambda: {}, lambda: b"bytes", object]
    ways += [lambda: float("nan"), lambda: -3, lambda: 10**400, lambda: True, lambda: torch.ones(2, 2, 2)]
    if not isinstance(value, Tensor):
        return ways
    for number in (float("nan"), float("inf")):
        ways.append(lambda number=number: torch.full_like(value, number))
        if value.numel():
            ways.append(
                lambda number=number: torch.cat([value.flatten()[:-1], value.new_tensor([number])]).view_as(value)
            )
    ways += [lambda: value.unsqueeze(0).unsqueeze(0), lambda: value[..., :0] if value.ndim else value.reshape(0, 1)[:0]]
    ways += [lambda: value.float(), lambda: value.to(torch.complex128), lambda: value.bool(), value.tolist]
    return ways


def loads_or_refuses(la: Any, state: Any, x: Tensor) -> bool:
    """Whether a state was refused, with our error or Python's; then nothing may have changed by it."""
    before = picture(la, x)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.load_state_dict(state)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError):
        assert same(before, picture(la, x)), "a refused state left something behind"
        return True
    return False


@pytest.mark.parametrize(("weights", "structure"), KINDS)
@settings(max_examples=30, deadline=None)
@given(draw=st.data())
def test_a_spoilt_state_is_refused_without_a_trace(weights: str, structure: str, draw: st.DataObject) -> None:
    la, state = kept(weights, structure)
    path = draw.draw(st.sampled_from(leaves(state)), label="place")
    value = at(state, path)
    if draw.draw(st.booleans(), label="drop") and isinstance(at(state, path[:-1]), dict):
        changed = put(state, path[:-1], {k: v for k, v in at(state, path[:-1]).items() if k != path[-1]})
    else:
        try:
            new = draw.draw(st.sampled_from(spoilt(value)), label="way")()
        except RuntimeError:
            return  # a way that this tensor has not
        if same(new, value):
            return
        changed = put(state, path, new)
    # With the checksum of what stands in it, as no damage has it: the other checks see it.
    if not loads_or_refuses(la, sealed(changed, SEALED), data()[0]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.load_state_dict(state)


def damaged(value: Any) -> Any:
    """The same with one bit, digit or letter changed."""
    if isinstance(value, Tensor):
        changed = value.clone().contiguous()
        changed.view(-1).view(torch.uint8)[0] ^= 1
        return changed
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1)
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * (1 + 1e-15)


@pytest.mark.parametrize(("weights", "structure"), KINDS)
def test_every_damaged_entry_is_noticed(weights: str, structure: str) -> None:
    la, state = kept(weights, structure)
    checked = {key: value for key, value in state.items() if key not in ("data", "_last_layer_name")}
    for path in leaves(checked):
        value = at(state, path)
        if isinstance(value, (Tensor, str, int, float)) and not (isinstance(value, Tensor) and not value.numel()):
            with pytest.raises(cc.InputError, match=r"state_dict"):
                la.load_state_dict(put(state, path, damaged(value)))
    la.load_state_dict(state)


def test_a_damaged_file_is_refused_or_loads_as_it_was() -> None:
    la, file, x = fitted("last_layer", "kron_lowrank"), io.BytesIO(), data()[0]
    torch.save(la.state_dict(), file)
    content, wanted, notes = file.getvalue(), la(x).uncertainty, set()
    # Some of the metadata, and the lowest, the middle and the highest byte of doubles.
    for place in [*range(0, len(content), 31), *range(0, len(content), 64)]:
        spoilt = bytearray(content)
        spoilt[place] ^= 1
        try:
            state = torch.load(io.BytesIO(bytes(spoilt)), weights_only=True)
        except Exception:  # torch's own errors have no common base
            continue
        try:
            la.load_state_dict(state)
        except cc.InputError as error:
            notes.add("checksum" in str(error))
        assert torch.equal(la(x).uncertainty, wanted), place
    assert True in notes


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


INF = float("inf")
ATTACKS: list[tuple[str, str, str, Callable[[Any], Any], str]] = [
    ("last_layer", "diag", "curvature", lambda h: {**h, "entries": h["entries"][:1]}, "shape"),
    ("all", "diag", "curvature", lambda h: {**h, "entries": h["entries"] * float("nan")}, "NaN"),
    ("all", "full", "curvature", lambda h: {**h, "matrix": h["matrix"].diagonal()}, "shape"),
    ("last_layer", "kron", "curvature", lambda h: {**h, "factors": h["factors"][:1]}, "parts|factors"),
    ("last_layer", "kron", "curvature", lambda h: {**h, "points": h["points"].float()}, "float64"),
    ("last_layer", "kron", "curvature", lambda h: {"$class": h["$class"], "points": h["points"]}, "fields"),
    ("all", "kron", "curvature", lambda h: {**h, "factors": [[f * INF for f in g] for g in h["factors"]]}, "NaN"),
    ("all", "lowrank", "curvature", lambda h: {**h, "$class": "Diagonal"}, "one of Eigenpairs"),
    ("last_layer", "diag", "mean", lambda m: m.float(), "float64"),
    ("last_layer", "diag", "data", lambda _: None, "data"),
    ("last_layer", "diag", "n_data", lambda _: -12, "whole number"),
    ("last_layer", "diag", "temperature", lambda _: 0.0, "temperature"),
    ("last_layer", "diag", "cost", lambda _: -1.0, "not negative"),
    ("last_layer", "diag", "loss", lambda _: float("inf"), "finite"),
    ("last_layer", "diag", "prior_precision", lambda p: -p, "positive numbers"),
    ("last_layer", "kron", "prior_precision", lambda p: p.repeat(18), "entries"),
    ("last_layer", "diag", "subset_of_weights", lambda _: "all", "same arguments"),
    ("last_layer", "diag", "likelihood", lambda _: "regression", "contrastive"),
]


@each("weights, structure, key, change, words", ATTACKS)
def test_numbers_that_cannot_be_right(
    weights: str, structure: str, key: str, change: Callable[[Any], Any], words: str
) -> None:
    """Into an object that has seen no data, where lengths are not known before."""
    la, state = kept(weights, structure)
    fresh = make(weights, structure)
    attributes = dict(fresh.__dict__)
    with pytest.raises(cc.InputError, match=words):
        fresh.load_state_dict(sealed({**state, key: change(state[key])}, SEALED))
    assert fresh.__dict__.keys() == attributes.keys()
    assert all(fresh.__dict__[name] is value for name, value in attributes.items())
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

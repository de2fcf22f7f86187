"""States of all random generators of a training: torch's, NumPy's, Python's and the data loader's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.online.schema import (
    Check,
    anything,
    each,
    fail,
    like,
    mapping,
    nothing_or,
    number,
    refuse,
    tensor_like,
    whole,
)

__all__ = [
    "RANDOM_FRAME",
    "begin_epoch",
    "changed_state",
    "check_random_state",
    "check_sampler_state",
    "loader_generators",
    "random_state",
    "restore_random_state",
    "restore_sampler_state",
    "sampler_state",
]


def random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    """States of all random generators, as tensors, numbers and strings.

    Args:
        generators: Generators of the data loader.

    Returns:
        The states, for :func:`restore_random_state`.
    """
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  samplers of miners draw from it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), cached],
        "python": random.getstate(),
        "loader": [generator.get_state() for generator in generators],
    }


def restore_random_state(state: dict[str, Any], generators: list[torch.Generator]) -> None:
    """Restore the states of all random generators.

    Args:
        state: Result of :func:`random_state`.
        generators: Generators of the data loader, in the same order.
    """
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    for generator, one in zip(generators, state["loader"], strict=True):
        generator.set_state(one)


RANDOM_FRAME: dict[str, Check] = {
    "torch": anything,
    "cuda": each(anything),
    "numpy": each(anything, 5),
    "python": each(anything, 3, tuple),
    "loader": each(anything),
}
"""Schema of a :func:`random_state` without its values, which :func:`check_random_state` checks."""

_WORD = 2**32 - 1


def check_random_state(state: dict[str, Any], generators: list[torch.Generator], where: str) -> None:
    """Check that all generators accept their states, by loading the states into temporary generators.

    Args:
        state: A state from a file, with the parts of :data:`RANDOM_FRAME`.
        generators: Generators of the data loader.
        where: Path of the state, for flaws.

    Raises:
        Flaw: A state has a type, shape or range that its generator does not accept.
    """
    mapping(RANDOM_FRAME)(state, where)
    _check_generator(state["torch"], torch.default_generator, f"{where}['torch']")
    for place, one in enumerate(state["cuda"]):
        # On every machine the state is sixteen bytes: a seed and an offset.
        tensor_like(torch.empty(16, dtype=torch.uint8), False)(one, f"{where}['cuda'][{place}]")
    name, keys, position, has_gauss, cached = state["numpy"]
    here = f"{where}['numpy']"
    if name != "MT19937":
        fail(f"{here}[0]", "'MT19937'", name)
    tensor_like(torch.empty(624, dtype=torch.int64), False, 0)(keys, f"{here}[1]")
    if int(keys.max()) > _WORD:
        refuse(f"{here}[1]", "words of 32 bits", f"{int(keys.max())}")
    whole(0, 624)(position, f"{here}[2]")
    whole(0, 1)(has_gauss, f"{here}[3]")
    number(cached, f"{here}[4]")
    version, internal, gauss = state["python"]
    here = f"{where}['python']"
    whole(3, 3)(version, f"{here}[0]")
    each(whole(0, _WORD), 625, tuple)(internal, f"{here}[1]")
    whole(0, 624)(internal[-1], f"{here}[1][624]")
    nothing_or(number)(gauss, f"{here}[2]")
    each(anything, len(generators))(state["loader"], f"{where}['loader']")
    for place, (one, generator) in enumerate(zip(state["loader"], generators, strict=True)):
        _check_generator(one, generator, f"{where}['loader'][{place}]")


def _check_generator(state: Any, like_this: torch.Generator, where: str) -> None:
    tensor_like(like_this.get_state(), False)(state, where)
    try:
        torch.Generator(like_this.device).set_state(state)
    except RuntimeError as error:
        refuse(where, "a state of the generator", str(error).splitlines()[0])


def check_sampler_state(loader: Iterable[Any], states: Any, where: str) -> None:
    """Check that the samplers of a data loader have attributes for the saved result of :func:`changed_state`.

    Args:
        loader: The data loader, torch's or any iterable.
        states: The states from a file.
        where: Path of the states, for flaws.

    Raises:
        Flaw: A name, a type, or the shape of an array differs.
    """
    samplers = sampler_state(loader)
    each(anything, len(samplers))(states, where)
    for place, (state, present) in enumerate(zip(states, samplers, strict=True)):
        here = f"{where}[{place}]"
        if type(state) is not dict:
            fail(here, "a dictionary", state)
        for name, value in state.items():
            if name not in present:
                refuse(f"{here}[{name!r}]", "no entry of that name", "one")
            like(present[name], False)(value, f"{here}[{name!r}]")
            if isinstance(value, list):
                _check_items(value, present[name], f"{here}[{name!r}]")


def _check_items(values: list[Any], present: list[Any], where: str) -> None:
    kinds = {type(item) for item in present} or {bool, int, float, str}
    negative = any(isinstance(item, (int, float)) and item < 0 for item in present)
    for place, item in enumerate(values):
        if type(item) not in kinds:
            fail(f"{where}[{place}]", " or ".join(sorted(kind.__name__ for kind in kinds)), item)
        if isinstance(item, (int, float)):
            number(int(item) if isinstance(item, bool) else item, f"{where}[{place}]")
            if present and not negative and item < 0:
                fail(f"{where}[{place}]", "a number of at least 0", item)


def loader_generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """The generators that a data loader and its samplers draw from, each once.

    Args:
        loader: The data loader, torch's or any iterable. An iterable of another class has no generators of its own.

    Returns:
        The generators.
    """
    generators: list[torch.Generator] = []
    for part in _parts(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in generators):
            generators.append(generator)
    return generators


def begin_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Call ``set_epoch`` of all samplers of a data loader that have this method, such as ``DistributedSampler``.

    Without this call, such a sampler has the same order in every epoch.
    """
    for part in _parts(loader):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def sampler_state(loader: Iterable[Any]) -> list[dict[str, Any]]:
    """Copies of the lists and arrays of the samplers of a data loader; some samplers shuffle them in place every epoch.

    Args:
        loader: The data loader, torch's or any iterable.

    Returns:
        For every sampler a dictionary of its lists and arrays, by attribute name.
    """
    states = []
    for part in _parts(loader)[1:]:
        packed = {name: _packed(value) for name, value in getattr(part, "__dict__", {}).items()}
        states.append({name: value for name, value in packed.items() if value is not None})
    return states


def changed_state(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a :func:`sampler_state` that differ from those before; settings of the user do not change."""
    return [
        {name: value for name, value in new.items() if name not in old or not _equal(old[name], value)}
        for old, new in zip(before, now, strict=True)
    ]


def restore_sampler_state(loader: Iterable[Any], states: list[dict[str, Any]]) -> None:
    """Restore the entries of :func:`changed_state`, in place."""
    for part, state in zip(_parts(loader)[1:], states, strict=True):
        for name, value in state.items():
            present = getattr(part, name)
            if isinstance(present, Tensor):
                present.copy_(value)
            elif isinstance(present, np.ndarray):
                present[...] = value.numpy()
            else:
                present[:] = value


def _parts(loader: Iterable[Any]) -> list[object]:
    holders: list[object] = [loader]
    for holder in holders:
        inner = [getattr(holder, name, None) for name in ("sampler", "batch_sampler")]
        holders += [part for part in inner if part is not None and all(part is not other for other in holders)]
    return holders


def _packed(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        return torch.from_numpy(value.copy())
    if type(value) is list and all(isinstance(item, (np.number, int, float, str)) for item in value):
        return [item.item() if isinstance(item, np.generic) else item for item in value]
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    return a == b

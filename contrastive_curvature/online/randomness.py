"""Where the random numbers of a training stand: torch's, NumPy's, Python's and the data loader's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "changed_state",
    "loader_generators",
    "random_state",
    "restore_random_state",
    "restore_sampler_state",
    "sampler_state",
]


def random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    """States of all sources of randomness, as tensors, numbers and strings.

    Args:
        generators: Those of the data loader.

    Returns:
        What :func:`restore_random_state` takes.
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
    """Put all sources of randomness back.

    Args:
        state: From :func:`random_state`.
        generators: Those of the data loader, in the same order.
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


def loader_generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """The generators that a data loader and its samplers draw from, each once.

    Args:
        loader: torch's, or any iterable; one that is not torch's draws from the global generators or not at all.

    Returns:
        The generators.
    """
    found: list[torch.Generator] = []
    for part in _parts(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def sampler_state(loader: Iterable[Any]) -> list[dict[str, Any]]:
    """Lists and arrays that the samplers of a data loader hold; some shuffle theirs in place, epoch after epoch.

    Args:
        loader: See :func:`loader_generators`.

    Returns:
        For every sampler its tensors and lists by name.
    """
    states = []
    for part in _parts(loader)[1:]:
        packed = {name: _packed(value) for name, value in getattr(part, "__dict__", {}).items()}
        states.append({name: value for name, value in packed.items() if value is not None})
    return states


def changed_state(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of a :func:`sampler_state` is another than before: not what the user has chosen, which stays."""
    return [
        {name: value for name, value in new.items() if name not in old or not _equal(old[name], value)}
        for old, new in zip(before, now, strict=True)
    ]


def restore_sampler_state(loader: Iterable[Any], states: list[dict[str, Any]]) -> None:
    """Put back what :func:`changed_state` gave, in place."""
    for part, state in zip(_parts(loader)[1:], states, strict=True):
        for name, value in state.items():
            held = getattr(part, name)
            if isinstance(held, Tensor):
                held.copy_(value)
            elif isinstance(held, np.ndarray):
                held[...] = value.numpy()
            else:
                held[:] = value


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

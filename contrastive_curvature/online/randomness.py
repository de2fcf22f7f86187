"""Where the random numbers of a training stand: torch's, NumPy's, Python's and the data loader's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["loader_generators", "random_state", "restore_random_state"]


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
    holders: list[object] = [loader]
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
        inner = [getattr(holder, name, None) for name in ("sampler", "batch_sampler")]
        holders += [part for part in inner if part is not None and all(part is not other for other in holders)]
    return found

"""States of all random generators of a training: torch's, NumPy's, Python's, the data loader's and its samplers'."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Randomness:
    """All that draws random numbers while a data loader is iterated.

    Args:
        loader: The data loader, torch's or any iterable. Only torch's has generators of its own.

    Attributes:
        generators: Generators of the loader and its samplers, each once.
        samplers: The samplers, some of which shuffle their lists and arrays in place.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        parts: list[object] = [loader]
        for part in parts:
            inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
            parts += [one for one in inner if one is not None and all(one is not other for other in parts)]
        self.samplers = parts[1:]
        self.generators: list[torch.Generator] = []
        for part in parts:
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and all(generator is not other for other in self.generators):
                self.generators.append(generator)
        # What has not changed since is the user's setting, such as the labels of all points.
        self._unused = [_lists(sampler) for sampler in self.samplers]

    @property
    def counts(self) -> list[int]:
        """Numbers of generators and samplers."""
        return [len(self.generators), len(self.samplers)]

    def begin_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the samplers that have it: a ``DistributedSampler`` would repeat its order without."""
        for sampler in self.samplers:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def state(self) -> dict[str, Any]:
        """Return all states as tensors, numbers and strings."""
        name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  samplers of miners draw from it
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), cached],
            "python": random.getstate(),
            "loader": [generator.get_state() for generator in self.generators],
            "samplers": [
                {name: value for name, value in _lists(sampler).items() if not _equal(value, unused.get(name))}
                for sampler, unused in zip(self.samplers, self._unused, strict=True)
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
        random.setstate(state["python"])
        for generator, one in zip(self.generators, state["loader"], strict=True):
            generator.set_state(one)
        for sampler, lists in zip(self.samplers, state["samplers"], strict=True):
            for name, value in lists.items():
                present = getattr(sampler, name)
                if isinstance(present, Tensor):
                    present.copy_(value)
                else:
                    present[:] = value.numpy() if isinstance(present, np.ndarray) else value


def _lists(sampler: object) -> dict[str, Any]:
    """Return copies of the lists and arrays of a sampler, by attribute name."""
    copies: dict[str, Any] = {}
    for name, value in vars(sampler).items():
        if isinstance(value, Tensor):
            copies[name] = value.clone()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
            copies[name] = torch.from_numpy(value.copy())
        elif type(value) is list and all(isinstance(item, (np.number, int, float, str)) for item in value):
            copies[name] = [item.item() if isinstance(item, np.generic) else item for item in value]
    return copies


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)

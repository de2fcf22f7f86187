"""Checks of a posterior whose data come in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.exchange import ProcessGroup
from contrastive_curvature.fit.state import State
from contrastive_curvature.network.inputs import Inputs, move_inputs
from contrastive_curvature.network.loader import loader_parts

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def shared_inputs(exchange: ProcessGroup, inputs: list[Inputs], device: torch.device) -> list[Inputs]:
    """Return the inputs of this process in a list; without any, the inputs of the first process that has some."""
    # Copied, because a view of a few rows would be sent with its whole batch.
    few = [_copied(move_inputs(x, torch.device("cpu"))) for x in inputs]
    every = [x for part in exchange.gather(few) for x in part]
    return inputs or [move_inputs(x, device) for x in every[:1]]


def _copied(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _copied(part) for name, part in x.items()}
    return x.clone() if isinstance(x, Tensor) else x


def check_unwrapped(model: nn.Module) -> None:
    """Refuse wrappers that exchange buffers or parameters at every forward pass: shares may differ in length."""
    for module in model.modules():
        name = type(module).__name__
        if name in _WRAPPERS and type(module).__module__.startswith("torch."):
            raise UnsupportedError(
                f"model: {name} exchanges buffers or parameters at every forward pass, and the processes of a fit may "
                "have different numbers of batches, so that they would wait for each other. Pass the encoder inside, "
                "which for DistributedDataParallel is its .module."
            )


def check_kind(argument: str, state: object, kind: str) -> None:
    """Refuse any object but a merged state of this kind over all parts."""
    if not isinstance(state, State):
        hint = "State.load(path) reads a file, State.merged(states) merges several."
        raise InputTypeError(argument, "a merged State", f"a {type(state).__name__}", hint)
    if state.kind != kind:
        raise InputError(argument, f"a state of kind {kind!r}", f"{state.kind!r}")
    state.check_complete()


def check_part(part: Any, statistics: State | None) -> None:
    """Refuse ``part`` if it is not (index, number of parts), or disagrees with the statistics."""
    whole = isinstance(part, (tuple, list)) and len(part) == 2 and all(type(k) is int for k in part)
    if not whole or not 0 <= part[0] < part[1]:
        raise InputError("part", "an index from 0 and the number of all parts, as (0, 8)", part)
    if statistics is not None and statistics.count != part[1]:
        wanted = f"one of {statistics.count} parts, as in the statistics"
        raise InputError("part", wanted, f"one of {part[1]}")


def check_sampler(loader: Any, part: tuple[int, int]) -> None:
    """Refuse a sampler that reads another part of the data than ``part``."""
    for sampler in loader_parts(loader):
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != part:
            came = f"rank {sampler.rank} of {sampler.num_replicas} in its DistributedSampler"
            raise InputError("loader", f"part {part[0]} of {part[1]}, as part= says", came)

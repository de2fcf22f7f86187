"""The content of a training's checkpoint: how it is checked, and how it is restored completely or not at all."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.online.randomness import (
    RANDOM_FRAME,
    check_random_state,
    check_sampler_state,
    loader_generators,
    random_state,
    restore_random_state,
    restore_sampler_state,
    sampler_state,
)
from contrastive_curvature.online.schema import (
    Flaw,
    anything,
    each,
    fail,
    mapping,
    nothing_or,
    refuse,
    text,
    whole,
)
from contrastive_curvature.online.states import check_module, check_optimizer, check_scheduler

__all__ = ["check_frame", "check_states", "refused", "restore", "states_of_process"]


def _dictionary(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        refuse(where, "a dictionary", f"a {type(value).__name__}")


def _key(value: Any, where: str) -> None:
    # The type is compared, because True and a tensor can equal 1.
    if type(value) not in (int, str):
        fail(where, "the number or the name of a parameter", value)


_PROCESS = mapping(
    {
        "epoch_start": mapping({**RANDOM_FRAME, "samplers": each(anything)}),
        "now": mapping(RANDOM_FRAME),
        "stateful": each(_key),
        "step": _dictionary,
        "optimizer": nothing_or(_dictionary),
    }
)

_FRAME = {
    "step": _dictionary,
    "optimizer": _dictionary,
    "scheduler": nothing_or(_dictionary),
    "made_with": mapping(
        {"optimizer": _dictionary, "scheduler": _dictionary, "step": text, "kinds": each(text, 2)},
    ),
    "steps": whole(0),
    "epoch": whole(0),
    "batch": whole(0),
    "batches": nothing_or(whole(1)),
    "workers": whole(0),
    "processes": each(_PROCESS),
}


def check_frame(content: dict[str, Any], file: Path) -> None:
    """Check that a checkpoint has all its parts, and that its counts are possible.

    The states of the parts are checked later, by :func:`check_states`, against the objects that will load them.

    Raises:
        InputError: A part is missing or wrong; the error names the file and the path of keys.
    """
    if "made_with" not in content:
        hint = "Remove it, or name another file."
        raise InputError(expected(str(file), "a checkpoint of a Trainer", "other content", hint))
    try:
        mapping(_FRAME)(content, "content")
        if not content["processes"]:
            refuse("content['processes']", "one entry or more", "none")
        if content["batches"] is not None:
            whole(0, content["batches"] - 1)(content["batch"], "content['batch']")
    except Flaw as flaw:
        raise refused(file, flaw) from None


def states_of_process(content: dict[str, Any], rank: int) -> dict[str, Any]:
    """The states for one process: those shared by all processes, updated with those of this process only."""
    own = content["processes"][rank]
    # copy.copy and not dict.copy, which drops the attribute _metadata with the versions of the modules.
    step = copy.copy(content["step"])
    step.update(own["step"])
    optimizer = content["optimizer"] if own["optimizer"] is None else own["optimizer"]
    random = {name: own[name] for name in ("epoch_start", "now")}
    shared = {"scheduler": content["scheduler"], "stateful": own["stateful"]}
    return {"step": step, "optimizer": optimizer, "random": random, **shared}


def check_states(
    states: dict[str, Any],
    step: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    loader: Iterable[Any],
) -> None:
    """Check all states of :func:`states_of_process` against the objects that will load them.

    Raises:
        Flaw: A state does not fit; the flaw names the path of keys.
        InputError: ``step`` refuses its state.
    """
    check_module(step, states["step"], "content['step']")
    check_optimizer(optimizer, states["optimizer"], "content['optimizer']", scheduler)
    stateful = list(states["optimizer"]["state"])
    if stateful != states["stateful"]:
        # A parameter without optimiser state would silently start with a new state.
        refuse("content['optimizer']['state']", f"the parameters {states['stateful']}"[:80], f"{stateful}"[:80])
    check_scheduler(scheduler, states["scheduler"], "content['scheduler']")
    generators = loader_generators(loader)
    start = dict(states["random"]["epoch_start"])
    check_sampler_state(loader, start.pop("samplers"), "content['processes'][...]['epoch_start']['samplers']")
    check_random_state(start, generators, "content['processes'][...]['epoch_start']")
    check_random_state(states["random"]["now"], generators, "content['processes'][...]['now']")


def refused(file: Path, flaw: Flaw) -> InputError:
    """The error for a flaw in a file."""
    return InputError(expected(f"{file}: {flaw.where}", flaw.wanted, flaw.received, "Remove it to start anew."))


def restore(
    states: dict[str, Any],
    step: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    loader: Iterable[Any],
) -> None:
    """Restore all states; if one of them is refused, restore none.

    Args:
        states: From :func:`states_of_process`, checked. The random generators get their states at the start of the
            epoch.
        step: The module that is trained.
        optimizer: The optimiser of the module.
        scheduler: The learning-rate scheduler, or ``None``.
        loader: The data loader.

    Raises:
        Exception: The error of a module, an optimiser or a scheduler of the user that refuses its state.
    """
    generators = loader_generators(loader)
    weights = {name: t.detach().clone() for name, t in step.state_dict().items() if isinstance(t, Tensor)}
    memory = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    numbers, order = random_state(generators), sampler_state(loader)
    try:
        step.load_state_dict(states["step"])
        optimizer.load_state_dict(states["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(states["scheduler"])
        restore_sampler_state(loader, states["random"]["epoch_start"]["samplers"])
        restore_random_state(states["random"]["epoch_start"], generators)
    except BaseException:
        with torch.no_grad():
            for name, t in step.state_dict().items():
                if isinstance(t, Tensor):
                    t.copy_(weights[name])
        optimizer.__dict__.update(memory)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        restore_sampler_state(loader, order)
        restore_random_state(numbers, generators)
        raise

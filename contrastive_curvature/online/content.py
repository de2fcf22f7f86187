"""What a checkpoint of a training holds, how it is checked as a whole, and how it is put back or not at all."""

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

__all__ = ["check_frame", "check_states", "merged", "refused", "restore"]


def _dictionary(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        refuse(where, "a dictionary", f"a {type(value).__name__}")


def _key(value: Any, where: str) -> None:
    # True is equal to 1, and so is a tensor.
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
    """Check that all parts of a checkpoint are there, and its counts such as a training can have.

    What the states hold comes later, as it is compared with objects that must be of the right kind first.

    Raises:
        InputError: Something is not so; the file and the path of keys are named.
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


def merged(content: dict[str, Any], rank: int) -> dict[str, Any]:
    """The states of one process: those that all share, and what it has of its own."""
    own = content["processes"][rank]
    # Not a dictionary's own copy, which loses the versions of the modules.
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
    """Check all states of :func:`merged` against the objects that are to take them.

    Raises:
        Flaw: One does not fit; its path of keys is named.
        InputError: The step refuses its own.
    """
    check_module(step, states["step"], "content['step']")
    check_optimizer(optimizer, states["optimizer"], "content['optimizer']", scheduler)
    stateful = list(states["optimizer"]["state"])
    if stateful != states["stateful"]:
        # Without its state a parameter would begin anew, and no error would tell.
        refuse("content['optimizer']['state']", f"the parameters {states['stateful']}"[:80], f"{stateful}"[:80])
    check_scheduler(scheduler, states["scheduler"], "content['scheduler']")
    generators = loader_generators(loader)
    start = dict(states["random"]["epoch_start"])
    check_sampler_state(loader, start.pop("samplers"), "content['processes'][...]['epoch_start']['samplers']")
    check_random_state(start, generators, "content['processes'][...]['epoch_start']")
    check_random_state(states["random"]["now"], generators, "content['processes'][...]['now']")


def refused(file: Path, flaw: Flaw) -> InputError:
    """The error of a flaw in a file."""
    return InputError(expected(f"{file}: {flaw.where}", flaw.wanted, flaw.came, "Remove it to start anew."))


def restore(
    states: dict[str, Any],
    step: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    loader: Iterable[Any],
) -> None:
    """Put all states back, or, if one is refused after all, none.

    Args:
        states: From :func:`merged`, checked; the random numbers become those at the start of the epoch.
        step: What is trained.
        optimizer: Its optimiser.
        scheduler: Its scheduler, or ``None``.
        loader: Its data.

    Raises:
        Exception: What a module, an optimiser or a scheduler of the user raises.
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

"""The settings of a training, which must be the same when the training is resumed."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_types", "refuse_changes", "settings_of"]


def settings_of(step: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """The settings of optimiser and scheduler, and a description of the module, taken before the first step."""
    return {
        "optimizer": {
            f"group {number}: {name}": _plain(value)
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        },
        "scheduler": {} if scheduler is None else {n: _plain(value) for n, value in scheduler.state_dict().items()},
        "step": repr(step),
        "kinds": [type(part).__name__ for part in (optimizer, scheduler)],
    }


def refuse_changes(before: dict[str, Any], present: dict[str, Any], hint: str) -> None:
    """Compare two results of :func:`settings_of`.

    Args:
        before: The settings in the checkpoint.
        present: The settings of this program.
        hint: What the user can do, a sentence.

    Raises:
        InputError: The settings differ; the error names the first difference.
    """
    for name, was, now in zip(("optimizer", "scheduler"), before["kinds"], present["kinds"], strict=True):
        if was != now:
            raise InputError(expected(name, f"{was}, as before", now, hint))
    for part in ("optimizer", "scheduler"):
        was, now = before[part], present[part]
        # Compared as text, because == of tensors gives a tensor and not one truth value.
        differ = sorted(name for name in was | now if repr(was.get(name)) != repr(now.get(name)))
        if differ:
            wanted, received = (", ".join(f"{name} = {given.get(name)}" for name in differ) for given in (was, now))
            raise InputError(expected(part, f"{wanted}, as before", received, hint))
    was, now = (given["step"].splitlines() for given in (before, present))
    if was != now:
        wanted, received = next((a, b) for a, b in zip_longest(was, now, fillvalue="nothing") if a != b)
        raise InputError(expected("step", f"the modules as before: {wanted.strip()}", received.strip(), hint))


def _plain(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bool, int, float, type(None))) else repr(type(value).__name__)


def check_types(step: object, optimizer: object, checkpoint: object, dict_key_y: object) -> None:
    """Check the types of the arguments of a trainer.

    Raises:
        InputTypeError: An argument has a wrong type.
    """
    for name, value, kind, wanted in (
        ("step", step, nn.Module, "a torch.nn.Module that returns a loss"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer of the step's parameters"),
        ("checkpoint", checkpoint, (str, Path, type(None)), "the name of a file, or None"),
        ("dict_key_y", dict_key_y, str, "the key of the labels in a batch that is a mapping"),
    ):
        if not isinstance(value, kind):
            raise InputTypeError(expected(name, wanted, f"a {type(value).__name__}"))

"""What a training was made with, which a resumed program has to make it with again."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_kinds", "refuse_changes", "settings_of"]


def settings_of(step: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Numbers and strings that say how a training begins, as they are before the first step."""
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
    """Compare two of :func:`settings_of`.

    Raises:
        InputError: They differ; the first difference is named, and the hint follows.
    """
    for name, was, now in zip(("optimizer", "scheduler"), before["kinds"], present["kinds"], strict=True):
        if was != now:
            raise InputError(expected(name, f"{was}, as before", now, hint))
    for part in ("optimizer", "scheduler"):
        was, now = before[part], present[part]
        # As text: a file may hold tensors, which do not compare to one truth.
        differ = sorted(name for name in was | now if repr(was.get(name)) != repr(now.get(name)))
        if differ:
            wanted, came = (", ".join(f"{name} = {given.get(name)}" for name in differ) for given in (was, now))
            raise InputError(expected(part, f"{wanted}, as before", came, hint))
    was, now = (given["step"].splitlines() for given in (before, present))
    if was != now:
        wanted, came = next((a, b) for a, b in zip_longest(was, now, fillvalue="nothing") if a != b)
        raise InputError(expected("step", f"the modules as before: {wanted.strip()}", came.strip(), hint))


def _plain(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bool, int, float, type(None))) else repr(type(value).__name__)


def check_kinds(step: object, optimizer: object, checkpoint: object, dict_key_y: object) -> None:
    """Check that the parts of a training are what they should be.

    Raises:
        InputTypeError: One is not.
    """
    for name, value, kind, wanted in (
        ("step", step, nn.Module, "a torch.nn.Module that returns a loss"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer of the step's parameters"),
        ("checkpoint", checkpoint, (str, Path, type(None)), "the name of a file, or None"),
        ("dict_key_y", dict_key_y, str, "the key of the labels in a batch that is a mapping"),
    ):
        if not isinstance(value, kind):
            raise InputTypeError(expected(name, wanted, f"a {type(value).__name__}"))

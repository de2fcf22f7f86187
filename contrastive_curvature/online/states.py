"""Checks of the saved states of a module, an optimiser and a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from contrastive_curvature.online.learner import OnlineLaplace
from contrastive_curvature.online.rehearsal import is_torch_optimizer, state_after_step
from contrastive_curvature.online.schema import (
    each,
    fail,
    like,
    number,
    refuse,
    same_keys,
    tensor_like,
    whole,
)

__all__ = ["check_module", "check_optimizer", "check_scheduler"]

# Entries of optimiser states that are sums of squares or step sizes.
_NOT_NEGATIVE = {"acc_delta", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "row_var", "col_var", "variance"}
_NOT_NEGATIVE |= {"exp_inf", "step_size", "step", "eta", "mu", "mu_product"}


def check_module(module: nn.Module, state: Any, where: str) -> None:
    """Check that a module can load a state and be trained with it.

    Args:
        module: The module of this program, before loading.
        state: A ``state_dict``.
        where: Path of the state, for flaws.

    Raises:
        Flaw: Names, shapes or types differ; or a parameter, or a statistic of a batch normalisation, is not finite.
        InputError: An :class:`~contrastive_curvature.OnlineLaplace` in the module refuses its part of the state.
    """
    present = module.state_dict()
    if type(state) is not type(present):
        fail(where, f"a {type(present).__name__}", state)
    same_keys(state, present, where)
    own: set[str] = set()
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        if isinstance(part, OnlineLaplace):
            part.check_state(state, start)
            own |= {f"{start}options"}
        if isinstance(part, _NormBase) and part.running_mean is not None and not is_lazy(part.running_mean):
            for name, least in (("running_mean", None), ("running_var", 0), ("num_batches_tracked", 0)):
                whole_name = f"{start}{name}"
                tensor_like(present[whole_name], True, least)(state[whole_name], f"{where}[{whole_name!r}]")
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in present.items():
        if name in own or is_lazy(value):
            continue
        check = tensor_like(value, name in trained) if isinstance(value, Tensor) else like(value, False)
        check(state[name], f"{where}[{name!r}]")
    like(getattr(present, "_metadata", None), True)(getattr(state, "_metadata", None), f"{where}._metadata")


def check_optimizer(
    optimizer: torch.optim.Optimizer, state: Any, where: str, scheduler: Any = None, rehearse: bool = True
) -> None:
    """Check that an optimiser can load a state and make a step with it.

    Args:
        optimizer: The optimiser of this program, before loading.
        state: A ``state_dict``.
        where: Path of the state, for flaws.
        scheduler: The scheduler of the optimiser, or ``None``.
        rehearse: Whether to compare with the state of torch's optimisers after a step. Of other optimisers, only the
            entries that all optimisers have are checked.

    Raises:
        Flaw: Keys, shapes or types differ, a number is not finite, or a count is negative.
    """
    present = optimizer.state_dict()
    known = is_torch_optimizer(optimizer)
    if type(state) is not dict:
        fail(where, "a dictionary", state)
    same_keys(state, present, where, more=not known)
    for name in present.keys() - {"state", "param_groups"}:
        like(present[name], False)(state[name], f"{where}[{name!r}]")
    groups = present["param_groups"]
    each(_any_dict, len(groups))(state["param_groups"], f"{where}['param_groups']")
    for place, (group, now) in enumerate(zip(state["param_groups"], groups, strict=True)):
        here = f"{where}['param_groups'][{place}]"
        like(now, known, _may_be_negative(scheduler))(group, here)
        each(whole(0))(group["params"], f"{here}['params']")
        if group["params"] != now["params"]:
            refuse(f"{here}['params']", f"{now['params']}"[:60], f"{group['params']}"[:60])
    expected = state_after_step(optimizer) if rehearse else None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _any_dict(state["state"], f"{where}['state']")
    for index, entry in state["state"].items():
        # Optimisers of other libraries may have entries that belong to no parameter.
        if known:
            whole(0, len(parameters) - 1)(index, f"a key of {where}['state']")
            _any_dict(entry, f"{where}['state'][{index!r}]")
        _check_entry(entry, f"{where}['state'][{index!r}]", None if expected is None else expected.get(index, {}))


def _check_entry(entry: Any, where: str, wanted: Mapping[str, Any] | None) -> None:
    if not isinstance(entry, dict):
        # Only optimisers of other libraries have such entries.
        _check_finite(entry, where)
        return
    if wanted is not None:
        same_keys(entry, wanted, where)
    for name, value in entry.items():
        here = f"{where}[{name!r}]"
        _check_finite(value, here)
        if name == "step":
            _check_count(value, here)
        if wanted is None:
            continue
        if isinstance(wanted[name], Tensor):
            tensor_like(wanted[name], True, 0 if name in _NOT_NEGATIVE else None)(value, here)
        else:
            like(wanted[name], True, signed=name not in _NOT_NEGATIVE)(value, here)


def _check_count(value: Any, where: str) -> None:
    single = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    number(single, where)
    if single < 0 or single != int(single):
        fail(where, "a whole number of at least 0", value)


def _check_finite(value: Any, where: str) -> None:
    # Only tensors are checked: optimisers of other libraries may start a number, such as their best loss, at infinity.
    if isinstance(value, Tensor):
        tensor_like(value, True)(value, where)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _check_finite(item, f"{where}[{place}]")


def _any_dict(value: Any, where: str) -> None:
    if type(value) is not dict:
        fail(where, "a dictionary", value)


def check_scheduler(scheduler: Any, state: Any, where: str) -> None:
    """Check that a scheduler can load a state.

    Args:
        scheduler: The scheduler of this program, before loading, or ``None``.
        state: A ``state_dict``, or ``None``.
        where: Path of the state, for flaws.

    Raises:
        Flaw: Keys or types differ from those of the scheduler, or a number is not finite. A scheduler that is not
            torch's may have additional keys in ``state``.
    """
    if scheduler is None or state is None:
        if (scheduler is None) != (state is None):
            fail(where, "None" if scheduler is None else "a dictionary", state)
        return
    present = scheduler.state_dict()
    known = type(scheduler).__module__ == "torch.optim.lr_scheduler"
    like(present, known, _may_be_negative(scheduler))(state, where)
    for name in ("last_epoch", "_step_count"):
        if name in present:
            whole(0)(state[name], f"{where}[{name!r}]")


def _may_be_negative(scheduler: Any) -> bool:
    """Whether learning rates may be negative: set by a function of the user, or by a scheduler of another library."""
    if scheduler is None:
        return False
    return type(scheduler).__module__ != "torch.optim.lr_scheduler" or "lr_lambda" in str(scheduler.state_dict())

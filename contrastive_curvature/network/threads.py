"""Using a module that other threads use at the same time: modes, hooks and copies that they do not notice.

A module is shared by all threads of a process: its mode, its hooks and its table of parameters. Other threads may run
the user's own code on it, so a lock of ours around our work would help nobody.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError

__all__ = ["OwnThreadHook", "evaluation_mode", "private_copy", "users_hooks", "watched"]

_Module = TypeVar("_Module", bound=nn.Module)

_DEPTH = 5
"""How deep lists and dictionaries of a module are searched: they may hold themselves."""


class _Hold:
    """A module that was in training mode, and how many are keeping it in evaluation mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.mode = module.training
        self.users = 0


_held: dict[int, _Hold] = {}
_counting = threading.RLock()
"""Around the counting alone, never around code of the user's."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and each one back afterwards.

    Where several threads do this to one module, the last to finish puts it back: nobody computes in a mode that another
    one chose, and the mode that stays is that before the first. A module in evaluation mode is not written to.
    """
    modules = list(model.modules())
    holds: list[_Hold] = []
    with _counting:
        for module in modules:
            if id(module) in _held or module.training:
                hold = _held.setdefault(id(module), _Hold(module))
                hold.users += 1
                holds.append(hold)
    try:
        if holds:
            # Also where another thread holds all of them: it may not have come to this line yet.
            model.eval()
        yield
    finally:
        with _counting:
            for hold in holds:
                hold.users -= 1
                if not hold.users:
                    del _held[id(hold.module)]
                    hold.module.training = hold.mode


class OwnThreadHook:
    """A hook on a module that only acts in the thread that made it, and only until it is stopped.

    Args:
        function: What to call, with the arguments of the hook.
    """

    _hidden: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self._thread = threading.get_ident()

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        """Run the function in its own thread; elsewhere do nothing."""
        # Another thread may come between a hook and the note that it takes keywords, hence any number of arguments.
        if self._function is None or threading.get_ident() != self._thread:
            return None
        return self._function(module, *rest)

    @classmethod
    def hide(cls) -> None:
        """Let no compiler look into hooks: it would take the thread that it compiles in for every thread."""
        # Without torch.compile in use there is nothing to hide from, and loading it takes a second.
        if "torch._dynamo" in sys.modules and not cls._hidden:
            cls._hidden = True
            cls.__call__ = torch.compiler.disable(cls.__call__)  # type: ignore[method-assign]

    def stop(self) -> None:
        """Never act again, also where the table of hooks was copied."""
        self._function = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnThreadHook:
        """Another thread that copies the module gets nothing of ours."""
        return OwnThreadHook(None)

    def __reduce__(self) -> Any:
        """Another thread that saves the module saves nothing of ours."""
        return OwnThreadHook, (None,)


@contextmanager
def watched(
    modules: Iterable[nn.Module],
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    after: Callable[[nn.Module, tuple[Any, ...], Any], Any] | None = None,
) -> Iterator[None]:
    """Look at runs of some modules in this thread; those of other threads are none of our business.

    Args:
        modules: The modules.
        before: Called with module, positional and keyword arguments; what it returns replaces them unless ``None``.
        after: Called with module, positional arguments and output; what it returns replaces that unless ``None``.
    """
    OwnThreadHook.hide()
    with ExitStack() as undo:
        for module in modules:
            for function, register in (
                (before, lambda hook, m=module: m.register_forward_pre_hook(hook, with_kwargs=True)),
                (after, module.register_forward_hook),
            ):
                if function is not None:
                    hook = OwnThreadHook(function)
                    undo.callback(hook.stop)
                    undo.callback(register(hook).remove)
        yield


def users_hooks(module: nn.Module, before_only: bool = False) -> list[Any]:
    """The forward hooks of a module that are not ours; ``before_only`` leaves out those that see the output."""
    tables = [module._forward_pre_hooks] if before_only else [module._forward_pre_hooks, module._forward_hooks]
    return [hook for table in tables for hook in list(table.values()) if not isinstance(hook, OwnThreadHook)]


def private_copy(module: _Module, *, forward_hooks: bool = True, backward_hooks: bool = True) -> _Module:
    """A copy with modules of its own, in evaluation mode, that shares every tensor with the original.

    What it is given in place of its parameters, and the hooks that it gets, nobody else sees.

    Args:
        module: The original.
        forward_hooks: Whether the copy has the user's forward hooks.
        backward_hooks: Whether it has the backward hooks.

    Returns:
        The copy. A function that finds a module of the original elsewhere than in its closure still runs that.

    Raises:
        UnsupportedError: It copies itself in a way of its own, parameters and all.
        Exception: Something in it cannot be copied, in the words of its own class.
    """
    memo: dict[int, Any] = {}
    shared: list[Any] = [*module.parameters(), *module.buffers()]
    replaced: list[Any] = []
    for part in module.modules():
        # Another thread may set an attribute meanwhile, or register a hook.
        for name, value in list(vars(part).items()):
            if isinstance(value, OrderedDict) and "_hooks" in name:
                keeps = (forward_hooks and name.startswith("_forward")) or (
                    backward_hooks and name.startswith("_backward")
                )
                replaced.append(value)
                # A hook may hold anything, and is not copied itself.
                memo[id(value)] = _without_ours(value.copy()) if keeps else OrderedDict()
            else:
                # Activations that a forward stored cannot be copied, and need not be.
                shared.extend(_tensors(value))
    memo.update((id(tensor), tensor) for tensor in shared)
    made = copy.deepcopy(module, memo)
    if [id(p) for p in made.parameters()] != [id(p) for p in module.parameters()]:
        msg = f"model: a copy of its {type(module).__name__} has parameters of its own. Give it no __deepcopy__."
        raise UnsupportedError(msg)
    twins = {id(part): memo[id(part)] for part in module.modules() if id(part) in memo}
    functions: dict[int, FunctionType] = {}
    for part in made.modules():
        # Not eval(), which a user may have overridden to write to weights.
        part.training = False
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and "_hooks" not in name:
                vars(part)[name] = _rebound(value, twins, functions)
    return made


def _rebound(value: Any, twins: dict[int, nn.Module], functions: dict[int, FunctionType], depth: int = 0) -> Any:
    """A value of the copy with functions that hold modules of the copy, where they held those of the original."""
    if type(value) in (list, tuple, dict, OrderedDict) and depth < _DEPTH:
        items = value.values() if isinstance(value, dict) else value
        made = [_rebound(item, twins, functions, depth + 1) for item in items]
        # Most hold none; theirs stay the same objects, which two modules may share.
        if all(new is old for new, old in zip(made, items, strict=True)):
            return value
        return type(value)(zip(value, made, strict=True) if isinstance(value, dict) else made)
    if not isinstance(value, FunctionType) or not _holds(value, twins):
        return twins.get(id(value), value)
    if id(value) not in functions:
        cells = tuple(CellType() for _ in value.__closure__ or ())
        twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        # Before its cells are filled: a function may hold itself.
        functions[id(value)] = twin
        twin.__dict__.update(value.__dict__)
        twin.__defaults__ = _rebound(value.__defaults__, twins, functions)
        twin.__kwdefaults__ = _rebound(value.__kwdefaults__, twins, functions)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if old != CellType():
                cell.cell_contents = _rebound(old.cell_contents, twins, functions)
    return functions[id(value)]


def _holds(function: FunctionType, twins: dict[int, nn.Module], seen: tuple[FunctionType, ...] = ()) -> bool:
    """Whether a function reaches a module of the original through its closure or its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    for item in (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if id(item) in twins:
            return True
        if isinstance(item, FunctionType) and item not in seen and _holds(item, twins, (*seen, function)):
            return True
    return False


def _without_ours(hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
    for key in [key for key, hook in hooks.items() if isinstance(hook, OwnThreadHook)]:
        del hooks[key]
    return hooks


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, dict)) and depth < _DEPTH:
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors(item, depth + 1)

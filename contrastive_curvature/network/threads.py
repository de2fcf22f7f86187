"""Modes, hooks and copies of a module that do not disturb other threads, which may use the module at the same time.

The mode, the hooks and the parameters of a module are shared by all threads of a process. A lock would not protect
them: other threads run the user's code, which does not know the lock.
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
"""Depth to which lists and dictionaries in a module are searched; a list may contain itself."""


class _SwitchedModule:
    """A module in evaluation mode, its mode before, and the number of callers that need evaluation mode now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.mode = module.training
        self.users = 0


_switched: dict[int, _SwitchedModule] = {}
_switched_lock = threading.RLock()
"""Protects ``_switched`` only, and is never held while user code runs."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and restore its mode afterwards.

    If several threads do this to one module, the last thread to finish restores the mode that the module had before the
    first: no thread computes in a mode chosen by another. Modules already in evaluation mode are left alone.
    """
    modules = list(model.modules())
    entries: list[_SwitchedModule] = []
    with _switched_lock:
        for module in modules:
            if id(module) in _switched or module.training:
                entry = _switched.setdefault(id(module), _SwitchedModule(module))
                entry.users += 1
                entries.append(entry)
    try:
        if entries:
            # Needed even if another thread has registered all of them: that thread may not have called eval() yet.
            model.eval()
        yield
    finally:
        with _switched_lock:
            for entry in entries:
                entry.users -= 1
                if not entry.users:
                    del _switched[id(entry.module)]
                    entry.module.training = entry.mode


class OwnThreadHook:
    """A hook on a module that acts only in the thread that created the hook, and only until :meth:`stop`.

    Args:
        function: Called with the arguments of the hook; ``None`` for a hook that does nothing.
    """

    _hidden_from_compiler: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self._thread = threading.get_ident()

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        """Run the function if this is the thread that created the hook."""
        # torch registers a hook before it notes that the hook takes keywords. Another thread may run the module between
        # the two, without the keywords: hence any number of arguments.
        if self._function is None or threading.get_ident() != self._thread:
            return None
        return self._function(module, *rest)

    @classmethod
    def hide(cls) -> None:
        """Exclude hooks from torch.compile, which would treat the identity of the compiling thread as a constant."""
        # If torch.compile is not in use there is nothing to exclude, and importing its compiler takes a second.
        if "torch._dynamo" in sys.modules and not cls._hidden_from_compiler:
            cls._hidden_from_compiler = True
            cls.__call__ = torch.compiler.disable(cls.__call__)  # type: ignore[method-assign]

    def stop(self) -> None:
        """Disable the hook, including every copy of the table of hooks that refers to it."""
        self._function = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnThreadHook:
        """A copy of the module, made by another thread, gets a hook that does nothing."""
        return OwnThreadHook(None)

    def __reduce__(self) -> Any:
        """A saved module, written by another thread, holds a hook that does nothing."""
        return OwnThreadHook, (None,)


@contextmanager
def watched(
    modules: Iterable[nn.Module],
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    after: Callable[[nn.Module, tuple[Any, ...], Any], Any] | None = None,
) -> Iterator[None]:
    """Register hooks that observe runs of some modules in this thread, and remove the hooks afterwards.

    Args:
        modules: The modules to observe.
        before: Called with module, positional and keyword arguments before a run. A return value other than ``None``
            replaces the arguments.
        after: Called with module, positional arguments and output after a run. A return value other than ``None``
            replaces the output.
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
    """The forward hooks that the user has registered on a module; ``before_only`` gives the forward pre-hooks only."""
    tables = [module._forward_pre_hooks] if before_only else [module._forward_pre_hooks, module._forward_hooks]
    return [hook for table in tables for hook in list(table.values()) if not isinstance(hook, OwnThreadHook)]


def private_copy(module: _Module, *, forward_hooks: bool = True, backward_hooks: bool = True) -> _Module:
    """A copy in evaluation mode, with new module objects that share every tensor with the original.

    Replacing the parameters of the copy, or registering hooks on the copy, does not change the original.

    Args:
        module: The original.
        forward_hooks: Whether the copy keeps the user's forward hooks.
        backward_hooks: Whether the copy keeps the user's backward hooks.

    Returns:
        The copy. Functions stored in the modules refer to the copied modules through their closures and defaults. A
        function that reaches a module in another way, such as a global variable, still runs the original.

    Raises:
        UnsupportedError: The module has a ``__deepcopy__`` that copies its parameters.
        Exception: An object in the module cannot be copied; the error is that of its class.
    """
    memo: dict[int, Any] = {}
    shared: list[Any] = [*module.parameters(), *module.buffers()]
    replaced: list[Any] = []
    for part in module.modules():
        # A list, because another thread may set an attribute or register a hook during the iteration.
        for name, value in list(vars(part).items()):
            if isinstance(value, OrderedDict) and "_hooks" in name:
                keeps = (forward_hooks and name.startswith("_forward")) or (
                    backward_hooks and name.startswith("_backward")
                )
                replaced.append(value)
                # The hooks themselves are not copied: a hook may refer to objects that cannot be copied.
                memo[id(value)] = _without_own_hooks(value.copy()) if keeps else OrderedDict()
            else:
                # Activations that a forward pass stored as attributes have a graph, and cannot be copied.
                shared.extend(_tensors(value))
    memo.update((id(tensor), tensor) for tensor in shared)
    copied = copy.deepcopy(module, memo)
    if [id(p) for p in copied.parameters()] != [id(p) for p in module.parameters()]:
        msg = f"model: a copy of its {type(module).__name__} has other parameters. Remove __deepcopy__ from its class."
        raise UnsupportedError(msg)
    copies = {id(part): memo[id(part)] for part in module.modules() if id(part) in memo}
    functions: dict[int, FunctionType] = {}
    for part in copied.modules():
        # Not eval(): the user may have overridden it with a method that changes the weights.
        part.training = False
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and "_hooks" not in name:
                vars(part)[name] = _rebind(value, copies, functions)
    return copied


def _rebind(value: Any, copies: dict[int, nn.Module], functions: dict[int, FunctionType], depth: int = 0) -> Any:
    """Replace functions in ``value`` that refer to modules of the original by functions that refer to their copies."""
    if type(value) in (list, tuple, dict, OrderedDict) and depth < _DEPTH:
        items = value.values() if isinstance(value, dict) else value
        rebound = [_rebind(item, copies, functions, depth + 1) for item in items]
        # A container without such functions stays the same object, because two modules may share it.
        if all(new is old for new, old in zip(rebound, items, strict=True)):
            return value
        return type(value)(zip(value, rebound, strict=True) if isinstance(value, dict) else rebound)
    if not isinstance(value, FunctionType) or not _refers_to_module(value, copies):
        return copies.get(id(value), value)
    if id(value) not in functions:
        cells = tuple(CellType() for _ in value.__closure__ or ())
        rebound_function = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        # Registered before the cells are filled, because a function may refer to itself.
        functions[id(value)] = rebound_function
        rebound_function.__dict__.update(value.__dict__)
        rebound_function.__defaults__ = _rebind(value.__defaults__, copies, functions)
        rebound_function.__kwdefaults__ = _rebind(value.__kwdefaults__, copies, functions)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if old != CellType():
                cell.cell_contents = _rebind(old.cell_contents, copies, functions)
    return functions[id(value)]


def _refers_to_module(
    function: FunctionType, copies: dict[int, nn.Module], seen: tuple[FunctionType, ...] = ()
) -> bool:
    """Whether a function reaches a module of the original through its closure or its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    for item in (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if id(item) in copies:
            return True
        if isinstance(item, FunctionType) and item not in seen and _refers_to_module(item, copies, (*seen, function)):
            return True
    return False


def _without_own_hooks(hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
    for key in [key for key, hook in hooks.items() if isinstance(hook, OwnThreadHook)]:
        del hooks[key]
    return hooks


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, dict)) and depth < _DEPTH:
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors(item, depth + 1)

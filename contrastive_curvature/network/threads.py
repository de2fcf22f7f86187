"""Modes, hooks and copies of a module that do not disturb other threads, which may use the module at the same time.

The mode, the hooks and the parameters of a module are shared by all threads of a process. A lock would not protect
them: other threads run the user's code, which does not know the lock.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from contrastive_curvature.errors import UnsupportedError

_Module = TypeVar("_Module", bound=nn.Module)


_modes: dict[nn.Module, bool] = {}
"""The earlier modes of modules that are in evaluation mode now."""
_callers: Counter[nn.Module] = Counter()
"""The number of callers that need a module in evaluation mode."""
_lock = threading.RLock()
"""Protects these two, and is never held while user code runs."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and restore its mode afterwards.

    If several threads do this to one module, the last thread to finish restores the mode that the module had before the
    first: no thread computes in a mode chosen by another. Modules already in evaluation mode are left alone.
    """
    modules = list(model.modules())
    with _lock:
        switched = [module for module in modules if module in _modes or module.training]
        for module in switched:
            _modes.setdefault(module, module.training)
        _callers.update(switched)
    if not switched:
        yield
        return
    try:
        # Needed even if another thread has registered all of them: that thread may not have called eval() yet.
        model.eval()
        yield
    finally:
        with _lock:
            _callers.subtract(switched)
            for module in switched:
                if not _callers[module]:
                    del _callers[module]
                    module.training = _modes.pop(module)


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

    def __reduce__(self) -> Any:
        """Leave a hook that does nothing in a module that another thread copies or saves meanwhile."""
        return OwnThreadHook, (None,)


@contextmanager
def watched(
    modules: Iterable[nn.Module],
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    after: Callable[[nn.Module, tuple[Any, ...], Any], Any] | None = None,
) -> Iterator[None]:
    """Observe runs of some modules in this thread, as torch's forward hooks do, while inside ``with``.

    Args:
        modules: The modules to observe.
        before: Called with module, positional and keyword arguments; may return other arguments.
        after: Called with module, positional arguments and output; may return another output.
    """
    OwnThreadHook.hide()
    hooks: list[OwnThreadHook] = []
    handles: list[RemovableHandle] = []
    try:
        for module in modules:
            if before is not None:
                hooks.append(OwnThreadHook(before))
                handles.append(module.register_forward_pre_hook(hooks[-1], with_kwargs=True))
            if after is not None:
                hooks.append(OwnThreadHook(after))
                handles.append(module.register_forward_hook(hooks[-1]))
        yield
    finally:
        for hook in hooks:
            hook.stop()
        for handle in handles:
            handle.remove()


def users_hooks(module: nn.Module) -> list[Any]:
    """Return the forward hooks that the user has registered on a module."""
    tables = module._forward_pre_hooks, module._forward_hooks
    return [hook for table in tables for hook in list(table.values()) if not isinstance(hook, OwnThreadHook)]


def private_copy(module: _Module) -> _Module:
    """Return a copy in evaluation mode with module objects of its own, which share every tensor with the original.

    Of the hooks, it has the user's forward hooks. A function that reaches a module in another way than through
    attributes, such as a closure, runs the original.

    Raises:
        UnsupportedError: The module has a ``__deepcopy__`` that copies its parameters.
        Exception: An object in the module cannot be copied; the object's class determines the error.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        # A copy, because another thread may set an attribute or register a hook during the iteration.
        attributes = vars(part).copy()
        # Activations that a forward pass stored have a graph, and cannot be copied either.
        memo.update((id(t), t) for t in tree_leaves(list(attributes.values())) if isinstance(t, Tensor))
        for name, value in attributes.items():
            if isinstance(value, OrderedDict) and "_hooks" in name:
                # The hooks themselves are not copied: a hook may refer to objects that cannot be copied.
                hooks = value.copy().items() if name.startswith("_forward") else ()
                memo[id(value)] = OrderedDict((key, hook) for key, hook in hooks if not isinstance(hook, OwnThreadHook))
    copied = copy.deepcopy(module, memo)
    if [id(p) for p in copied.parameters()] != [id(p) for p in module.parameters()]:
        raise UnsupportedError(
            f"model: a copy of its {type(module).__name__} has other parameters. Remove __deepcopy__ from its class."
        )
    for part in copied.modules():
        # Not eval(): the user may have overridden it with a method that changes the weights.
        part.training = False
    return copied

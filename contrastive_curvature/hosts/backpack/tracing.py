"""Tracing a copy of an encoder with torch.fx, so that nothing of a trace stays in the user's modules.

``torch.fx.Tracer.trace`` itself patches ``nn.Module``, functions of the user's Python modules and a flag of torch for
the whole process, and another thread that runs any module meanwhile fails. Here the modules of the copy get a class of
their own, and no other module notices.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.backpack.layers import ADVICE, known_layers
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.threads import private_copy

__all__ = ["IN_PLACE_OPERATORS", "trace"]

IN_PLACE_OPERATORS = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
)


class _Proxy(fx.Proxy):
    """Records ``h += g`` as what it is; torch.fx itself takes it for ``h = h + g``."""


def _record_in_place(function: Any) -> None:
    def method(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Proxy, f"__{function.__name__}__", method)


for _function in IN_PLACE_OPERATORS:
    _record_in_place(_function)


class _Tracer(fx.Tracer):
    """Stops at the layers that have derivatives, and at the end of the raw network.

    Args:
        root: The copy; its modules get another class, and are of no use for anything else.
        tap: The module of it that takes the raw outputs, if there is one.
    """

    def __init__(self, root: nn.Module, tap: nn.Module | None) -> None:
        super().__init__()
        self.root = root
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}
        # torch's own is one for all tracers of the process.
        self._qualname_counter = defaultdict(int)
        self._tap = tap
        self._names = {id(m): name for name, m in root.named_modules()}
        self._proxies: dict[str, fx.Proxy] = {}
        kinds = {type(m) for m in root.modules()}
        recording = {kind: _recording(kind, self) for kind in kinds if not issubclass(kind, torch.jit.ScriptModule)}
        self._kinds = {id(m): type(m) for m in root.modules()}
        for module in root.modules():
            if type(module) in recording:
                module.__class__ = recording[type(module)]

    def record(self) -> fx.Graph:
        """Run the copy on a placeholder."""
        x = self.create_proxy("placeholder", "x", (), {})
        self.create_node("output", "output", (self.create_arg(self.root(x)),), {})
        return self.graph

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of the copy does when it is called."""
        name = self._names.get(id(module))
        if name is None:
            msg = f"a {type(module).__name__} that is no part of the model is called"
            raise NameError(msg)
        kind = self._kinds[id(module)]
        if module is self._tap or kind in known_layers() or self.is_leaf_module(module, name):
            return self.create_proxy("call_module", name, args, kwargs)
        if type(module).__name__ == "OptimizedModule":
            # torch.compile's own forward would compile for placeholders.
            return module.get_submodule("_orig_mod")(*args, **kwargs)
        # Without hooks: those of a model that its user extended for BackPACK take tensors only.
        return module.forward(*args, **kwargs)

    def attribute(self, name: str, value: Any) -> Any:
        """What a module of the copy has as an attribute: a parameter is recorded too."""
        return self.getattr(name, value, self._proxies)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, nn.Parameter):
            _refuse_reference()
        return super().create_arg(a)


def _refuse_reference() -> None:
    # A module of the copy hands out recorded parameters, so this one came another way.
    msg = "a parameter is used through a reference that a copy does not share"
    raise NameError(msg)


class _Quiet(nn.Module):
    """Before a user's class: does not tell it of the subclass, of which it may keep a list."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Nothing."""


class _Recorder(nn.Module):
    """Behind a user's class: takes the place of ``nn.Module``, to which its own methods may lead."""

    __slots__ = ()
    _tracer: _Tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)._tracer.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return type(self)._tracer.attribute(name, super().__getattr__(name))


def _recording(kind: type[nn.Module], tracer: _Tracer) -> type[nn.Module]:
    """A class of modules that record what they do, and are as before for everything else."""
    names = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda _: kind),
        "_tracer": tracer,
    }
    # Not by a call: a metaclass of the user's may keep a list too.
    return type.__new__(type(kind), kind.__name__, (_Quiet, kind, _Recorder), names)


def trace(encoder: Encoder) -> tuple[fx.Graph, nn.Module]:
    """The graph of an encoder, and the module that its targets are names in.

    Raises:
        UnsupportedError: It cannot be copied, or its forward cannot be traced.
    """
    # A root of its own: a network that is one layer shall be seen as a layer, not as its insides.
    root = nn.Sequential(encoder.model)
    try:
        twin = private_copy(root, forward_hooks=False, backward_hooks=False)
    except Exception as error:
        raise UnsupportedError(_cannot(encoder, "copied, which tracing it takes,", error)) from error
    kinds = [[(name, type(m)) for name, m in module.named_modules()] for module in (root, twin)]
    if kinds[0] != kinds[1]:
        msg = f"backend BackPACK: a copy of {type(encoder.model).__name__} has other modules than itself. {ADVICE}"
        raise UnsupportedError(msg)
    tap = next((name for name, m in root.named_modules() if m is encoder.tap), None)
    try:
        # Without gradients: a module outside of the copy that is called might keep what it is given.
        with torch.no_grad():
            return _Tracer(twin, None if tap is None else twin.get_submodule(tap)).record(), root
    except Exception as error:
        raise UnsupportedError(_cannot(encoder, "traced by torch.fx", error)) from error


def _cannot(encoder: Encoder, done: str, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"backend BackPACK: the forward of {type(encoder.model).__name__} cannot be {done} ({reason}). {ADVICE}"

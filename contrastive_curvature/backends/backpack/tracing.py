"""Tracing a copy of an encoder with torch.fx, so that nothing of a trace stays in the user's modules."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from contrastive_curvature.backends.backpack.layers import ADVICE, known_layers
from contrastive_curvature.encoder import Encoder
from contrastive_curvature.errors import UnsupportedError

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
        tap: The copy of the module that takes the raw outputs, if there is one.
        originals: Names of the modules that were copied, by id.
    """

    def __init__(self, tap: nn.Module | None, originals: dict[int, str]) -> None:
        super().__init__()
        self.tap = tap
        self.originals = originals

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is self.tap or type(m) in known_layers() or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: nn.Module) -> str:
        # A closure may hold a module of the network itself, which is as good as its copy as long as it is not run.
        return self.originals.get(id(mod)) or super().path_of_module(mod)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(m) in self.originals and not self.is_leaf_module(m, self.originals[id(m)]):
            msg = f"{self.originals[id(m)]!r} is called through a reference that a copy does not share"
            raise NameError(msg)
        # Without hooks: those of a model that its user extended for BackPACK take tensors only.
        return super().call_module(m, m.forward, args, kwargs)


def trace(encoder: Encoder) -> tuple[fx.Graph, nn.Module]:
    """The graph of an encoder, and the module that its targets are names in.

    Raises:
        UnsupportedError: It cannot be copied, or its forward cannot be traced.
    """
    # A root of its own: a network that is one layer shall be seen as a layer, not as its insides.
    root = nn.Sequential(encoder.model)
    memo = _shared(root)
    try:
        twin = copy.deepcopy(root, memo)
        tap = None if encoder.tap is None else memo[id(encoder.tap)]
    except Exception as error:
        raise UnsupportedError(_cannot(encoder, "copied, which tracing it takes,", error)) from error
    kinds = [[(name, type(m)) for name, m in module.named_modules()] for module in (root, twin)]
    if kinds[0] != kinds[1]:
        msg = f"backend BackPACK: a copy of {type(encoder.model).__name__} has other modules than itself. {ADVICE}"
        raise UnsupportedError(msg)
    try:
        return _Tracer(tap, {id(m): name for name, m in root.named_modules()}).trace(twin.eval()), root
    except Exception as error:
        raise UnsupportedError(_cannot(encoder, "traced by torch.fx", error)) from error


def _cannot(encoder: Encoder, done: str, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"backend BackPACK: the forward of {type(encoder.model).__name__} cannot be {done} ({reason}). {ADVICE}"


def _shared(root: nn.Module) -> dict[int, Any]:
    """The memo of a deep copy that shares every tensor and drops every hook."""
    memo: dict[int, Any] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        memo[id(tensor)] = tensor
    for module in root.modules():
        for name, value in vars(module).items():
            if isinstance(value, OrderedDict) and name.endswith("_hooks"):
                # A hook may hold anything; a trace does not run it.
                memo[id(value)] = OrderedDict()
            # Activations that a forward stored cannot be copied, and need not be.
            memo.update((id(tensor), tensor) for tensor in _tensors(value))
    return memo


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)

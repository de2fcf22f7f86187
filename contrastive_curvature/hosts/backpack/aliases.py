"""In-place operations that more than their own result can see; a trace has every result in memory of its own."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.backpack.graph import ADDITIONS, FUNCTIONS, called_module
from contrastive_curvature.hosts.backpack.layers import ADVICE, PASSED_ON
from contrastive_curvature.hosts.backpack.tracing import IN_PLACE_OPERATORS

__all__ = ["refuse_shared_writes"]


def refuse_shared_writes(graph: fx.Graph, root: nn.Module) -> None:
    """Refuse an operation that overwrites the network's input, or what another operation takes too.

    Args:
        graph: All of it: the result of what works in place need not be used.
        root: The module that its targets are names in.

    Raises:
        UnsupportedError: There is one; the message names it.
    """
    for node in graph.nodes:
        if not _writes(root, node):
            continue
        waiting, seen = _written(node), set()
        while waiting:
            source = waiting.pop()
            if source in seen:
                continue
            seen.add(source)
            if len(source.users) > 1 or source.op == "placeholder":
                what = "the input of the network" if source.op == "placeholder" else f"{source.name!r}, used elsewhere"
                msg = f"backend BackPACK: {node.name!r} works in place on {what}. Make it out-of-place, or: {ADVICE}"
                raise UnsupportedError(msg)
            if not _is_new(root, source):
                # Its memory is that of what it was made from.
                waiting.extend(_written(source) if _writes(root, source) else source.all_input_nodes)


def _written(node: fx.Node) -> list[fx.Node]:
    """What an operation in place writes to, and returns."""
    first: tuple[Any, ...] = node.args[:1] or tuple(node.kwargs.values())[:1]
    return [a for a in (*first, node.kwargs.get("out")) if isinstance(a, fx.Node)]


def _writes(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = called_module(root, node)
        # In evaluation mode those return what they got, `inplace` or not.
        return bool(getattr(module, "inplace", False)) and not isinstance(module, PASSED_ON)
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in IN_PLACE_OPERATORS or node.target is operator.setitem:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    # F.relu(h, True)
    in_functional = getattr(node.target, "__module__", "") == nn.functional.__name__
    return in_functional and any(a is True for a in node.args[1:])


def _is_new(root: nn.Module, node: fx.Node) -> bool:
    """Whether a result is known to have memory of its own."""
    if _writes(root, node):
        return False
    if node.op == "call_module":
        return not isinstance(called_module(root, node), (*PASSED_ON, nn.Flatten, nn.Unflatten))
    return node.op in ("call_function", "call_method") and (node.target in ADDITIONS or node.target in FUNCTIONS)

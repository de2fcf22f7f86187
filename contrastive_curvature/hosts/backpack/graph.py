"""Reading a traced graph: which modules run on what, up to the raw outputs, without running or changing any of them."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from typing import Any

import torch
from torch import fx, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.backpack.layers import ADVICE

__all__ = ["ADDITIONS", "FUNCTIONS", "ancestors", "as_module", "called_module", "shallow_copy"]

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
FUNCTIONS: dict[Any, type[nn.Module]] = {
    torch.relu: nn.ReLU,
    nn.functional.relu: nn.ReLU,
    "relu": nn.ReLU,
    torch.tanh: nn.Tanh,
    nn.functional.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    nn.functional.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
}


def ancestors(end: Any) -> set[fx.Node]:
    """A node and everything that it is computed from.

    Raises:
        UnsupportedError: ``end`` is no node.
    """
    if not isinstance(end, fx.Node):
        msg = f"backend BackPACK: the encoder returns no plain tensor. {ADVICE}"
        raise UnsupportedError(msg)
    reached, waiting = {end}, [end]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in reached:
                reached.add(node)
                waiting.append(node)
    return reached


def called_module(root: nn.Module, node: fx.Node) -> nn.Module:
    """The module that a node calls."""
    return root.get_submodule(str(node.target))


def as_module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """The module that a node is; ``None`` for a sum of two tensors.

    Raises:
        UnsupportedError: There is none.
    """
    tensors = [a for a in node.args if isinstance(a, fx.Node)]
    if node.op == "call_module":
        return called_module(root, node)
    if node.op in ("call_function", "call_method"):
        if node.target in ADDITIONS and len(tensors) == len(node.args) == 2 and not node.kwargs:
            return None
        if node.target in FUNCTIONS and len(tensors) == 1:
            return FUNCTIONS[node.target]()
        if node.target in (torch.flatten, "flatten") and len(tensors) == 1:
            axes: dict[str, Any] = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False))
            axes.update(node.kwargs)
            return nn.Flatten(**{"start_dim": 0, **axes})
    shown = getattr(node.target, "__name__", node.target)
    msg = f"backend BackPACK: the encoder uses {shown!r}, which is no layer that BackPACK has derivatives of. {ADVICE}"
    raise UnsupportedError(msg)


def shallow_copy(module: Any) -> Any:
    """A copy that shares parameters and buffers, without hooks, in evaluation mode, and never in place."""
    twin = copy.copy(module)
    for name in [key for key in vars(twin) if key == "output" or (key.startswith("input") and key[5:].isdigit())]:
        del twin.__dict__[name]
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        twin.__dict__[name] = OrderedDict()
    twin.training = False
    if getattr(twin, "inplace", False):
        twin.inplace = False
    if isinstance(getattr(twin, "padding", None), str):
        same = twin.padding == "same"
        pads = zip(twin.dilation, twin.kernel_size, strict=True)
        twin.padding = tuple(d * (k - 1) // 2 if same else 0 for d, k in pads)
    return twin

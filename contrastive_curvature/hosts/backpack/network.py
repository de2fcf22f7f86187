"""A network as a list of BackPACK layers: traced once, run and pulled back without autograd and without hooks.

The user's modules are never written to: every call of a module in the graph gets a shallow copy of it, which shares the
parameters and alone carries BackPACK's ``input0`` and ``output``. Every run has such copies of its own, so that threads
may share a network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from backpack.custom_module.branching import SumModule
from torch import Tensor, fx, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.backpack.aliases import refuse_shared_writes
from contrastive_curvature.hosts.backpack.graph import ancestors, as_module, called_module, shallow_copy
from contrastive_curvature.hosts.backpack.layers import ADVICE, PASSED_ON, check_layer, known_layers, refuse
from contrastive_curvature.hosts.backpack.tracing import trace
from contrastive_curvature.network.encoder import Encoder

__all__ = ["Network", "Step"]


@dataclass
class Step:
    """One layer of the graph.

    Args:
        name: Of the node.
        inputs: Names of the nodes that it takes; more than one for a sum.
        module: A shallow copy of the layer; ``None`` for a sum, and for what passes its input on.
        derivatives: BackPACK's derivatives of the layer.
        params: Name on the module, and position among the trainable parameters.
        needed: Whether a trainable parameter lies in or before this step.
    """

    name: str
    inputs: list[str]
    module: Any = None
    derivatives: Any = None
    params: list[tuple[str, int]] = field(default_factory=list)
    needed: bool = False


class Network:
    """The graph of an encoder up to its raw outputs.

    Args:
        encoder: The analysed encoder.

    Attributes:
        params: Its trainable parameters.
        width: Numbers per point in the widest layer of a run.

    Raises:
        UnsupportedError: It cannot be traced, a layer has no derivatives in BackPACK, or is called with more than its
            input, a parameter is shared, or something works in place on what is used elsewhere.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.params = [p for p in encoder.parameters() if p.requires_grad]
        self._positions = {id(p): k for k, p in enumerate(self.params)}
        self._names = {id(m): name for name, m in encoder.model.named_modules()}
        graph, root = trace(encoder)
        refuse_shared_writes(graph, root)
        end = next(node for node in graph.nodes if node.op == "output").args[0]
        taps = [n for n in graph.nodes if n.op == "call_module" and called_module(root, n) is encoder.tap]
        if encoder.tap is not None and taps:
            tap = taps[encoder.tap_run]
            end = (*tap.args, *tap.kwargs.values())[0]
        self.steps: list[Step] = []
        self.width = 1
        self._needed: dict[str, bool] = {}
        self._source = self._output = ""
        owned: dict[int, str] = {}
        reached = ancestors(end)
        for node in graph.nodes:
            if node in reached:
                self._add(node, root, owned)
        self._output = end.name

    def own(self) -> Network:
        """The same network, for one run and what follows from it: what its layers keep, nobody else sees."""
        made = copy.copy(self)
        made.steps = [replace(step, module=copy.copy(step.module)) for step in self.steps]
        return made

    def run(self, x: Tensor) -> Tensor:
        """Raw outputs (N, D); every layer keeps its input and output. Of :meth:`own` networks only."""
        values, self.width = {self._source: x}, 1
        for step in self.steps:
            came = [values[name] for name in step.inputs]
            if step.module is None:
                for other in came[1:]:
                    if other.shape != came[0].shape:
                        msg = f"backend BackPACK: {step.name!r} adds tensors of different shapes. {ADVICE}"
                        raise UnsupportedError(msg)
                values[step.name] = came[0] if len(came) == 1 else torch.stack(came).sum(0)
            else:
                step.module.input0 = came[0]
                step.module.output = values[step.name] = step.module.forward(came[0])
            self.width = max(self.width, values[step.name][:1].numel(), *(value[:1].numel() for value in came))
        return values[self._output]

    def layers(self, columns: Tensor) -> Iterator[tuple[Step, Tensor]]:
        """Pull columns back after :meth:`run`, layer by layer, last first.

        Args:
            columns: Cotangents of the raw outputs, shape (C, N, D).

        Yields:
            Every layer with trainable parameters, and the columns (C, N, ...) at its output.
        """
        arrived = {self._output: columns}
        for step in reversed(self.steps):
            here = arrived.pop(step.name, None)
            if here is None or not step.needed:
                continue
            if step.params:
                yield step, here
            wanted = [name for name in step.inputs if self._needed.get(name)]
            if step.module is not None and wanted:
                here = step.derivatives.jac_t_mat_prod(step.module, None, None, here)
            for name in wanted:
                arrived[name] = here if name not in arrived else arrived[name] + here

    def _add(self, node: fx.Node, root: nn.Module, owned: dict[int, str]) -> None:
        if node.op == "placeholder":
            self._source = node.name
            return
        inputs = [a.name for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
        step = Step(node.name, inputs)
        module = as_module(root, node)
        if node.op == "call_module":
            given = (*node.args, *node.kwargs.values())
            if len(inputs) != len(given) or (len(inputs) != 1 and not isinstance(module, SumModule)):
                # What is no tensor of the graph (an output_size) would be dropped.
                called = called_module(root, node)
                refuse(self._names.get(id(called)) or node.name, called, "it takes more than one input")
        if module is not None and not isinstance(module, (*PASSED_ON, SumModule)):
            name = self._names.get(id(module)) or node.name
            if len(inputs) != 1:
                # A function, with a tensor by keyword.
                refuse(name, module, "it takes more than one input")
            check_layer(name, module)
            layer = known_layers()[type(module)]
            step.module, step.derivatives = shallow_copy(module), layer.derivatives
            for key, p in module.named_parameters():
                if id(p) in owned and p.requires_grad:
                    refuse(name, module, f"its parameter {key!r} is used twice, first by {owned[id(p)]!r}")
                owned[id(p)] = name
            step.params = [
                (key, self._positions[id(p)]) for key, p in module.named_parameters() if id(p) in self._positions
            ]
        step.needed = bool(step.params) or any(self._needed.get(name, False) for name in inputs)
        self._needed[step.name] = step.needed
        self.steps.append(step)

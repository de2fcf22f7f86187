"""Runs an encoder with BackPACK's extensions, and leaves no trace in the user's modules or in the process.

BackPACK stores results on parameters and inputs on modules, and its context sets the extensions for the whole process.
So each pass makes shallow copies of the layers, with their own parameter objects (the numbers are shared), and calls
the extensions itself, in the order in which autograd reaches the layers' outputs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from backpack.custom_module.branching import SumModule
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hosts.backpack.extensions import SignedExtension
from contrastive_curvature.hosts.backpack.layers import ADVICE, check_layer, known_layers, refuse
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.threads import private_copy, watched


class HostedEncoder:
    """A copy of an encoder; refuses a parameter of two layers, or of a layer that BackPACK does not know.

    Attributes:
        params: The trainable parameters of the original.
        layers: Modules of the copy with a rule in the host, and their names.
        others: Modules without a rule and without submodules, and their names.
        in_place: Layers that overwrite their input in the user's model, but not in the copy.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.params = [p for p in encoder.parameters() if p.requires_grad]
        self.encoder = _copied(encoder)
        self.layers: dict[nn.Module, str] = {}
        self.others: dict[nn.Module, str] = {}
        self.in_place: set[nn.Module] = set()
        owners: dict[int, str] = {}
        for name, module in self.encoder.model.named_modules():
            own = [(key, p) for key, p in module.named_parameters(recurse=False) if p.requires_grad]
            known = type(module) in known_layers()
            if known:
                self.layers[module] = name
            elif own:
                refuse(name, module, "BackPACK has no derivatives of it")
            elif next(module.children(), None) is None:
                self.others[module] = name
            for key, p in own:
                if id(p) in owners:
                    refuse(name, module, f"its parameter {key!r} is used twice, first by {owners[id(p)]!r}")
                owners[id(p)] = name
            if known and own:
                check_layer(name, module)
            if known and getattr(module, "inplace", False):
                module.inplace = False
                self.in_place.add(module)


class Pass:
    """One forward pass of a batch of N points, and any number of backward passes with our extensions.

    Attributes:
        z: Raw outputs, shape (N, D), with a graph.
        width: Numbers per point in the widest layer.
    """

    def __init__(self, hosted: HostedEncoder, x: Tensor) -> None:
        self._hosted = hosted
        self._extensions: tuple[SignedExtension, ...] = ()
        self._made: dict[int, tuple[Tensor, int]] = {}
        self._overwritten: dict[int, Tensor] = {}
        self._twins: dict[int, nn.Parameter] = {}
        self._ran: set[nn.Module] = set()
        self._ends: list[Tensor] = []
        self._over = False
        self.width = 1
        encoder = hosted.encoder
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            watched([] if encoder.normalization is None else [encoder.normalization], before=self._end),
            watched(hosted.layers, before=self._check_call, after=self._follow),
            watched(hosted.others, after=self._check_other),
        ):
            out = encoder.model(x.detach().clone())
        self.z: Tensor = self._ends[-1] if self._over else out
        self._require_seen(self.z, "the end of the network")

    def pull(self, factor: SignedFactor, *extensions: SignedExtension) -> list[list[Any]]:
        """Run extensions from a factor at the outputs back to the parameters.

        Returns:
            For every extension, its value for each trainable parameter; ``None`` if the parameter gets no gradient.
        """
        if self.z.requires_grad:
            self._extensions = extensions
            for extension in extensions:
                extension.start(self.z, factor)
            # The gradient itself is not used: it makes autograd visit the outputs of all layers, last first.
            zero = torch.zeros_like(self.z)
            torch.autograd.grad(self.z, self._hosted.params, zero, allow_unused=True, retain_graph=True)
        twins = [vars(self._twins[id(p)]) if id(p) in self._twins else {} for p in self._hosted.params]
        return [[twin.pop(extension.savefield, None) for twin in twins] for extension in extensions]

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop checking at the input of the normalisation, the raw outputs; any function may follow."""
        if not self._over:
            self._ends.append((*args, *kwargs.values())[0])
            self._over = len(self._ends) > self._hosted.encoder.place.run

    def _check_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._over:
            return
        many = len(args) != 1 and not isinstance(module, SumModule)
        if kwargs or many or not all(isinstance(a, Tensor) for a in args):
            # The host would drop an argument such as output_size.
            refuse(self._hosted.layers[module], module, "it takes more than one input, or none by position")
        for a in args:
            self._require_seen(a, f"layer {self._hosted.layers[module]!r}")

    def _follow(self, module: Any, args: tuple[Tensor, ...], out: Any) -> None:
        """Run the extensions on a layer when the gradient of its output is complete."""
        if self._over:
            return
        if not isinstance(out, Tensor):
            refuse(self._hosted.layers[module], module, "it gives something else than a tensor")
        self.width = max(self.width, *(t[:1].numel() for t in (out, *args)))
        # Dropout in evaluation mode returns its input.
        if any(out is a for a in args):
            return
        if module in self._hosted.in_place:
            self._overwritten[args[0].untyped_storage().data_ptr()] = args[0]
        if not out.requires_grad:
            return
        check_layer(self._hosted.layers[module], module)
        own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        if own and module in self._ran:
            refuse(self._hosted.layers[module], module, "it runs twice, so its parameters are used twice")
        self._ran.add(module)
        twin: Any = copy.copy(module)
        values: dict[str, Any] = {
            name: None if p is None else nn.Parameter(p.detach(), p.requires_grad)
            for name, p in module._parameters.items()
        }
        vars(twin)["_parameters"] = values
        self._twins.update({id(p): values[name] for name, p in own.items()})
        for k, a in enumerate(args):
            setattr(twin, f"input{k}", a)
        twin.output = out
        self._made[id(out)] = out, out._version

        @torch.no_grad()
        def extend(gradient: Tensor) -> None:
            for extension in self._extensions:
                extension(twin, None, (gradient,))

        out.register_hook(extend)

    def _check_other(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        changed = not isinstance(out, Tensor) or (out.requires_grad and id(out) not in self._made)
        if changed and not self._over:
            refuse(self._hosted.others[module], module, "BackPACK has no derivatives of it")

    def _require_seen(self, t: Tensor, taker: str) -> None:
        """Refuse a tensor that is not the unchanged output of a layer, because the host would not notice."""
        if t.untyped_storage().data_ptr() in self._overwritten:
            raise UnsupportedError(
                f"backend BackPACK: {taker} takes what a layer before it overwrote (inplace=True). {ADVICE}"
            )
        known, version = self._made.get(id(t), (None, 0))
        if t.requires_grad and (known is not t or t._version != version):
            raise UnsupportedError(
                f"backend BackPACK: {taker} takes what no layer put out. A function, an operator or a parameter in the "
                "forward of a module leaves no trace in BackPACK. Write it as a module that BackPACK knows "
                f"(backpack.custom_module), or: {ADVICE}"
            )


def _copied(encoder: Encoder) -> Encoder:
    """Return a copy without BackPACK's hooks, which would store and compute results on the user's modules."""
    try:
        copied = private_copy(encoder)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(
            f"backend BackPACK: {type(encoder.model).__name__} cannot be copied ({reason}). {ADVICE}"
        ) from error
    for module in copied.modules():
        # Use the original module, because a compiled module calls no layers.
        if type(module).__name__ == "OptimizedModule":
            vars(module)["forward"] = module.get_submodule("_orig_mod").__call__
    return copied

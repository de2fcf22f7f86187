"""Encoders that went through ``torch.compile``.

Compiled code ignores hooks that came after it, and keeps those that were there when it was made. So what watches the
layers of an encoder runs it as it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from contrastive_curvature.errors import UnsupportedError

__all__ = ["eager", "refuse_compiled", "refuse_compiled_layer", "uncompiled"]


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` was called with, of the same weights; any other as it is."""
    inside = model._modules.get("_orig_mod")
    return model if inside is None else inside


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run compiled parts of a model without their compiled code, so that hooks on their layers see what they do."""
    if not any(_how(module) for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_compiled(model: nn.Module) -> None:
    """Refuse an encoder with compiled parts, of whose weights Jacobians will be needed; wrapped as a whole it may be.

    ``torch.func`` traces them again for every batch and every direction, until torch gives up, and fails in some.

    Raises:
        UnsupportedError: There is one.
    """
    for name, module in uncompiled(model).named_modules():
        if how := _how(module):
            which = f"layer {name!r}" if name else "the encoder"
            msg = (
                f"model: {which} is compiled by {how}, and these weights need Jacobians by torch.func, which a "
                "compiled module does not give. Compile the whole encoder with torch.compile(encoder), or nothing; or "
                "use subset_of_weights='last_layer'."
            )
            raise UnsupportedError(msg)


def refuse_compiled_layer(model: nn.Module, name: str) -> None:
    """Refuse a last layer inside a compiled part of an encoder, where nothing can watch it.

    Args:
        model: The encoder.
        name: Of the last layer.

    Raises:
        UnsupportedError: It is inside one.
    """
    parts = name.split(".") if name else []
    for depth in range(len(parts) + 1):
        outer = ".".join(parts[:depth])
        if how := _how(model.get_submodule(outer)):
            which = f"layer {outer!r}" if outer else "the encoder"
            msg = (
                f"model: {which}, which has or is the last linear layer, is compiled by {how}, and compiled code hides "
                "what goes into that layer. Compile the layers before it alone, as in "
                "nn.Sequential(torch.compile(body), head); or the whole encoder, torch.compile(encoder), which is then "
                "run as it was before."
            )
            raise UnsupportedError(msg)


def _how(module: nn.Module) -> str:
    """What was called to compile a module; empty where nothing was."""
    if "_orig_mod" in module._modules:
        return "torch.compile(module)"
    return "module.compile()" if getattr(module, "_compiled_call_impl", None) is not None else ""

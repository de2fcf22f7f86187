"""Whether an encoder is the one that a posterior was saved from, and if not, in what it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.network.digest import encoder_digest, state_tensors, tensor_bytes
from contrastive_curvature.network.encoder import evaluation_mode

__all__ = ["check_encoder", "check_outputs_at", "encoder_of", "plain_encoder", "raw_outputs"]

_WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel put before the names of parameters."""

_SHOWN = 3

_SAME_OUTPUTS = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Relative difference of the outputs of one encoder on two devices, at most; half precision has 0.1."""


def encoder_of(la: Any) -> nn.Module:
    """The encoder inside a posterior."""
    model: nn.Module = la.model.model if isinstance(la.model, FeatureExtractor) else la.model
    return model


def plain_encoder(model: nn.Module) -> dict[str, Any]:
    """Names, types, shapes and checksums of all parameters and buffers, and one checksum of all of them."""
    return {"digest": encoder_digest(model), "tensors": _records(model)}


def check_encoder(model: nn.Module, saved: Mapping[str, Any], argument: str = "encoder") -> None:
    """Refuse another encoder.

    Args:
        model: What the user gave.
        saved: From :func:`plain_encoder`.
        argument: Its name in the message.

    Raises:
        InputError: A parameter or buffer differs; the message names some that do.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        hint = "Load its weights: encoder.to_empty(device=...), then encoder.load_state_dict(...)."
        raise InputError(expected(argument, "an encoder with its weights", "one on the device meta", hint))
    if encoder_digest(model) == saved["digest"]:
        return
    was, now = ({_bare(name): rest for name, *rest in part} for part in (saved["tensors"], _records(model)))
    missing, more = [name for name in was if name not in now], [name for name in now if name not in was]
    common = [name for name in was if name in now]
    shapes = [name for name in common if was[name][1] != now[name][1]]
    kinds = [name for name in common if was[name][0] != now[name][0]]
    values = [name for name in common if was[name] != now[name] and name not in (*shapes, *kinds)]
    wanted = "the encoder that the posterior was saved from"
    if missing or more:
        came = "; ".join(
            text for text in (_some("is missing", missing, "are missing"), _some("is new", more, "are new")) if text
        )
        hint = "Build the same architecture, and load its weights."
    elif shapes:
        first = shapes[0]
        came = f"another shape of {_some('', shapes)}: {tuple(now[first][1])} instead of {tuple(was[first][1])}"
        hint = "Build the same architecture, and load its weights."
    elif kinds:
        first = kinds[0]
        came = f"{now[first][0]} instead of {was[first][0]} in {_some('', kinds)}"
        hint = f"Load its weights in that precision: a conversion, as encoder.to({was[first][0]}), rounds them."
    elif values:
        came = f"other numbers in {len(values)} of {len(was)} parameters and buffers: {_some('', values)}"
        hint = "Load the encoder's weights first, as encoder.load_state_dict(...); or fit the posterior again."
    else:
        came = "its parameters in another order"
        hint = "Build the same architecture, and load its weights."
    raise InputError(expected(argument, wanted, came, hint))


def raw_outputs(la: Any, x: Any) -> Tensor:
    """Raw outputs (B, D) of a last-layer posterior's encoder for inputs on its device."""
    with evaluation_mode(la.model), torch.no_grad():
        z: Tensor = la.model(x)
    return z.detach()


def check_outputs_at(la: Any, x: Any, saved: Tensor, argument: str = "encoder") -> None:
    """Refuse an encoder that has the weights and still computes something else.

    Args:
        la: A loaded posterior of a last layer.
        x: Inputs that were saved.
        saved: Raw outputs for them, shape (B, D).
        argument: Name of the encoder in the message.

    Raises:
        InputError: The outputs differ by more than the rounding of another device.
    """
    now = raw_outputs(la, x)
    same = now.shape == saved.shape
    off = float((now.double() - saved.to(now.device).double()).norm()) if same else float("nan")
    # Outputs of zero inputs may be zero.
    size = max(float(saved.double().norm()), torch.finfo(torch.float32).tiny)
    # Written so that NaN is refused too.
    if not off <= _SAME_OUTPUTS.get(saved.dtype, 0.1) * size:
        hint = "It has the same weights but other layers between them, as another activation or pooling."
        wanted = "the encoder's outputs for the example inputs in the folder"
        raise InputError(expected(argument, wanted, f"others, {off / size:.2g} of their norm apart", hint))


def _records(model: nn.Module) -> list[list[Any]]:
    return [[name, str(tensor.dtype), list(tensor.shape), _digest(tensor)] for name, tensor in state_tensors(model)]


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for part in tensor_bytes(tensor):
        digest.update(part)
    return digest.hexdigest()[:16]


def _bare(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.removeprefix(prefix)
    return name


def _some(one: str, names: list[str], many: str = "") -> str:
    """The first few of some names, with what is said of them; empty where there are none."""
    if not names:
        return ""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{shown} {one if len(names) == 1 else many}".strip()

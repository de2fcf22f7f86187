"""Whether an encoder is the one that a posterior was saved from, and if not, in what it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError
from contrastive_curvature.network.digest import encoder_digest, state_tensors, tensor_bytes
from contrastive_curvature.network.encoder import Encoder, evaluation_mode

Record = tuple[str, str, list[int], str]
"""Name, type, shape and checksum of a parameter or buffer."""

_SAME_OUTPUTS = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Relative difference of the outputs of one encoder on two devices, at most; half precision has 0.1."""


def encoder_of(la: Any) -> nn.Module:
    """Return the encoder inside a posterior."""
    model: nn.Module = la.model.model if isinstance(la.model, Encoder) else la.model
    return model


def encoder_tensors(model: nn.Module) -> list[Record]:
    """Return the records of all parameters and buffers."""
    return [(name, str(t.dtype), list(t.shape), _checksum(t)) for name, t in state_tensors(model)]


def check_encoder(model: nn.Module, digest: str, saved: Sequence[Record], argument: str) -> None:
    """Refuse another encoder, and name some parameters or buffers that differ.

    Args:
        model: From the user.
        digest: Of the encoder that was saved.
        saved: Its :func:`encoder_tensors`.
        argument: Name of the encoder in the message.
    """
    if any(tensor.is_meta for _, tensor in state_tensors(model)):
        hint = "Load its weights: encoder.to_empty(device=...), then encoder.load_state_dict(...)."
        raise InputError(argument, "an encoder with its weights", "one on the device meta", hint)
    if encoder_digest(model) == digest:
        return
    was, now = _by_name(saved), _by_name(encoder_tensors(model))
    missing, new = [name for name in was if name not in now], [name for name in now if name not in was]
    kinds, shapes, values = ([name for name in was if name in now and was[name][i] != now[name][i]] for i in range(3))
    hint = "Build the same architecture, and load its weights."
    if missing or new:
        gone = [f"{_some(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
        come = [f"{_some(new)} {'is' if len(new) == 1 else 'are'} new"] if new else []
        received = "; ".join(gone + come)
    elif shapes:
        one = shapes[0]
        received = f"another shape of {_some(shapes)}: {tuple(now[one][1])} instead of {tuple(was[one][1])}"
    elif kinds:
        one = kinds[0]
        received = f"{now[one][0]} instead of {was[one][0]} in {_some(kinds)}"
        hint = f"Load its weights in that precision: a conversion, as encoder.to({was[one][0]}), rounds them."
    elif values:
        received = f"other numbers in {len(values)} of {len(was)} parameters and buffers: {_some(values)}"
        hint = "Load the encoder's weights first, as encoder.load_state_dict(...); or fit the posterior again."
    else:
        received = "its parameters in another order"
    raise InputError(argument, "the encoder that the posterior was saved from", received, hint)


def raw_outputs(la: Any, x: Any) -> Tensor:
    """Return raw outputs (B, D) of a last-layer posterior's encoder for inputs on its device."""
    with evaluation_mode(la.model), torch.no_grad():
        z: Tensor = la.model(x)
    return z.detach()


def check_outputs(la: Any, x: Any, saved: Tensor, argument: str) -> None:
    """Refuse an encoder that has the weights and still computes something else.

    Args:
        la: A loaded posterior of a last layer.
        x: Inputs that were saved.
        saved: Raw outputs for them, shape (B, D).
        argument: Name of the encoder in the message.
    """
    off = float((raw_outputs(la, x).double() - saved.double()).norm())
    # Outputs of zero inputs may be zero.
    size = max(float(saved.double().norm()), torch.finfo(torch.float32).tiny)
    # Written so that NaN is refused too.
    if not off <= _SAME_OUTPUTS.get(saved.dtype, 0.1) * size:
        hint = "It has the same weights but other layers between them, as another activation or pooling."
        wanted = "the encoder's outputs for the example inputs in the folder"
        raise InputError(argument, wanted, f"others, {off / size:.2g} of their norm apart", hint)


def _checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for part in tensor_bytes(tensor):
        digest.update(part)
    return digest.hexdigest()[:16]


def _by_name(records: Sequence[Record]) -> dict[str, tuple[str, list[int], str]]:
    # torch.compile and DistributedDataParallel put these before the names.
    return {
        name.removeprefix("_orig_mod.").removeprefix("module."): (kind, shape, checksum)
        for name, kind, shape, checksum in records
    }


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""The few inputs that a saved posterior of a last layer keeps: only what the encoder is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.laplace.prediction import to_device
from contrastive_curvature.network.call import ModelCall
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs, check_inputs, input_length, slice_inputs
from contrastive_curvature.network.texts import tokenized
from contrastive_curvature.pretrained.encoders import encoder_of, raw_outputs

__all__ = ["checked_example", "needed_inputs"]


def checked_example(la: Any, example: Any) -> Inputs:
    """Two inputs, at most, of those that the user gives to save.

    Args:
        la: A fitted posterior of a last layer.
        example: A batch; texts become what the encoder's tokenizer makes of them.

    Raises:
        InputTypeError: Texts, and the encoder has no tokenizer; or no batch.
        InputError: The encoder does not take them, or its outputs are not finite.
    """
    batch = check_inputs(tokenized(encoder_of(la), example, "example"), "example")
    try:
        few = slice_inputs(batch, slice(0, 2))
        outputs = raw_outputs(la, to_device(la, few))
    except Exception as error:  # what an encoder raises at inputs of another kind has no common base
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(expected("example", "inputs that the encoder takes", reason)) from error
    if outputs.ndim != 2 or outputs.shape[1] != la.n_outputs or not len(outputs) or not bool(outputs.isfinite().all()):
        wanted = f"inputs with finite outputs of shape (N, {la.n_outputs})"
        raise InputError(expected("example", wanted, f"outputs of shape {tuple(outputs.shape)}"))
    return few


def needed_inputs(la: Any, x: Inputs) -> Inputs:
    """A batch without the entries of a mapping that do not change the encoder's outputs, as labels and names.

    Args:
        la: A fitted posterior of a last layer.
        x: Inputs that the encoder takes.
    """
    if not isinstance(x, Mapping):
        return x
    wanted, kept = raw_outputs(la, to_device(la, x)), dict(x)
    for name in x:
        fewer = {key: value for key, value in kept.items() if key != name}
        if input_length(fewer) == len(wanted) and _same_outputs(la, to_device(la, fewer), wanted):
            kept = fewer
    return kept


def _same_outputs(la: Any, x: Inputs, wanted: Tensor) -> bool:
    try:
        found = raw_outputs(la, x)
        with evaluation_mode(la.model), torch.no_grad():
            # Who loads it finds out anew how the encoder is called.
            ModelCall()(encoder_of(la), x)
    except Exception:  # what an encoder raises where an input is missing has no common base
        return False
    return torch.equal(found, wanted)

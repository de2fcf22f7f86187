"""The few inputs that a saved posterior of a last layer keeps, to find the layer and to recognise the encoder."""

from __future__ import annotations

from typing import Any

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.pretrained.encoders import encoder_of, raw_outputs
from contrastive_curvature.laplace.prediction import moved_inputs
from contrastive_curvature.network.inputs import Inputs, asks_for_example, check_inputs, slice_inputs, tokenized

__all__ = ["checked_example"]


def checked_example(la: Any, example: Any) -> Inputs:
    """Two inputs, at most, to save: those that the user gives, or made-up ones.

    Args:
        la: A fitted posterior of a last layer.
        example: A batch; texts become what the encoder's tokenizer makes of them. ``None`` takes ``la.data``.

    Raises:
        InputTypeError: Texts, and the encoder has no tokenizer; or no batch.
        InputError: The encoder does not take them, or its outputs are not finite.
    """
    given = la.data if example is None else tokenized(encoder_of(la), example, "example")
    few = slice_inputs(check_inputs(given, "example"), slice(0, 2))
    with asks_for_example(example):
        try:
            outputs = raw_outputs(la, moved_inputs(la.model, few, la._device))
        except Exception as error:  # what an encoder raises at inputs of another kind has no common base
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(expected("example", "inputs that the encoder takes", reason)) from error
        fine = outputs.ndim == 2 and outputs.shape[1] == la.n_outputs and len(outputs) > 0
        if not fine or not bool(outputs.isfinite().all()):
            wanted = f"inputs with finite outputs of shape (N, {la.n_outputs})"
            raise InputError(expected("example", wanted, f"outputs of shape {tuple(outputs.shape)}"))
    return few

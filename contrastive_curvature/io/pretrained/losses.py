"""Losses in a saved posterior: those of this library by name and options, others by name alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from contrastive_curvature import losses
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.pretrained.tree import TensorTable, plain_tree, restored_tree
from contrastive_curvature.losses.cosine import CosineLoss

__all__ = ["KNOWN", "loss_text", "plain_loss", "restored_loss"]

KNOWN: dict[str, type[CosineLoss]] = {
    name: kind
    for name, kind in vars(losses).items()
    if name in losses.__all__ and issubclass(kind, CosineLoss) and not inspect.isabstract(kind)
}
"""The losses of this library, by name."""


def loss_text(loss: CosineLoss) -> str:
    """A loss with its options on one line, as states of posteriors have it."""
    return " ".join(repr(loss).split())


def plain_loss(loss: CosineLoss, table: TensorTable, name: str) -> dict[str, Any]:
    """A loss as JSON writes it.

    Args:
        loss: The loss.
        table: Takes its tensors.
        name: For the names of tensors.

    Returns:
        Class, text, and the options that rebuild it; None for those of a loss that cannot be rebuilt without its code.
    """
    plain = {"class": type(loss).__qualname__, "text": loss_text(loss), "options": None}
    if type(loss) is KNOWN.get(type(loss).__name__):
        options = _options(loss)
        # A loss whose attributes were changed by hand is no longer the one that its options make.
        if loss_text(type(loss)(**options)) == plain["text"]:
            plain["options"] = plain_tree(options, table, name)
    return plain


def restored_loss(plain: Mapping[str, Any], given: object, tensors: Mapping[str, Tensor]) -> CosineLoss:
    """The loss of a saved posterior.

    Args:
        plain: From :func:`plain_loss`.
        given: What the user passed as ``loss``, or None.
        tensors: By name.

    Raises:
        InputError: The loss has to be given and is not, or is another one.
        InputTypeError: What is given is no loss.
        ValueError: The options are malformed.
    """
    name, text = plain["class"], plain["text"]
    if given is None:
        if plain["options"] is None:
            hint = f"Its code is not in the folder. Pass loss={name}(...) to load_pretrained, with its options: {text}."
            raise InputError(expected("loss", f"the {name} that the posterior was fitted with", "None", hint))
        if name not in KNOWN:
            hint = "A later version of contrastive_curvature may have it: pip install -U contrastive-curvature."
            raise InputError(expected("loss", f"one of {', '.join(KNOWN)}", str(name), hint))
        return KNOWN[name](**restored_tree(plain["options"], tensors))
    if not isinstance(given, CosineLoss):
        came = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise InputTypeError(expected("loss", f"a {name}, or None", came))
    if type(given).__qualname__ != name or loss_text(given) != text:
        hint = "Leave it out." if plain["options"] is not None else "Pass the one that the posterior was fitted with."
        raise InputError(expected("loss", str(text), loss_text(given), hint))
    return given


def _options(loss: CosineLoss) -> dict[str, Any]:
    """Arguments of the constructor that make this loss."""
    found: dict[str, Any] = {**vars(loss), **loss._buffers, **loss._parameters}
    if hasattr(loss, "averages"):
        # The attribute of this name is torch's, and may be another one.
        found["reduction"] = "mean" if loss.averages else "sum"
    options = {name: found[name] for name in loss.arguments() if name in found}
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in options.items()}

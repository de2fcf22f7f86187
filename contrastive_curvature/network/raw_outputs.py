"""Where an encoder's raw outputs are, before the l2-normalisation at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.substitute import Key
from contrastive_curvature.network.trace import Record, feeds, has_constant_norm, has_unit_norm, is_same

__all__ = ["RawOutputs", "Source", "check_feeds", "find_raw"]

_LAYER_NORM = (0.97, 1.001)
"""Norm of a row of a layer norm with scale one, divided by the root of its length: less than 1 by the added epsilon."""


class Source(NamedTuple):
    """The run of a module whose output ``forward`` normalises.

    Attributes:
        module: Its name in ``model.named_modules()``.
        run: Which run of it, counted from zero.
        key: Name of the tensor among its outputs, ``None`` where it puts out a tensor.
    """

    module: str
    run: int
    key: Key


@dataclass
class RawOutputs:
    """The raw outputs of a probe, and how to reach those of other batches.

    Attributes:
        values: Shape (N, D).
        normalization: The module that takes the raw outputs, ``None`` where there is none.
        run: Which run of it takes them, counted from zero.
        entry: Name of the raw outputs in the mapping that it takes, ``None`` where it takes a tensor.
        normalized_entry: Name of the tensor that it puts out.
        source: The module whose output ``forward`` normalises, ``None`` where it does not.
        normalized: Whether the values are still normalised.
    """

    values: Tensor
    normalization: nn.Module | None = None
    run: int = 0
    entry: Key = None
    normalized_entry: Key = None
    source: Source | None = None
    normalized: bool = False


def find_raw(model: nn.Module, records: Sequence[Record], out: Tensor, made_of: Callable[[Record], bool]) -> RawOutputs:
    """Go back from the output through normalisations, and through modules that return their input unchanged.

    Args:
        model: The encoder.
        records: What its innermost modules did, in order.
        out: Its output, shape (N, D).
        made_of: Whether the directions of the output are those of a record's output, for all values of both; that two
            are equal on some points may be a coincidence.

    Raises:
        UnsupportedError: The output is normalised inside ``forward``, and by no module's output.
    """
    found, k = RawOutputs(out), len(records)
    while has_constant_norm(found.values):
        start, k = k, _last(records[:k], is_same, found.values, made_of)
        if k < 0:
            if out.shape[1] == 1:
                return found
            k = _last(records[:start], feeds, found.values, made_of)
            if k < 0:
                _refuse_hidden_normalization(found.values)
                return found
            name = next(name for name, module in model.named_modules() if module is records[k].module)
            found = RawOutputs(records[k].output, source=Source(name, records[k].run, records[k].key))
            # The module may be a normalisation, too.
            k += 1
            continue
        if isinstance(records[k].module, nn.Linear):
            return found
        entry = records[k].rescaled()
        if entry is False:
            # A layer norm gives rows of a common norm other than one; that is no l2-normalisation.
            found.normalized = has_unit_norm(found.values)
            return found
        inner = records[k]
        found = RawOutputs(inner.inputs[entry], inner.module, inner.run, entry, inner.key)
    return found


def check_feeds(raw: Tensor, out: Tensor) -> None:
    """Refuse a batch that ``forward`` treats in another way than the first one.

    Raises:
        UnsupportedError: The output is not the normalised output of the module.
    """
    vectorised: Any = torch._C._functorch
    # A graph that is traced, and a function that is vectorised, are of inputs that were compared before.
    if torch.compiler.is_compiling() or vectorised.is_functorch_wrapped_tensor(out):
        return
    if not feeds(raw, out):
        msg = (
            "model: of the first batch, the output was the normalised output of a layer, and of this one it is not. "
            "Remove F.normalize from forward and end the encoder in the module contrastive_curvature.L2Norm(), or in "
            "no normalisation at all."
        )
        raise UnsupportedError(msg)


def _last(
    records: Sequence[Record],
    matches: Callable[[Any, Tensor], bool],
    values: Tensor,
    made_of: Callable[[Record], bool],
) -> int:
    """Number of the last record whose output matches, and is what the values are made of; -1: there is none."""
    numbers = reversed(range(len(records)))
    return next((i for i in numbers if matches(records[i].output, values) and made_of(records[i])), -1)


def _refuse_hidden_normalization(out: Tensor) -> None:
    """Refuse outputs of one norm that no module makes, except those of a layer norm whose scale is still one.

    Raises:
        UnsupportedError: They have another norm.
    """
    norm, of_layer_norm = float(out.float().norm(dim=1).mean()), out.shape[1] ** 0.5
    if _LAYER_NORM[0] * of_layer_norm < norm < _LAYER_NORM[1] * of_layer_norm:
        return
    msg = (
        f"model: the encoder normalises its output inside forward (every output of the first batch has norm {norm:.4g},"
        " and no module at its end does it). The curvature needs the Jacobian of the raw outputs, which are hidden "
        "there. Remove F.normalize from forward and end the encoder in the module contrastive_curvature.L2Norm(), or "
        "in no normalisation at all: the predictions and the curvature are those of the unit embeddings either way."
    )
    raise UnsupportedError(msg)

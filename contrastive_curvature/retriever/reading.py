"""Inputs and labels of all kinds: arrays, tensors, texts, tables and loaders."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.network.inputs import in_memory, is_texts
from contrastive_curvature.network.loader import check_loader, in_fixed_order

_T = TypeVar("_T", bound=Sized)


def read(argument: str, inputs: Any, labels: Any, run: Callable[[Any], _T]) -> tuple[_T, list[Hashable]]:
    """Return the result of ``run`` for inputs without labels, and the labels."""
    inputs = in_memory(inputs, argument)
    if labels is not None or are_inputs(inputs):
        names = _checked_labels(argument, inputs, labels)
        return run(inputs), names
    check_loader(inputs, argument, once=True)
    names = []

    def alone() -> Iterator[Any]:
        # Both in one pass, for a loader may have another order in the next.
        for batch in in_fixed_order(inputs, argument):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2 or is_texts(batch):
                raise InputTypeError(argument, "batches (inputs, labels)", f"a {type(batch).__name__}")
            names.extend(labels_of(argument, batch[1], len(names)))
            yield batch[0]

    result = run(alone())
    if len(names) != len(result):
        raise InputError(argument, f"{len(result)} labels, one an input", f"{len(names)}")
    return result, names


def check(argument: str, inputs: Any, labels: Any) -> None:
    """Refuse inputs that :func:`read` refuses before it runs anything."""
    if labels is not None or are_inputs(inputs):
        _checked_labels(argument, inputs, labels)
    else:
        check_loader(inputs, argument)


def are_inputs(inputs: Any) -> bool:
    """Return whether these are inputs without labels, and not a loader."""
    return isinstance(inputs, (str, Tensor, np.ndarray, Mapping)) or is_texts(inputs)


def pair(argument: str, given: Any) -> tuple[Any, Any]:
    """Return inputs and labels; a loader has no labels beside it."""
    if isinstance(given, tuple) and len(given) == 2 and not is_texts(given):
        return in_memory(given[0], argument), given[1]
    if are_inputs(given) or isinstance(given, tuple):
        got = f"a {type(given).__name__}"
        raise InputTypeError(argument, "(inputs, labels), or a loader of such batches", got)
    return given, None


def labels_of(argument: str, labels: Any, before: int = 0) -> list[Hashable]:
    """Return labels as a list of hashable values; ``before`` counts the labels of earlier batches."""
    listed = labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) or hasattr(labels, "tolist") else labels
    if not isinstance(listed, (list, tuple)):
        hint = "Pass a tensor, an array or a list."
        raise InputTypeError(f"{argument}: labels", "one label an input", f"a {type(labels).__name__}", hint)
    plain = [value.item() if isinstance(value, (np.generic, Tensor)) else value for value in listed]
    for place, value in enumerate(plain, before):
        # NaN is not equal to itself, and whether pd.NA is, is pd.NA.
        if not isinstance(value, Hashable) or value is None or (value == value) is not True:
            hint = "One label an input, a number or a string. Leave out inputs without a label."
            got = f"{value!r} at position {place}, counted from 0"
            raise InputError(f"{argument}: labels", "shape (N,), hashable values", got, hint)
    return plain


def _checked_labels(argument: str, inputs: Any, labels: Any) -> list[Hashable]:
    """Return the labels of inputs in memory, one for each."""
    if not are_inputs(inputs):
        hint = "Its batches (inputs, labels) have them: leave them out."
        raise InputError(f"{argument}: labels", "none beside a loader", f"a {type(labels).__name__}", hint)
    names = labels_of(argument, labels)
    first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
    if len(names) != len(first):
        raise InputError(f"{argument}: labels", f"{len(first)}, one an input", f"{len(names)}")
    return names

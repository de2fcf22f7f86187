"""``la.predict(data)``: the predictions of a whole data set, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.network.inputs import (
    as_tensor,
    check_inputs,
    in_memory,
    input_length,
    is_texts,
    slice_inputs,
)
from contrastive_curvature.network.loader import check_loader, inputs_alone
from contrastive_curvature.progress import Progress

_R = TypeVar("_R")


def results(
    run: Callable[[Any], _R],
    encoder: nn.Module | None,
    data: Any,
    argument: str,
    batch_size: int,
    progress_bar: bool | None,
    label: str,
) -> Iterator[_R]:
    """Yield what a function returns for the batches of a data set, at least one; its errors name the batch.

    Args:
        run: The function of a batch.
        encoder: As of :func:`batches`.
        data: As of ``la.predict``.
        argument: Name of the data in error messages.
        batch_size: Inputs in a batch of data in memory.
        progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.
        label: What the progress bar says.
    """
    items, inputs_of = batches(encoder, data, batch_size, argument)
    number = -1
    for number, item in enumerate(Progress(progress_bar).over(items, label)):
        try:
            result = run(inputs_of(item))
        except InputError as error:
            kind = InputTypeError if isinstance(error, InputTypeError) else InputError
            raise kind(f"{argument}: batch {number} (counted from 0): {error}") from error
        yield result
    if number < 0:
        raise InputError(argument, "at least one input", "none")


def batches(
    encoder: nn.Module | None, data: Any, size: int, argument: str = "data"
) -> tuple[Iterable[Any], Callable[[Any], Any]]:
    """Return an iterable, and the function that turns each of its entries into a batch of inputs.

    For data in memory, the entries are slices of rows; for a loader, its batches. Arrays get the precision of the
    encoder, or float32 without an encoder.
    """
    if isinstance(data, str):
        raise InputTypeError(argument, "a list of texts", "one text", "Pass [text].")
    data = in_memory(data, argument)
    if is_texts(data):
        return _slices(len(data), size), data.__getitem__
    if isinstance(data, np.ndarray):
        return _slices(len(data) if data.ndim else 0, size), lambda rows: as_tensor(data[rows], encoder, argument)
    if isinstance(data, (Tensor, Mapping)):
        x = check_inputs(data, argument)
        return _slices(input_length(x), size), lambda rows: slice_inputs(x, rows)
    check_loader(data, argument, once=True)
    return data, lambda batch: inputs_alone(batch, argument)


def by_length(data: Any, argument: str) -> tuple[Any, Any]:
    """Return texts in the order of their lengths, so that batches take little padding, and the places of all in it.

    Other data is returned as :func:`.in_memory` does, with the slice of all places.
    """
    data = in_memory(data, argument)
    if not is_texts(data):
        return data, slice(None)
    order = np.argsort([len(text) for text in data], kind="stable")
    return [data[k] for k in order], np.argsort(order)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]

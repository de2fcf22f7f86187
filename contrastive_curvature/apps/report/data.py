"""What an evaluation reads: batches, and what a person should see of each input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.metrics._checks import check_labels
from contrastive_curvature.network.loader import check_loader

__all__ = ["Data"]


class Data:
    """Batches of inputs, with names and pictures of them for the page.

    Args:
        batches: ``(x, labels)``, mappings that hold the labels too, or ``x`` alone; run over once.
        items: What to show of each input, in the order of the batches: a text (``str``), an image (PIL, an array or
            tensor of shape (H, W), (H, W, C) or (C, H, W)), or a :class:`~pathlib.Path` of an image file. ``None``
            shows inputs that are image tensors (C, H, W) or texts themselves, and of others the name.
        ids: Name of each input. ``None`` counts them from 0.

    Raises:
        InputTypeError: ``batches`` cannot be run over, or ``items`` or ``ids`` is no sequence.
    """

    def __init__(
        self, batches: Iterable[Any], *, items: Sequence[Any] | None = None, ids: Sequence[Any] | None = None
    ) -> None:
        check_loader(batches, "batches", once=True, shares=True)
        for name, value in (("items", items), ("ids", ids)):
            known_length = hasattr(value, "__getitem__") and hasattr(value, "__len__")
            if value is not None and (not known_length or isinstance(value, (str, bytes, Mapping))):
                raise InputTypeError(expected(name, "one entry for each input, as a list", f"a {type(value).__name__}"))
        self.batches, self.items, self.ids = batches, items, ids

    @classmethod
    def of(cls, argument: str, value: Any) -> Data:
        """``value`` itself if it is one, or with the batches ``value``.

        Raises:
            InputTypeError: It cannot be run over.
        """
        batches = value.batches if isinstance(value, Data) else value
        check_loader(batches, argument, once=True)
        return value if isinstance(value, Data) else cls(batches)

    def check_length(self, argument: str, n: int) -> None:
        """Refuse items or ids of another number than the inputs.

        Raises:
            InputError: There are more or fewer.
        """
        for name, value in (("items", self.items), ("ids", self.ids)):
            if value is not None and len(value) != n:
                raise InputError(expected(f"{argument}: {name}", f"{n}, one for each input", len(value)))

    def name(self, row: int) -> str:
        """The name of an input."""
        name = row if self.ids is None else self.ids[row]
        return str(name.item() if isinstance(name, Tensor) and name.numel() == 1 else name)


def take_apart(argument: str, number: int, batch: Any, label_key: str) -> tuple[Any, Tensor | None]:
    """The inputs and, where there are any, the labels of what a loader yields.

    Raises:
        InputTypeError: Something else, or labels that are no integers.
        InputError: Not one label for each input.
    """
    where = f"{argument}: batch {number} (counted from 0)"
    labels = None
    if isinstance(batch, Mapping):
        x, labels = batch, batch.get(label_key)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2 and not isinstance(batch[1], str):
        x, labels = batch
    elif isinstance(batch, Tensor) or is_texts(batch):
        x = batch
    elif isinstance(batch, (tuple, list)) and len(batch) == 1:
        x = batch[0]
    else:
        came = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        raise InputTypeError(expected(where, "batches (x, labels), or of inputs alone", came))
    if labels is None:
        return x, None
    if not isinstance(labels, Tensor):
        raise InputTypeError(expected(where, "labels as a tensor", f"a {type(labels).__name__}"))
    return x, check_labels(f"{where}: labels", labels).cpu()


def is_texts(x: Any) -> bool:
    """Whether inputs are a list of strings."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(text, str) for text in x)


def previews(x: Any) -> Iterator[Any] | None:
    """What to show of each input of a batch, where the inputs are texts or image tensors."""
    if is_texts(x):
        return iter(x)
    if isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3):
        return (image.detach() for image in x)
    return None


def is_image(item: Any) -> bool:
    """Whether an item is shown as a picture."""
    return isinstance(item, (Tensor, Path)) or hasattr(item, "__array_interface__") or hasattr(item, "getbands")


def kept(preview: Any) -> Any:
    """A preview that does not keep its batch in memory."""
    return preview.to("cpu", torch.float32, copy=True) if isinstance(preview, Tensor) else preview

"""Batches as people have them where nothing is labelled: two views of every input, or a query and its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.network.inputs import Inputs, check_inputs, input_length, move_inputs, same_tokens

__all__ = ["Views", "has_views", "joined_inputs", "read_views"]

_FORMS = "batches (x, labels), (view, view), ((view, view), labels), (view, view, labels) or mappings"


class Views(NamedTuple):
    """A batch of B inputs, each seen once or twice.

    Args:
        first: The inputs, or their first views.
        second: Second views, or ``None``.
        targets: Labels, or what a relation or a loss of graded pairs takes, shape (B, ...); ``None`` without any.
        unusable: What stood in their place beside two views and is no tensor of one entry a point; ``None`` for nothing
            or ``None``.
    """

    first: Inputs
    second: Inputs | None
    targets: Tensor | None
    unusable: str | None = None


def has_views(batch: Any) -> bool:
    """Whether a batch holds two views of every input, and not one view and its labels."""
    if not isinstance(batch, (tuple, list)):
        return False
    if len(batch) == 3:
        # (x, labels, index) has no second view.
        return not (isinstance(batch[1], Tensor) and batch[1].ndim < 2)
    if len(batch) != 2:
        return False
    first, second = batch
    if isinstance(first, (tuple, list)):
        return len(first) == 2
    if isinstance(second, Mapping):
        return True
    # Labels are whole numbers, one a point; a second view looks like the first.
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return _alike(first, second)


def read_views(
    batch: Any,
    device: torch.device,
    label_key: str = "labels",
    argument: str = "train_loader",
    towers: bool = False,
    related: bool = False,
) -> Views:
    """Take apart what a loader yields, and bring it to a device.

    Args:
        batch: ``(x, labels)``; ``(view, view)``; ``((view, view), labels)``, whose labels may be anything, as they need
            not be used; ``(view, view, labels)``; or a mapping that holds the labels too. A view is a tensor or a
            mapping.
        device: Where to bring it.
        label_key: Where a mapping keeps the labels.
        argument: Name of the loader for the error message.
        towers: Whether a pair is always two views, as where two encoders wait for one each.
        related: Whether a relation waits for targets, so that a pair of tensors is inputs and targets, whatever their
            shapes.

    Returns:
        The views.

    Raises:
        InputTypeError: Something else.
        InputError: A batch without a point, or views of another number of points.
    """
    if isinstance(batch, Mapping):
        if label_key not in batch:
            wanted, hint = f"mappings with the labels under {label_key!r}", "Name the key with dict_key_y=..."
            raise InputTypeError(expected(argument, wanted, f"the keys {sorted(batch)}", hint))
        return Views(_moved(batch, device, argument), None, _target(batch[label_key], device, argument))
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        came = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        raise InputTypeError(expected(argument, _FORMS, came))
    single = related and len(batch) == 2 and isinstance(batch[1], Tensor) and not isinstance(batch[0], (tuple, list))
    if single or not (has_views(batch) or towers):
        if len(batch) == 3:
            hint = "The second entry has one number a point, so it is no second view. Yield (x, labels)."
            raise InputTypeError(
                expected(argument, _FORMS, f"a {type(batch).__name__} of 3: x and one number a point twice", hint)
            )
        x, y = batch
        return Views(_moved(x, device, argument), None, _target(y, device, argument))
    unusable: str | None = None
    if len(batch) == 3:
        first, second, y = batch
        if isinstance(y, Tensor) and isinstance(first, Tensor) and _alike(first, y):
            hint = "Views are compared two by two: yield two of them, or the third beside other two in a further batch."
            raise InputError(expected(argument, "two views of every input", "three", hint))
    elif isinstance(batch[0], (tuple, list)):
        (first, second), y = batch
        if not (isinstance(y, Tensor) and y.ndim):
            # Data sets of views often carry along something that is no label, and that nobody uses.
            unusable, y = None if y is None else f"a {type(y).__name__}", None
    else:
        (first, second), y = batch, None
    views = [_moved(view, device, argument) for view in (first, second)]
    lengths = [input_length(view) for view in views]
    if lengths[0] != lengths[1] and y is None:
        raise InputError(expected(argument, "as many second views as first ones", f"{lengths[0]} and {lengths[1]}"))
    return Views(views[0], views[1], None if y is None else _target(y, device, argument), unusable)


def joined_inputs(first: Inputs, second: Inputs, argument: str = "train_loader") -> Inputs:
    """Two batches after each other, for one encoder.

    Args:
        first: B inputs.
        second: As many others, of the same shapes.
        argument: Name of the loader for the error message.

    Raises:
        InputError: They do not fit together.
    """
    hint = "One encoder sees both views in one batch: pad or crop them to one shape."
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
            shapes = f"{tuple(first.shape)} of {first.dtype} and {tuple(second.shape)} of {second.dtype}"
            raise InputError(expected(argument, "two views of one shape and type", shapes, hint))
        return torch.cat([first, second])
    if not isinstance(first, Mapping) or not isinstance(second, Mapping) or first.keys() != second.keys():
        keys = [sorted(view) if isinstance(view, Mapping) else "a tensor" for view in (first, second)]
        hint = "One encoder sees both views in one batch. Inputs of two kinds need contrastive_curvature.TwoTowers."
        raise InputError(expected(argument, "two views of one kind", f"{keys[0]} and {keys[1]}", hint))
    first, second = (dict(part) for part in same_tokens([first, second]))
    n, out = input_length(first), {}
    for name, value in first.items():
        other = second[name]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == n:
            if value.shape[1:] != other.shape[1:]:
                shapes = f"{tuple(value.shape)} and {tuple(other.shape)} under {name!r}"
                raise InputError(expected(argument, "two views of one shape", shapes, hint))
            out[name] = torch.cat([value, other])
        else:
            out[name] = value
    return out


def _alike(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors look like two views."""
    return second.ndim > 1 and second.shape == first.shape and second.dtype == first.dtype


def _moved(x: Any, device: torch.device, argument: str) -> Inputs:
    return move_inputs(check_inputs(x, f"{argument}: inputs of a batch"), device)


def _target(y: Any, device: torch.device, argument: str) -> Tensor:
    if not isinstance(y, Tensor):
        hint = (
            f"Known are {_FORMS}. Names of classes become numbers, once for the whole data set, by "
            "torch.as_tensor(numpy.unique(names, return_inverse=True)[1])."
        )
        raise InputTypeError(expected(argument, "labels as a tensor", f"a {type(y).__name__}", hint))
    return y.to(device)

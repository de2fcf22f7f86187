"""States as plain JSON and named tensors, and back: nothing that would have to be executed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError

__all__ = ["TensorTable", "plain_tree", "restored_tree"]

_TENSOR, _TUPLE, _PAIRS, _FLOAT = "$tensor", "$tuple", "$pairs", "$float"
_MARKS = (_TENSOR, _TUPLE, _PAIRS, _FLOAT)


class TensorTable:
    """Tensors by name, each stored once also where it stands in several places of a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # The given tensors are kept, because the address of one that is gone may come back.
        self._names: dict[tuple[Any, ...], tuple[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        """Keep a tensor; the name under which it is kept.

        Raises:
            UnsupportedError: The tensor is not dense.
        """
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            msg = f"{name}: only dense tensors can be saved. Pass tensor.to_dense()."
            raise UnsupportedError(msg)
        place = (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
        known = self._names.get(place) if tensor.numel() else None
        if known is not None:
            return known[0]
        self._names[place] = (name, tensor)
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name


def plain_tree(value: Any, table: TensorTable, name: str) -> Any:
    """A value as JSON writes it, its tensors kept in a table.

    Args:
        value: Tensors, numbers, strings, None, and dictionaries, lists and tuples of them.
        table: Takes the tensors.
        name: Of the value, for the names of tensors and for messages.

    Raises:
        UnsupportedError: Something else stands in it.
    """
    if isinstance(value, Tensor):
        return {_TENSOR: table.add(name, value)}
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, Mapping):
        pairs = [(key, plain_tree(part, table, f"{name}.{key}")) for key, part in value.items()]
        if all(isinstance(key, str) and key not in _MARKS for key, _ in pairs):
            return {str(key): part for key, part in pairs}
        if all(isinstance(key, (str, int)) and not isinstance(key, bool) for key, _ in pairs):
            return {_PAIRS: [[key, part] for key, part in pairs]}
    if type(value) in (list, tuple):
        parts = [plain_tree(part, table, f"{name}.{number}") for number, part in enumerate(value)]
        return {_TUPLE: parts} if type(value) is tuple else parts
    msg = (
        f"{name}: a {type(value).__name__} cannot be saved. Only tensors, numbers, strings, and dictionaries, lists "
        "and tuples of them can be read back without executing code."
    )
    raise UnsupportedError(msg)


def restored_tree(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`plain_tree` was given.

    Args:
        plain: From JSON.
        tensors: By name.

    Raises:
        ValueError: A tensor is missing, or a mark is malformed.
    """
    if isinstance(plain, list):
        return [restored_tree(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next((name for name in _MARKS if name in plain), None)
    if mark is None:
        return {key: restored_tree(part, tensors) for key, part in plain.items()}
    if len(plain) != 1:
        msg = f"{mark} beside other keys"
        raise ValueError(msg)
    content = plain[mark]
    if mark == _TENSOR:
        if not isinstance(content, str) or content not in tensors:
            msg = f"no tensor {content!r}"
            raise ValueError(msg)
        return tensors[content]
    if mark == _FLOAT:
        if content not in ("inf", "-inf", "nan"):
            msg = f"a number {content!r}"
            raise ValueError(msg)
        return float(content)
    # Unpacking what is no list of these raises a TypeError or a ValueError.
    if mark == _TUPLE:
        return tuple(restored_tree(part, tensors) for part in [*content])
    return {key: restored_tree(part, tensors) for key, part in content}

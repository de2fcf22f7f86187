"""One codec for all saved objects: it converts dataclasses of tensors and plain values to a tree, and back.

A tree has tensors, arrays, numbers, texts, None, and dictionaries, lists and tuples of them. Without arrays,
``torch.load`` reads it with ``weights_only=True``; :func:`packed` makes JSON and named tensors of it, for safetensors.
Nothing that is read is executed: :func:`from_tree` makes objects of the classes that it is given, and of no others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.network.digest import tensor_bytes

NOT_SAVED: Mapping[str, Any] = {"saved": False}
"""Metadata of a field of a dataclass that goes into no file: the user's data or code."""

_CLASS, _TENSOR, _ARRAY, _TUPLE, _ITEMS, _NUMBER = "$class", "$tensor", "$array", "$tuple", "$items", "$number"


def to_tree(value: Any) -> Any:
    """Return a value as a tree; a dataclass or named tuple becomes a dictionary with the name of its class.

    Views are copied, so that a file of the tree does not hold the rest of their memory.
    """
    if isinstance(value, Tensor):
        return value.detach() if value.untyped_storage().nbytes() == value.nbytes else value.detach().clone()
    if is_dataclass(value) or hasattr(value, "_fields"):
        names = getattr(value, "_fields", None)
        saved = names or (field.name for field in fields(value) if field.metadata.get("saved", True))
        return {_CLASS: type(value).__name__, **{name: to_tree(getattr(value, name)) for name in saved}}
    if isinstance(value, Mapping):
        return {key: to_tree(part) for key, part in value.items()}
    return type(value)(map(to_tree, value)) if type(value) in (list, tuple) else value


def from_tree(argument: str, tree: Any, classes: Iterable[type]) -> Any:
    """Return the value of a tree of :func:`to_tree`.

    Args:
        argument: Name of the tree, for messages.
        tree: The tree.
        classes: Dataclasses and named tuples that may be in it.

    Raises:
        InputError: The tree contains another class, or other fields of a class.
    """
    known = {kind.__name__: kind for kind in classes}

    def made(tree: Any) -> Any:
        if isinstance(tree, Mapping):
            parts = {key: made(part) for key, part in tree.items() if key != _CLASS}
            if _CLASS not in tree:
                return parts
            kind = known.get(tree[_CLASS]) if isinstance(tree[_CLASS], str) else None
            if kind is None:
                raise InputError(argument, f"one of {', '.join(known)}", tree[_CLASS])
            try:
                return kind(**parts)
            except TypeError as error:
                raise InputError(argument, f"the fields of {kind.__name__}", f"others ({error})") from None
        return type(tree)(map(made, tree)) if type(tree) in (list, tuple) else tree

    return made(tree)


def sealed(state: Mapping[str, Any], keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a state with a checksum of the entries with these names, by default of all entries."""
    return {**state, "checksum": _checksum(state, keys)}


def check_seal(state: object, keys: Iterable[str] | None = None) -> None:
    """Refuse a state that is damaged, or has no checksum of :func:`sealed`.

    Raises:
        InputError: The state is not a dictionary, or its checksum is missing or wrong.
    """
    if not isinstance(state, Mapping):
        raise InputError("state_dict", "what state_dict() gave", f"a {type(state).__name__}")
    if state.get("checksum") != _checksum(state, keys):
        got = "another: the state is damaged, was changed by hand, or was saved by another version"
        hint = "Copy the file again from where it came, or fit again. To change a setting, set it on the loaded object."
        if "checksum" not in state:
            got, hint = "none: an earlier version wrote it", "Fit again, or load it with that version."
        raise InputError("state_dict['checksum']", "that of the other entries", got, hint)


def _checksum(state: Mapping[str, Any], keys: Iterable[str] | None) -> str:
    """Return a text that changes with any change of these entries."""

    def plain(value: object) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        # The shapes () and (1,) count as equal; other code checks shapes.
        digest = hashlib.sha256(f"{value.dtype} {value.numel()}".encode())
        for content in tensor_bytes(value):
            digest.update(content)
        return digest.hexdigest()

    names = sorted(map(str, state)) if keys is None else keys
    content = [[name, state.get(name)] for name in names if name != "checksum"]
    return hashlib.sha256(json.dumps(content, default=plain, skipkeys=True).encode()).hexdigest()


class TensorTable:
    """Tensors by name; a tensor that occurs several times in a tree is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # The original tensors are kept too, because the address of a deleted tensor may be used again.
        self._names: dict[Any, tuple[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor, and return its name in the table."""
        place = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if tensor.numel() and place in self._names:
            return self._names[place][0]
        self._names[place] = (name, tensor)
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name


def packed(tree: Any, table: TensorTable, name: str) -> Any:
    """Return a tree in a form for JSON, with names instead of tensors.

    Args:
        tree: The tree.
        table: Table that receives the tensors.
        name: Name of the tree, for the names of tensors and for messages.

    Raises:
        UnsupportedError: The tree contains another type.
    """
    if isinstance(tree, Tensor):
        return {_TENSOR: table.add(name, tree)}
    if isinstance(tree, np.ndarray):
        return {_ARRAY: table.add(name, torch.from_numpy(tree))}
    if isinstance(tree, dict):
        parts = {key: packed(part, table, f"{name}.{key}") for key, part in tree.items()}
        # JSON keys must be texts.
        return parts if all(isinstance(key, str) for key in tree) else {_ITEMS: [list(item) for item in parts.items()]}
    if type(tree) in (list, tuple):
        several = [packed(part, table, f"{name}.{number}") for number, part in enumerate(tree)]
        return several if type(tree) is list else {_TUPLE: several}
    if isinstance(tree, float) and not math.isfinite(tree):
        # JSON has no such numbers.
        return {_NUMBER: str(float(tree))}
    # A text or a number may be of a subclass, such as an enumeration.
    for plain in (bool, int, float, str):
        if isinstance(tree, plain):
            return plain(tree)
    if tree is not None:
        raise UnsupportedError(
            f"{name}: a {type(tree).__name__} cannot be saved. Only tensors, numbers, strings, and dictionaries, "
            "lists and tuples of them can be read back without executing code."
        )
    return None


def unpacked(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree from the output of :func:`packed`."""
    if isinstance(plain, list):
        return [unpacked(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    if _ARRAY in plain:
        return tensors[plain[_ARRAY]].numpy()
    if _NUMBER in plain:
        return float(plain[_NUMBER])
    if _TUPLE in plain:
        return tuple(unpacked(plain[_TUPLE], tensors))
    if _ITEMS in plain:
        return {key: unpacked(part, tensors) for key, part in plain[_ITEMS]}
    return {key: unpacked(part, tensors) for key, part in plain.items()}

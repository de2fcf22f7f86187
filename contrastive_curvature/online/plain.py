"""Plain content, which a checkpoint file may hold: its check, a form that can always be read back, and its checksum."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputTypeError, expected

__all__ = ["check_plain", "checksum", "portable"]

# Exact types: a subclass, such as NumPy's float64 or an enumeration, is stored by the name of its class.
_NUMBERS = (str, bool, int, float, type(None))
_TENSORS = (Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, torch.Size)
_MAX_DEPTH = 100


def check_plain(content: Any, where: str, limit: int | None = None) -> None:
    """Refuse content that cannot be read back without executing code, or could exhaust the memory when read.

    Args:
        content: The content, of any type.
        where: Name of the content in error messages.
        limit: Size in bytes of the file that the content was read from, if any. Content larger than its file is
            refused: a few bytes can describe a tensor of 2^45 entries, or nested lists that are all the same list.

    Raises:
        InputTypeError: An entry is not plain, or is too large; the error names the path of the entry.
    """
    _check(content, where, limit, [0], 0)


def _check(value: Any, where: str, limit: int | None, count: list[int], depth: int) -> None:
    count[0] += 1
    if limit is not None and count[0] > limit:
        raise InputTypeError(expected(where, f"at most {limit} values, as many as the file has bytes", "more"))
    if depth > _MAX_DEPTH:
        # Python's recursion limit would depend on the depth of the caller's stack.
        received = f"one that is nested more than {_MAX_DEPTH} levels deep"
        raise InputTypeError(expected(where[:60], "plain content", received))
    if type(value) in _MAPPINGS:
        for key, item in value.items():
            if type(key) in _TENSORS:
                raise InputTypeError(expected(f"a key of {where}", "a string or a number", "a tensor"))
            _check(key, f"a key of {where}", limit, count, depth + 1)
            _check(item, f"{where}[{key!r}]", limit, count, depth + 1)
        # The state_dict of a module stores the versions of its modules in an attribute, _metadata.
        for name, item in getattr(value, "__dict__", {}).items():
            _check(item, f"{where}.{name}", limit, count, depth + 1)
    elif type(value) in _SEQUENCES:
        for number, item in enumerate(value):
            _check(item, f"{where}[{number}]", limit, count, depth + 1)
    elif type(value) in _TENSORS:
        _check_tensor(value, where, limit)
    elif type(value) not in _NUMBERS:
        hint = "Only these can be read back without executing code."
        wanted = "tensors, numbers, strings, and dictionaries, lists and tuples of them"
        raise InputTypeError(expected(where, wanted, f"a {type(value).__name__}", hint))


def _check_tensor(tensor: Tensor, where: str, limit: int | None) -> None:
    wanted = "a dense tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "without data" if tensor.is_meta else f"of layout {tensor.layout}"
        received = "a quantised one" if tensor.is_quantized else f"one {kind}"
        raise InputTypeError(expected(where, wanted, received, "Pass tensor.to_dense(), or its parts."))
    if tensor.__dict__:
        received = f"one with the attributes {sorted(tensor.__dict__)}"
        raise InputTypeError(expected(where, "a tensor", received, "They would be lost; pass tensor.detach()."))
    if limit is not None and tensor.numel() * tensor.element_size() > limit:
        received = f"one of shape {tuple(tensor.shape)}, which is larger than the file"
        raise InputTypeError(expected(where, wanted, received))


def portable(content: Any, kinds: dict[int, torch.dtype] | None = None) -> Any:
    """Copy content to the form in which it is written: no tensor has more entries than its storage.

    Every container is copied. A container that occurs twice would be written once but counted twice when it is read.

    Args:
        content: Content that has passed :func:`check_plain`.
        kinds: Dtype of the tensors at every memory address so far; torch cannot write one memory as two dtypes.

    Returns:
        The copy. Its tensors are those of ``content``; only expanded tensors and views as another dtype are copied.
    """
    kinds = {} if kinds is None else kinds
    kind = type(content)
    if kind in _MAPPINGS:
        copy: Any = kind()
        for key, item in content.items():
            copy[key] = portable(item, kinds)
        for name, item in getattr(content, "__dict__", {}).items():
            setattr(copy, name, portable(item, kinds))
        return copy
    if kind in _SEQUENCES:
        return kind([portable(item, kinds) for item in content])
    return _stored(content, kinds) if kind in _TENSORS else content


def _stored(tensor: Tensor, kinds: dict[int, torch.dtype]) -> Tensor:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    fits = tensor.numel() == 0 or reach >= tensor.numel()
    if fits and kinds.setdefault(tensor.untyped_storage().data_ptr(), tensor.dtype) is tensor.dtype:
        return tensor
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(dense, tensor.requires_grad)
    return dense.requires_grad_(tensor.requires_grad)


def checksum(content: Any) -> str:
    """Compute a checksum of types, keys in their order, numbers, strings and bits of tensors, equal on every machine.

    Args:
        content: Content that has passed :func:`check_plain`.

    Returns:
        32 hexadecimal digits.
    """
    state = hashlib.blake2b(digest_size=16)
    _add(state, content)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    kind = type(value).__name__
    if type(value) in _MAPPINGS:
        attributes = getattr(value, "__dict__", {})
        state.update(f"{kind} {len(value)} {len(attributes)};".encode())
        for key, item in (*value.items(), *attributes.items()):
            _add(state, key)
            _add(state, item)
    elif type(value) in _SEQUENCES:
        state.update(f"{kind} {len(value)};".encode())
        for item in value:
            _add(state, item)
    elif type(value) in _TENSORS:
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        state.update(f"{kind} {value.dtype} {tuple(value.shape)} {value.requires_grad};".encode())
        state.update(flat.view(torch.uint8).numpy())
    else:
        if isinstance(value, float):
            raw = struct.pack(">d", value)
        else:
            raw = (value if isinstance(value, str) else str(value)).encode("utf-8", "surrogatepass")
        state.update(f"{kind} {len(raw)};".encode() + raw)

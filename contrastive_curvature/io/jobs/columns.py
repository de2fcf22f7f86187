"""Arrow columns as arrays, and arrays as Arrow columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.jobs.packages import arrow

__all__ = ["array_of", "check_numbers", "list_column", "tensor_of"]


def array_of(column: Any) -> NDArray[Any]:
    """A column as an array: lists of a fixed length as rows, what numpy has no type for as objects."""
    types = arrow().types
    whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if types.is_fixed_size_list(whole.type) and not whole.null_count:
        # Of shape (n, F), and not an array of objects.
        flat = array_of(whole.flatten())
        return flat.reshape(len(whole), whole.type.list_size, *flat.shape[1:])
    return np.array(whole.to_numpy(zero_copy_only=False))


def check_numbers(schema: Any, name: str, *, listed: bool) -> None:
    """Refuse a column that is no number a row, or, where ``listed``, no list of floating-point numbers.

    Raises:
        InputError: There is no such column.
        InputTypeError: It has another type.
    """
    types = arrow().types
    if name not in schema.names:
        hint = "Name the columns with features=, target= and identifier=, or say what batches are with read=."
        raise InputError(expected("source", f"a column {name!r}", f"the columns {', '.join(schema.names)}", hint))
    kind = schema.field(name).type
    if listed and not (types.is_fixed_size_list(kind) and types.is_floating(kind.value_type)):
        wanted = f"lists of floating-point numbers of a fixed length in the column {name!r}"
        hint = "pyarrow.FixedSizeListArray.from_arrays(values.ravel(), width) makes such a column."
        raise InputTypeError(expected("source", wanted, str(kind), hint))
    plain = kind.value_type if types.is_fixed_size_list(kind) else kind
    if not listed and not (types.is_integer(plain) or types.is_floating(plain) or types.is_boolean(plain)):
        hint = "Number the classes, the same way in all files."
        raise InputTypeError(expected("source", f"numbers in the column {name!r}", str(kind), hint))


def tensor_of(column: Any, name: str) -> Tensor:
    """A column of numbers, or of lists of them, as a tensor; half precision lifted to float32.

    Raises:
        InputError: A value is missing.
    """
    inner = column.combine_chunks()
    missing = inner.null_count + (inner.flatten().null_count if hasattr(inner.type, "list_size") else 0)
    if missing:
        raise InputError(expected("source", f"a value in every row of the column {name!r}", f"{missing} missing"))
    values = array_of(inner)
    return torch.from_numpy(values.astype(np.float32) if values.dtype == np.float16 else values)


def list_column(values: NDArray[Any]) -> Any:
    """Rows (n, F) as a column of lists of the length F."""
    pa = arrow()
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])

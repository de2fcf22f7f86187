"""The columns of a Lance table: rows and payload on their way in, hits on their way out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.stores.checks import need
from contrastive_curvature.io.stores.store import Found, Rows

__all__ = ["KEY", "OWN", "VERSION", "as_ids", "check_payload", "make_schema", "to_arrow", "to_found"]

OWN = ("id", "vector", "kappa", "uncertainty")
"""Columns of every table; further ones are payload."""

KEY, VERSION = b"contrastive_curvature.LanceStore", b"1"
"""What the schema says of the program that made the table."""


def make_schema(rows: Rows, payload: dict[str, Any]) -> Any:
    """The columns of a new table."""
    pa = need("pyarrow", "LanceStore", "lance")
    vector = pa.list_(pa.float32(), rows.vectors.shape[1])
    types = [pa.string() if rows.ids.dtype == object else pa.int64(), vector, pa.float32(), pa.float32()]
    fields = [pa.field(name, kind, nullable=False) for name, kind in zip(OWN, types, strict=True)]
    fields += [pa.field(name, column.type) for name, column in payload.items()]
    return pa.schema(fields, metadata={KEY: VERSION})


def to_arrow(rows: Rows, payload: dict[str, Any], schema: Any) -> Any:
    """Rows in the columns of a table.

    Raises:
        InputTypeError: Identifiers or payload are of another type than in the table.
        InputError: The payload has other columns.
    """
    pa = need("pyarrow", "LanceStore", "lance")
    if set(payload) != (names := set(schema.names) - set(OWN)):
        raise InputError(expected("payload", f"columns {sorted(names)}, as in the store", f"{sorted(payload)}"))
    vector = pa.FixedSizeListArray.from_arrays(pa.array(rows.vectors.ravel()), rows.vectors.shape[1])
    columns = {
        "id": as_ids(rows.ids, schema),
        "vector": vector,
        "kappa": pa.array(rows.kappa),
        "uncertainty": pa.array(rows.uncertainty),
    }
    for name, column in payload.items():
        try:
            columns[name] = column.cast(schema.field(name).type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            wanted = f"{schema.field(name).type}, as in the store"
            raise InputTypeError(expected(f"payload[{name!r}]", wanted, str(column.type))) from None
    return pa.table([columns[name] for name in schema.names], schema=schema)


def as_ids(ids: Any, schema: Any) -> Any:
    """Identifiers as a column.

    Raises:
        InputTypeError: They are of another type than in the table.
    """
    pa = need("pyarrow", "LanceStore", "lance")
    wanted = schema.field("id").type
    if len(ids) and (ids.dtype == object) != (wanted == pa.string()):
        kind = "strings" if wanted == pa.string() else "whole numbers"
        raise InputTypeError(expected("ids", f"{kind}, as those in the store", f"{ids[0]!r}"))
    return pa.array(ids, type=wanted)


def check_payload(payload: object, count: int) -> dict[str, Any]:
    """Return further columns as Arrow arrays.

    Raises:
        InputTypeError: It is no dictionary of columns.
        InputError: A name is not allowed, or a column has another length.
    """
    pa = need("pyarrow", "LanceStore", "lance")
    if not isinstance(payload, Mapping):
        raise InputTypeError(expected("payload", "a dictionary of columns", f"a {type(payload).__name__}"))
    out = {}
    for name, values in payload.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (*OWN, "query_index"):
            wanted = f"names of small letters, digits and '_', other than {', '.join(OWN)}"
            raise InputError(expected("payload", wanted, repr(name)))
        try:
            column = pa.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as error:
            wanted = "numbers, strings or bools, one for each embedding"
            raise InputTypeError(expected(f"payload[{name!r}]", wanted, f"{error}")) from None
        if pa.types.is_null(column.type):
            hint = "Leave the column out, or give it a type: pyarrow.array(values, type)."
            raise InputTypeError(expected(f"payload[{name!r}]", "values that say the type", "None alone", hint))
        if len(column) != count:
            raise InputError(expected(f"payload[{name!r}]", f"{count} values, one for each embedding", len(column)))
        out[name] = column
    return out


def to_found(tables: list[Any], k: int, size: int) -> Found:
    """The hits of consecutive blocks of queries, k for each query."""
    pa = need("pyarrow", "LanceStore", "lance")
    shift, shifted = 0, []
    for table in tables:
        place = table.column_names.index("query_index")
        index = table.column(place).to_numpy().astype(np.int64) + shift
        shifted.append(table.set_column(place, "query_index", pa.array(index)))
        shift += len(table) // k
    whole = pa.concat_tables(shifted).sort_by([("query_index", "ascending"), ("_distance", "ascending")])
    whole = whole.combine_chunks()

    def column(name: str) -> Any:
        return whole.column(name).to_numpy().reshape(shift, k)

    vectors = whole.column("vector").combine_chunks().flatten().to_numpy().reshape(shift, k, -1)
    further = [name for name in whole.column_names if name not in (*OWN, "query_index", "_distance")]
    payload = {name: column(name) for name in further}
    return Found(column("id"), vectors.copy(), column("kappa"), column("uncertainty"), size, payload)

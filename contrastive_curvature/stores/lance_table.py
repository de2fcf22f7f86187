"""The Lance table of a store: its columns, its indices, and how it is made and opened."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.stores.store import Found, Rows

__all__ = [
    "KINDS",
    "Connection",
    "as_ids",
    "check_payload",
    "check_schema",
    "ids_in",
    "index_config",
    "make_schema",
    "readable",
    "to_arrow",
    "to_found",
]

KINDS: Mapping[str, tuple[str, ...]] = {
    "flat": (),
    "ivf_pq": ("partitions", "sub_vectors"),
    "ivf_hnsw_sq": ("partitions", "links", "build_effort"),
}
"""Indices, and the options of each."""

_OWN = ("id", "vector", "kappa", "uncertainty")
_VERSION = b"1"
_KEY = b"contrastive_curvature.LanceStore"
_FEWEST = 256
_WANTED = "a table that LanceStore made"


class Connection:
    """The folder of a table.

    Args:
        lancedb: The package.
        path: The folder.

    Raises:
        InputError: Its name does not end in ``.lance``, has other characters than letters, digits, ``_``, ``-`` and
            ``.``, or its parent does not exist.
    """

    def __init__(self, lancedb: ModuleType, path: Path | str) -> None:
        self.path, self.lancedb = Path(path), lancedb
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.lance", self.path.name):
            wanted = "a folder NAME.lance, the name of letters, digits, '_', '-' and '.'"
            raise InputError(expected("path", wanted, repr(str(path))))
        # LanceDB would make the parent, too, even to look whether there is a table.
        if not self.path.parent.is_dir():
            raise InputError(expected(str(path), "a folder whose parent exists", f"no folder {self.path.parent}"))

    def open(self) -> Any:
        """Open the table.

        Raises:
            InputError: There is none, or it cannot be read.
        """
        if not self.path.is_dir():
            raise InputError(expected(str(self.path), _WANTED, "no such folder"))
        with readable(self.path):
            return self._database().open_table(self.path.stem)

    def create(self, rows: Any) -> Any:
        """Make the table of its first rows.

        Raises:
            InputError: It was made by somebody else meanwhile.
        """
        try:
            return self._database().create_table(self.path.stem, rows)
        except ValueError as error:
            hint = "LanceStore.open(path) opens it."
            raise InputError(expected(str(self.path), "a folder that does not exist yet", str(error), hint)) from None

    def _database(self) -> Any:
        return self.lancedb.connect(str(self.path.parent))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what LanceDB raises about files that it cannot read into an error that names the folder.

    Raises:
        InputError: It cannot be read.
    """
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        hint = "Some of its files are damaged or missing; copy it again, or build the store anew."
        raise InputError(expected(str(path), _WANTED, f"{error}", hint)) from error


def check_schema(schema: Any, path: Path | str) -> None:
    """Refuse a table of something else, or of a newer version.

    Raises:
        InputError: It is no store.
        UnsupportedError: A newer version made it.
    """
    version = (schema.metadata or {}).get(_KEY)
    if version is None or not set(_OWN) <= set(schema.names):
        raise InputError(expected(str(path), _WANTED, f"one of something else, with columns {', '.join(schema.names)}"))
    if version != _VERSION:
        hint = "Install the version of this library that made it, or a newer one."
        raise UnsupportedError(expected(str(path), f"version {_VERSION.decode()}", version.decode(), hint))


def make_schema(rows: Rows, payload: dict[str, Any]) -> Any:
    """The columns of a new table."""
    import pyarrow as pa

    vector = pa.list_(pa.float32(), rows.vectors.shape[1])
    types = [pa.string() if rows.ids.dtype == object else pa.int64(), vector, pa.float32(), pa.float32()]
    fields = [pa.field(name, kind, nullable=False) for name, kind in zip(_OWN, types, strict=True)]
    fields += [pa.field(name, column.type) for name, column in payload.items()]
    return pa.schema(fields, metadata={_KEY: _VERSION})


def to_arrow(rows: Rows, payload: dict[str, Any], schema: Any) -> Any:
    """Rows in the columns of a table.

    Raises:
        InputTypeError: Identifiers or payload are of another type than in the table.
        InputError: The payload has other columns.
    """
    import pyarrow as pa

    if set(payload) != (names := set(schema.names) - set(_OWN)):
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
    import pyarrow as pa

    wanted = schema.field("id").type
    if len(ids) and (ids.dtype == object) != (wanted == pa.string()):
        kind = "strings" if wanted == pa.string() else "whole numbers"
        raise InputTypeError(expected("ids", f"{kind}, as those in the store", f"{ids[0]!r}"))
    return pa.array(ids, type=wanted)


def ids_in(table: Any, ids: Any) -> list[Any]:
    """Those of the identifiers that a table has.

    The whole column is read, in blocks: a condition with thousands of identifiers takes longer to parse.
    """
    import pyarrow.compute as pc

    there: list[Any] = []
    for batch in table.search().select(["id"]).to_batches(2**16):
        column = batch.column("id")
        there += column.filter(pc.is_in(column, value_set=ids)).to_pylist()
    return there


def check_payload(payload: object, count: int) -> dict[str, Any]:
    """Return further columns as Arrow arrays.

    Raises:
        InputTypeError: It is no dictionary of columns.
        InputError: A name is not allowed, or a column has another length.
    """
    import pyarrow as pa

    if not isinstance(payload, Mapping):
        raise InputTypeError(expected("payload", "a dictionary of columns", f"a {type(payload).__name__}"))
    out = {}
    for name, values in payload.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (*_OWN, "query_index"):
            wanted = f"names of small letters, digits and '_', other than {', '.join(_OWN)}"
            raise InputError(expected("payload", wanted, repr(name)))
        try:
            column = pa.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as error:
            wanted = "numbers, strings or bools, one for each embedding"
            raise InputTypeError(expected(f"payload[{name!r}]", wanted, f"{error}")) from None
        if len(column) != count:
            raise InputError(expected(f"payload[{name!r}]", f"{count} values, one for each embedding", len(column)))
        out[name] = column
    return out


def index_config(lancedb: ModuleType, kind: str, options: dict[str, int], dim: int, count: int) -> Any:
    """LanceDB's description of an index; ``None`` for ``"flat"``.

    Raises:
        InputError: There are too few embeddings, or ``sub_vectors`` does not divide the dimension.
    """
    if kind == "flat":
        return None
    if count < _FEWEST:
        hint = "An exact search of so few takes no time."
        raise InputError(expected("create_index", f"at least {_FEWEST} embeddings for {kind!r}", count, hint))
    common = {"distance_type": "cosine", "num_partitions": options.get("partitions")}
    if kind == "ivf_hnsw_sq":
        common["num_partitions"] = options.get("partitions", 1)
        graph = {"m": options.get("links", 20), "ef_construction": options.get("build_effort", 300)}
        return lancedb.index.IvfHnswSq(**common, **graph)
    most = max(1, dim // 4)
    parts = options.get("sub_vectors", max(n for n in range(1, most + 1) if dim % n == 0))
    if dim % parts:
        raise InputError(expected("sub_vectors", f"a divisor of D = {dim}", parts))
    if common["num_partitions"] is None:
        common["num_partitions"] = max(1, min(round(math.sqrt(count)), count // _FEWEST))
    return lancedb.index.IvfPq(**common, num_sub_vectors=parts)


def to_found(tables: list[Any], k: int, size: int) -> Found:
    """The hits of consecutive blocks of queries, k for each query."""
    import pyarrow as pa

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
    further = [name for name in whole.column_names if name not in (*_OWN, "query_index", "_distance")]
    payload = {name: column(name) for name in further}
    return Found(column("id"), vectors.copy(), column("kappa"), column("uncertainty"), size, payload)

"""``--out scores.csv`` or ``.parquet``: rows that are written as they come, under their name when all are there."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np

from contrastive_curvature.apps.cli.errors import BadInputError, missing
from contrastive_curvature.artifact import final_target, write_whole
from contrastive_curvature.errors import expected

__all__ = ["Table", "check_output", "write_table"]

_ENDINGS = (".csv", ".parquet")


class Table(NamedTuple):
    """A table in parts.

    Attributes:
        types: Name of each column -> ``"text"``, ``"int"``, ``"float32"``, ``"float64"`` or ``"bool"``.
        parts: Columns of some rows each: name -> arrays or lists, ``None`` for a missing number.
    """

    types: Mapping[str, str]
    parts: Iterator[Mapping[str, Sequence[Any]]]


def check_output(path: Path, *sources: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Raises:
        BadInputError: Another ending, a source itself, or pyarrow is missing.
        InputError: The folder does not exist, or the path is no file.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise BadInputError(expected(f"--out {path}", "a name that ends in .csv or .parquet", f"{path.name!r}"))
    target = final_target(path)
    if any(source.exists() and target.exists() and source.samefile(target) for source in sources):
        raise BadInputError(expected(f"--out {path}", "another file than the inputs", "one of them"))
    if path.suffix.lower() == ".parquet":
        try:
            _pyarrow()
        except ImportError as error:
            run = "pip install 'contrastive-curvature[parquet]'; or name a .csv"
            raise BadInputError(missing(f"--out {path}", "pyarrow", run)) from error


def write_table(path: Path, make: Callable[[], Table]) -> None:
    """Write a table; an error leaves what was there under that name.

    Args:
        path: Seen by :func:`check_output`.
        make: Gives the table.

    Raises:
        OSError: The file cannot be written.
    """
    writer = _write_parquet if path.suffix.lower() == ".parquet" else _write_csv
    write_whole(path, lambda file: writer(file, make()))


def _write_csv(file: BinaryIO, table: Table) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        rows = csv.writer(_Lines(text))
        rows.writerow(table.types)
        for part in table.parts:
            rows.writerows(zip(*(_shown(part[name], kind) for name, kind in table.types.items()), strict=True))
    finally:
        # The wrapper would close the file, which its owner has yet to flush.
        text.detach()


class _Lines:
    """Where ``csv.writer`` writes.

    It quotes what has a character of its line end: with its own one also a carriage return, which would split a row.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def _shown(values: Sequence[Any], kind: str) -> Sequence[Any]:
    if kind == "bool":
        # As JSON and SQL write them, which pandas and others read as booleans too.
        return ["true" if value else "false" for value in values]
    if kind.startswith("float"):
        # The fewest digits that give the number back in its own precision.
        there = [row for row, value in enumerate(values) if value is not None]
        out = [""] * len(values)
        for row, text in zip(there, np.array([values[row] for row in there], dtype=kind).astype(str), strict=True):
            out[row] = str(text)
        return out
    return values


def _write_parquet(file: BinaryIO, table: Table) -> None:
    pa, parquet = _pyarrow()
    numbers = {"float32": pa.float32(), "float64": pa.float64(), "int": pa.int64()}
    kinds = {**numbers, "text": pa.string(), "bool": pa.bool_()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in table.types.items()])
    opened: AbstractContextManager[Any] = parquet.ParquetWriter(file, schema)
    with opened as writer:
        for part in table.parts:
            writer.write_table(pa.table({name: part[name] for name in table.types}, schema=schema))


def _pyarrow() -> tuple[Any, Any]:
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")

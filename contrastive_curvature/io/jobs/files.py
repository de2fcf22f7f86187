"""A list of Parquet files as one long table: which rows are where, and a text that other files change."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.jobs.packages import parquet

__all__ = ["Paths", "Piece", "Table", "open_table"]

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A Parquet file, a folder of them, or a list of files."""

_TAIL = 8
"""Bytes at the end of a Parquet file: the length of its footer, little endian, and a mark."""


class Piece(NamedTuple):
    """Rows that lie in one file.

    Args:
        path: The file.
        groups: Its row groups that have them.
        skip: Rows of the first of these groups before them.
        rows: How many there are.
    """

    path: Path
    groups: list[int]
    skip: int
    rows: int


@dataclass(frozen=True)
class Table:
    """Parquet files in a fixed order.

    Attributes:
        groups: File, number in it and first row of every row group that has rows, in order.
        rows: Number of rows.
        schema: pyarrow's schema, the same in every file.
        fingerprint: Changes with names, sizes and contents of the files as far as their footers show it.
    """

    groups: tuple[tuple[Path, int, int], ...]
    rows: int
    schema: Any
    fingerprint: str

    def boundaries(self, count: int) -> list[int]:
        """First rows of ``count`` contiguous parts that are not empty, and the number of rows.

        They are first rows of row groups where that leaves no part empty, so that no group is read twice.
        """
        even = [self.rows * k // count for k in range(count + 1)]
        starts = [first for _, _, first in self.groups] + [self.rows]
        near = [_nearest(starts, wanted) for wanted in even]
        return near if all(a < b for a, b in pairwise(near)) else even

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Where the rows from ``start`` to ``stop`` are, file by file."""
        ends = [first for _, _, first in self.groups[1:]] + [self.rows]
        found: dict[Path, Piece] = {}
        for (path, group, first), end in zip(self.groups, ends, strict=True):
            rows = min(stop, end) - max(start, first)
            if rows <= 0:
                continue
            known = found.get(path, Piece(path, [], max(0, start - first), 0))
            found[path] = known._replace(groups=[*known.groups, group], rows=known.rows + rows)
        yield from found.values()


def open_table(path: Paths) -> Table:
    """Read the footers of Parquet files.

    Raises:
        InputTypeError: The path is no path, nor a list of them.
        InputError: There is no such file, it is no Parquet file, the files have other columns, or there is no row.
        UnsupportedError: pyarrow is not installed.
    """
    files, module = _listed(path), parquet()
    digest, groups, rows, schema = hashlib.sha256(), [], 0, None
    for file in files:
        try:
            with module.ParquetFile(file) as opened:
                metadata, found = opened.metadata, opened.schema_arrow
            digest.update(f"{file.name} {file.stat().st_size}".encode() + _footer(file))
        except (OSError, ValueError) as error:
            raise InputError(expected(str(file), "a Parquet file", f"what cannot be read ({error})")) from None
        schema = found if schema is None else schema
        if not found.equals(schema):
            wanted = f"the columns of {files[0].name}: {_columns(schema)}"
            raise InputError(expected(str(file), wanted, _columns(found)))
        for group in range(metadata.num_row_groups):
            n = metadata.row_group(group).num_rows
            if n:
                groups.append((file, group, rows))
                rows += n
    if not rows:
        raise InputError(expected("source", "at least one row", f"{len(files)} Parquet files without any"))
    return Table(tuple(groups), rows, schema, digest.hexdigest()[:32])


def _listed(path: Any) -> list[Path]:
    if isinstance(path, (str, os.PathLike)):
        # Absolute, as processes elsewhere have other working directories.
        one = Path(path).absolute()
        if not one.is_dir():
            return [one]
        # What begins with a dot or an underscore is no data for other tools either.
        files = [file for file in sorted(one.glob("*.parquet")) if file.name[0] not in "._"]
        if not files:
            raise InputError(expected("source", "a folder with files *.parquet", f"{one} without any"))
        return files
    if not isinstance(path, (list, tuple)) or not all(isinstance(part, (str, os.PathLike)) for part in path):
        raise InputTypeError(expected("source", "a path or a list of paths", f"a {type(path).__name__}"))
    if len(set(map(Path, path))) < len(path) or not path:
        raise InputError(expected("source", "different files, at least one", f"{len(path)} names"))
    return [Path(part).absolute() for part in path]


def _nearest(ascending: list[int], wanted: int) -> int:
    place = bisect_left(ascending, wanted)
    return min(ascending[max(0, place - 1) : place + 1], key=lambda start: abs(start - wanted))


def _footer(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-_TAIL, os.SEEK_END)
        length = int.from_bytes(opened.read(4), "little")
        opened.seek(-_TAIL - length, os.SEEK_END)
        return opened.read(length)


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)

"""Parquet files as parts, and every part as a loader of batches."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A Parquet file, a folder of them, or a list of files."""

Reader = Callable[[dict[str, Any]], Any]
"""Turns the columns of a batch, numpy arrays by name, into ``(x, targets)``, or for embedding ``x`` alone."""

_ROWS, _FEWEST, _MOST = 50_000, 16, 1_000


def need(module: str, extra: str = "parquet") -> Any:
    """Import an optional package."""
    return validate.package("jobs", module, extra)


def number_of_parts(parts: int | None, rows: int) -> int:
    """Return the number of parts, by default one for 50,000 rows, at least 16 and at most 1,000."""
    if parts is None:
        return min(rows, max(_FEWEST, min(_MOST, -(-rows // _ROWS))))
    if validate.count("parts", parts) > rows:
        raise InputError("parts", f"at most {rows:,}, the number of rows", parts)
    return parts


class _Group(NamedTuple):
    """A row group: its file, its number there, and its rows among those of all files."""

    file: Path
    number: int
    start: int
    stop: int


class ParquetParts:
    """Parquet files, divided into contiguous parts of nearly equal size; ``parts[k]`` is a loader of part ``k``.

    The parts are whole row groups where that leaves none empty. They depend on the files and the number of parts only,
    so that a job that goes on later finds the same ones.

    Args:
        path: A Parquet file, a folder of them, or a list of files; all with the same columns.
        parts: How many; ``None`` for one per 50,000 rows, at least 16 and at most 1,000.
        batch_size: Rows of a batch.
        read: Turns a batch, a dictionary of numpy arrays, into ``(x, targets)``: tensors, or for ``x`` a mapping of
            them. ``None``: ``x`` is the column ``features``, lists of floating-point numbers of a fixed length, that
            the posterior's encoder takes as its inputs.
        columns: Columns to read for batches; ``None`` for all, or without ``read`` for features and target.
        features: Name of the column of features.
        target: Name of the column of targets: whole numbers, or what a relation takes.
        identifier: Name of the column of identifiers, for embeddings.

    Attributes:
        rows: Number of all rows.
        fingerprint: A text that other files, rows or columns change: names, sizes and footers of the files, which have
            the least and the largest value of every column and row group. It does not see a change between these.

    Raises:
        InputError: No such file or column, other columns in another file, no row, or more parts than rows.
        InputTypeError: An argument or a column has another type.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: Paths,
        parts: int | None = None,
        *,
        batch_size: int = 4096,
        read: Reader | None = None,
        columns: Sequence[str] | None = None,
        features: str = "features",
        target: str = "target",
        identifier: str = "identifier",
    ) -> None:
        self.batch_size = validate.count("batch_size", batch_size)
        if read is not None and not callable(read):
            raise InputTypeError("read", "a function of a batch, or None", f"a {type(read).__name__}")
        self.read, self.columns = read, columns
        self.features, self.target, self.identifier = features, target, identifier
        self._open(_listed(path))
        if columns is not None and (read is None or isinstance(columns, str) or set(columns) - {*self.schema.names}):
            wanted = f"a list of columns of the files ({', '.join(self.schema.names)}), together with read"
            raise InputError("columns", wanted, repr(columns))
        if read is None:
            self.check_numbers(features)
        self._bounds = self._boundaries(number_of_parts(parts, self.rows))

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._bounds) - 1

    def __getitem__(self, part: int) -> ParquetPart:
        """The loader of a part, by its index from 0."""
        if not 0 <= part < len(self):
            # An IndexError ends a loop over the parts.
            raise IndexError(f"part: expected an index from 0 to {len(self) - 1}, got {part}.")
        return ParquetPart(self, self._bounds[part], self._bounds[part + 1])

    def __repr__(self) -> str:
        """Number of rows and parts."""
        return f"ParquetParts({self.rows:,} rows in {len(self)} parts)"

    @property
    def fingerprint(self) -> str:
        """A text that other files, rows or columns change."""
        names = None if self.read is not None else (self.features, self.target)
        return f"{self._footers} {names}"

    def inputs(self, table: Any) -> Any:
        """Return what ``read`` makes of the rows of a table; without it, their features."""
        if self.read is None:
            return self.numbers(table, self.features)
        return self.read({name: _array(table.column(name)) for name in self.columns or table.column_names})

    def check_numbers(self, name: str) -> None:
        """Refuse a column that has neither numbers nor lists of them of a fixed length."""
        if name not in self.schema.names:
            hint = "Name the columns with features=, target= and identifier=, or say what batches are with read=."
            received = f"the columns {', '.join(self.schema.names)}"
            raise InputError("source", f"a column {name!r}", received, hint)
        kind, types = self.schema.field(name).type, need("pyarrow").types
        plain = kind.value_type if types.is_fixed_size_list(kind) else kind
        if not (types.is_integer(plain) or types.is_floating(plain) or types.is_boolean(plain)):
            wanted = f"numbers, or lists of them of a fixed length, in the column {name!r}"
            hint = (
                "Number the classes, the same way in all files; pyarrow.FixedSizeListArray.from_arrays(values.ravel(), "
                "width) makes a column of lists."
            )
            raise InputTypeError("source", wanted, str(kind), hint)

    def numbers(self, table: Any, name: str) -> Tensor:
        """Return a column of numbers, or of lists of them, as a tensor; half precision lifted to float32."""
        column = table.column(name).combine_chunks()
        missing = column.null_count + (column.flatten().null_count if hasattr(column.type, "list_size") else 0)
        if missing:
            raise InputError("source", f"a value in every row of the column {name!r}", f"{missing} missing")
        values = _array(column)
        return torch.from_numpy(values.astype(np.float32) if values.dtype == np.float16 else values)

    def kept_types(self) -> dict[str, Any]:
        """Return the types of the columns that can be passed through, and of identifiers as ``"identifier"``."""
        types = {field.name: field.type for field in self.schema if field.name != self.features}
        identifier = types.pop(self.identifier, need("pyarrow").int64())
        return {**types, "identifier": identifier}

    def to_embed(self, part: int, keep: Sequence[str]) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield inputs, identifiers and further columns of the batches of a part."""
        named = [self.identifier] if self.identifier in self.schema.names else []
        wanted = [*(self.columns or [self.features]), *named, *keep]
        reads_all = self.read is not None and self.columns is None
        loader = self[part]
        start = loader.start
        for table in loader.tables(None if reads_all else list(dict.fromkeys(wanted))):
            numbers = need("pyarrow").array(range(start, start + len(table)))
            start += len(table)
            identifiers = table.column(self.identifier) if named else numbers
            yield self.inputs(table), identifiers, [table.column(name) for name in keep]

    def _open(self, files: list[Path]) -> None:
        """Read the footers of all files."""
        arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
        self.schema: Any = None
        self.rows = 0
        self.groups: list[_Group] = []
        digest = hashlib.sha256()
        for file in files:
            try:
                with parquet.ParquetFile(file) as opened:
                    metadata, schema = opened.metadata, opened.schema_arrow
            except (OSError, ValueError) as error:
                raise InputError(str(file), "a Parquet file", f"what cannot be read ({error})") from None
            self.schema = self.schema or schema
            if not schema.equals(self.schema):
                wanted = f"the columns of {files[0].name}: {_columns(self.schema)}"
                raise InputError(str(file), wanted, _columns(schema))
            footer = arrow.BufferOutputStream()
            metadata.write_metadata_file(footer)
            digest.update(f"{file.name} {file.stat().st_size}".encode() + footer.getvalue())
            for number in range(metadata.num_row_groups):
                start, self.rows = self.rows, self.rows + metadata.row_group(number).num_rows
                self.groups.append(_Group(file, number, start, self.rows))
        if not self.rows:
            raise InputError("source", "at least one row", f"{len(files)} Parquet files without any")
        self._footers = digest.hexdigest()[:32]

    def _boundaries(self, count: int) -> list[int]:
        """Return the first rows of parts: those of row groups if no part is empty then, so that none is read twice."""
        even = [self.rows * k // count for k in range(count + 1)]
        starts = [group.start for group in self.groups] + [self.rows]
        near = []
        for wanted in even:
            place = bisect_left(starts, wanted)
            near.append(min(starts[max(0, place - 1) : place + 1], key=lambda start: abs(start - wanted)))
        return near if all(a < b for a, b in pairwise(near)) else even


class ParquetPart:
    """Batches ``(x, targets)`` of consecutive rows; iterated as often as needed."""

    def __init__(self, parts: ParquetParts, start: int, stop: int) -> None:
        self._parts, self.start, self.stop = parts, start, stop

    def __len__(self) -> int:
        """Number of batches."""
        return -(-(self.stop - self.start) // self._parts.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Batches, as ``read`` makes them, or of features and targets."""
        mine = self._parts
        if mine.read is not None:
            yield from map(mine.inputs, self.tables(mine.columns))
            return
        mine.check_numbers(mine.target)
        for table in self.tables([mine.features, mine.target]):
            yield mine.inputs(table), mine.numbers(table, mine.target)

    @property
    def dataset(self) -> range:
        """The rows, under the name that a ``DataLoader`` has for what tells how long a fit will take."""
        return range(self.start, self.stop)

    @property
    def numbers(self) -> Tensor:
        """Numbers of the rows among those of all parts, int64, shape (N,): a fit samples by them."""
        return torch.arange(self.start, self.stop)

    def tables(self, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield Arrow tables of one batch each, of some columns or of all."""
        size, n, seen = self._parts.batch_size, self.stop - self.start, 0
        waiting: list[Any] = []
        for rows in self._rows(columns):
            seen += len(rows)
            table = need("pyarrow").concat_tables([*waiting, rows])
            while len(table) >= size:
                yield table.slice(0, size)
                table = table.slice(size)
            waiting = [table]
        if seen != n:
            hint = "The files have changed since they were opened."
            raise InputError("source", f"{n:,} rows from row {self.start:,} on", f"{seen:,}", hint)
        yield from (table for table in waiting if len(table))

    def _rows(self, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield Arrow tables in order, of any number of rows."""
        arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
        mine = [group for group in self._parts.groups if group.start < self.stop and group.stop > self.start]
        for path, found in groupby(mine, key=lambda group: group.file):
            groups = list(found)
            row, numbers = groups[0].start, [group.number for group in groups]
            # A dataset of pyarrow would keep whole row groups in memory, decoded: three times as much as this.
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(self._parts.batch_size, row_groups=numbers, columns=columns):
                    first, last = max(row, self.start), min(row + len(batch), self.stop)
                    if first < last:
                        rows = batch.slice(first - row, last - first)
                        yield arrow.Table.from_batches([rows]).replace_schema_metadata()
                    row += len(batch)
                    if row >= self.stop:
                        break


def _listed(path: Any) -> list[Path]:
    """Return the files, absolute, because processes elsewhere have other working directories."""
    if isinstance(path, (str, os.PathLike)):
        one = Path(path).absolute()
        if not one.is_dir():
            return [one]
        # Other tools skip names that begin with a dot or an underscore, too.
        files = [file for file in sorted(one.glob("*.parquet")) if file.name[0] not in "._"]
        if not files:
            raise InputError("source", "a folder with files *.parquet", f"{one} without any")
        return files
    if not isinstance(path, (list, tuple)):
        wanted = "Parquet files (a path, or a list of paths), a ParquetParts, or a feature folder"
        raise InputTypeError("source", wanted, f"a {type(path).__name__}")
    files = [Path(part).absolute() for part in path]
    if not files or len(set(files)) < len(files):
        raise InputError("source", "different files, at least one", f"{len(files)} names")
    return files


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _array(column: Any) -> NDArray[Any]:
    """Return a column as an array: lists of a fixed length as rows, what numpy has no type for as objects."""
    whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if need("pyarrow").types.is_fixed_size_list(whole.type) and not whole.null_count:
        flat = _array(whole.flatten())
        return flat.reshape(len(whole), whole.type.list_size, *flat.shape[1:])
    return np.array(whole.to_numpy(zero_copy_only=False))

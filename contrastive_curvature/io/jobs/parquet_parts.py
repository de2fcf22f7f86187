"""Parquet files as parts, and every part as a loader of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.jobs.columns import array_of, check_numbers, tensor_of
from contrastive_curvature.io.jobs.files import Paths, Table, open_table
from contrastive_curvature.io.jobs.packages import arrow, parquet

__all__ = ["ParquetPart", "ParquetParts", "Reader", "default_parts"]

Reader = Callable[[dict[str, Any]], Any]
"""Turns the columns of a batch, numpy arrays by name, into ``(x, targets)``, or for embedding ``x`` alone."""

_ROWS, _FEWEST, _MOST = 50_000, 16, 1_000


def default_parts(rows: int) -> int:
    """Number of parts where nobody says it: parts of 50,000 rows, at least 16 and at most 1,000 of them."""
    return min(rows, max(_FEWEST, min(_MOST, -(-rows // _ROWS))))


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
        if parts is not None:
            validate.count("parts", parts)
        if read is not None and not callable(read):
            raise InputTypeError(expected("read", "a function of a batch, or None", f"a {type(read).__name__}"))
        self.read = read
        self.features, self.target, self.identifier = features, target, identifier
        self.table = open_table(path)
        self._check_columns(columns)
        self.columns = None if columns is None else list(columns)
        count = default_parts(self.table.rows) if parts is None else parts
        if count > self.table.rows:
            raise InputError(expected("parts", f"at most {self.table.rows:,}, the number of rows", count))
        self._bounds = self.table.boundaries(count)

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._bounds) - 1

    def __getitem__(self, part: int) -> ParquetPart:
        """The loader of a part, by its index from 0."""
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < len(self):
            # An IndexError ends a loop over the parts.
            msg = expected("part", f"an index from 0 to {len(self) - 1}", part)
            raise IndexError(msg)
        return ParquetPart(self, self.table, self._bounds[part], self._bounds[part + 1])

    def __repr__(self) -> str:
        """Number of rows and parts."""
        return f"ParquetParts({self.table.rows:,} rows in {len(self)} parts)"

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.table.rows

    @property
    def fingerprint(self) -> str:
        """A text that other files, rows or columns change."""
        names = None if self.read is not None else (self.features, self.target)
        return f"{self.table.fingerprint} {names}"

    def _check_columns(self, columns: Sequence[str] | None) -> None:
        names = (self.features, self.target, self.identifier)
        if not all(isinstance(name, str) for name in names):
            raise InputTypeError(expected("features, target, identifier", "names of columns", str(names)))
        if columns is not None:
            if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
                raise InputTypeError(expected("columns", "a list of names", repr(columns)))
            unknown = sorted(set(columns) - set(self.table.schema.names))
            if unknown or self.read is None:
                hint = "" if unknown else "columns is for read; without it features and target are read."
                raise InputError(expected("columns", "columns of the files, with read", str(unknown or columns), hint))
        if self.read is None:
            check_numbers(self.table.schema, self.features, listed=True)


class ParquetPart:
    """Batches ``(x, targets)`` of consecutive rows; iterated as often as needed.

    Args:
        parts: What it is a part of.
        table: Its files.
        start: First row.
        stop: The row after the last one.
    """

    def __init__(self, parts: ParquetParts, table: Table, start: int, stop: int) -> None:
        self._parts, self._table = parts, table
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        """Number of batches."""
        return -(-(self.stop - self.start) // self._parts.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Batches, as ``read`` makes them, or of features and targets."""
        mine = self._parts
        if mine.read is None:
            check_numbers(self._table.schema, mine.target, listed=False)
        names = [mine.features, mine.target] if mine.read is None else mine.columns
        for table in self.tables(names):
            yield self.batch(table) if mine.read is not None else (self.batch(table), _targets(table, mine.target))

    @property
    def dataset(self) -> range:
        """The rows, under the name that a ``DataLoader`` has for what tells how long a fit will take."""
        return range(self.start, self.stop)

    @property
    def numbers(self) -> Tensor:
        """Numbers of the rows among those of all parts, int64, shape (N,): a fit samples by them."""
        return torch.arange(self.start, self.stop)

    @property
    def identifier(self) -> str:
        """Name of the column of identifiers, which may not be there."""
        return self._parts.identifier

    def columns_for(self, others: Sequence[str]) -> list[str] | None:
        """What to read for inputs, identifiers and further columns; ``None`` for all."""
        mine = self._parts
        if mine.read is not None and mine.columns is None:
            return None
        needed = [mine.features] if mine.read is None else [*(mine.columns or ())]
        return list(dict.fromkeys([*needed, *({mine.identifier} & set(self._table.schema.names)), *others]))

    def batch(self, table: Any) -> Any:
        """What ``read`` makes of the rows of a table; without it, their features."""
        mine = self._parts
        if mine.read is None:
            return tensor_of(table.column(mine.features), mine.features)
        return mine.read({name: array_of(table.column(name)) for name in mine.columns or table.column_names})

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Arrow tables of one batch each.

        Args:
            columns: Which ones; ``None`` for all.
        """
        module, size = arrow(), self._parts.batch_size
        waiting: list[Any] = []
        for rows in self._pieces(columns):
            waiting.append(rows)
            while sum(map(len, waiting)) >= size:
                whole = module.concat_tables(waiting)
                yield whole.slice(0, size)
                waiting = [whole.slice(size)] if len(whole) > size else []
        if waiting:
            yield module.concat_tables(waiting)

    def _pieces(self, columns: Sequence[str] | None) -> Iterator[Any]:
        """Arrow tables in order, of any number of rows."""
        module, size = arrow(), self._parts.batch_size
        names = None if columns is None else list(columns)
        for piece in self._table.pieces(self.start, self.stop):
            skip, left = piece.skip, piece.rows
            with parquet().ParquetFile(piece.path) as file:
                for batch in file.iter_batches(size, row_groups=piece.groups, columns=names):
                    rows = batch.slice(min(skip, len(batch)), left)
                    skip -= min(skip, len(batch))
                    left -= len(rows)
                    if len(rows):
                        yield module.Table.from_batches([rows]).replace_schema_metadata()
                    if not left:
                        break
            if left:
                hint = "The files have changed since they were opened."
                raise InputError(expected(str(piece.path), f"{piece.rows} rows", f"{piece.rows - left}", hint))


def _targets(table: Any, name: str) -> Tensor:
    return tensor_of(table.column(name), name)

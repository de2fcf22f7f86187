"""Features as Parquet files, one a part, which other tools read too; pyarrow is imported when it is needed."""

from __future__ import annotations

import hashlib
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.io.feature_folder.header import Header
from contrastive_curvature.io.feature_folder.storage import Rows, Storage

__all__ = ["Parquet"]

_BLOCK = 2**22

_COLUMNS = ("features", "target", "identifier")


class Parquet(Storage):
    """``part-000000.parquet`` and so on, with the columns ``features``, ``target`` and ``identifier``.

    ``features`` has lists of fixed length F; of ``bfloat16`` the 16 bits, as ``uint16``. Targets of several numbers are
    lists too.

    Raises:
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        super().__init__(folder, header)
        self._arrow, self._parquet = _pyarrow()
        self._kept: tuple[int, Rows] | None = None

    def write(self, part: int, rows: Rows) -> str:
        """See :meth:`Storage.write`."""
        texts = rows.identifiers.dtype.kind == "S"
        identifiers = np.char.decode(rows.identifiers, "utf-8") if texts else rows.identifiers
        columns = [self._column(rows.features), self._column(rows.targets), self._arrow.array(identifiers)]
        table = self._arrow.Table.from_arrays(columns, names=list(_COLUMNS))
        self._kept = None
        # Features compress badly, and a checksum is read far more often than a byte is saved.
        write_whole(self._path(part), lambda file: self._parquet.write_table(table, file, compression="none"))
        found = self.checksum(part, 0, 0)
        if found is None:
            msg = f"{self._path(part)} has gone while it was written"
            raise RuntimeError(msg)
        return found

    def finish(self, header: Header) -> None:
        """See :meth:`Storage.finish`."""
        part = len(header.parts)
        while self._path(part).is_file():
            self._path(part).unlink()
            part += 1

    def checksum(self, part: int, start: int, stop: int) -> str | None:
        """See :meth:`Storage.checksum`; of the whole file."""
        del start, stop
        digest = hashlib.sha256()
        try:
            with self._path(part).open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError:
            return None
        return digest.hexdigest()

    def check_sizes(self, header: Header) -> None:
        """See :meth:`Storage.check_sizes`; reads the end of every file, where its number of rows is."""
        for part in range(len(header.parts)):
            path, (start, stop) = self._path(part), header.rows_of(part)
            if not path.is_file():
                raise self.refuse_size(path, f"{stop - start:,} points", "no such file")
            try:
                n = self._parquet.read_metadata(path).num_rows
            except (OSError, ValueError) as error:
                raise self.refuse_size(path, "a Parquet file", f"what cannot be read ({error})") from None
            if n != stop - start:
                raise self.refuse_size(path, f"{stop - start:,} points", f"{n:,}")

    def rows(self, start: int, stop: int) -> Rows:
        """See :meth:`Storage.rows`; one part is kept in memory."""
        found = [Rows(*(column[:0] for column in self._part(0)))] if start >= stop else []
        while start < stop:
            part, first = divmod(start, self.rows_per_part)
            last = min(first + stop - start, self.rows_per_part)
            found.append(Rows(*(column[first:last] for column in self._part(part))))
            start += last - first
        return found[0] if len(found) == 1 else Rows(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def check_order(self) -> None:
        """See :meth:`Storage.check_order`: a random order would read whole parts for single points."""
        raise _in_order_only()

    def chosen(self, numbers: NDArray[np.int64]) -> Rows:
        """See :meth:`Storage.chosen`; refused by :meth:`check_order`."""
        raise _in_order_only()

    def targets(self, start: int, stop: int) -> NDArray[Any]:
        """See :meth:`Storage.targets`."""
        return self._one("target", start, stop)

    def identifiers(self, start: int, stop: int) -> NDArray[Any]:
        """See :meth:`Storage.identifiers`."""
        return self._one("identifier", start, stop)

    def features(self) -> NDArray[Any]:
        """Refused: Parquet files cannot be mapped as one array.

        Raises:
            UnsupportedError: Always.
        """
        msg = (
            "features: Parquet files have no one array in memory. Iterate over the folder, or take some rows with "
            "folder.numpy(start, stop); format='memmap' has one array."
        )
        raise UnsupportedError(msg)

    def _one(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """One column of some rows, without the others."""
        found, end = [], max(stop, start + 1)
        for part in range(start // self.rows_per_part, (end - 1) // self.rows_per_part + 1):
            (values,) = self._read(part, [name])
            found.append(values[max(0, start - part * self.rows_per_part) : stop - part * self.rows_per_part])
        return np.concatenate(found)

    def _part(self, part: int) -> Rows:
        if self._kept is None or self._kept[0] != part:
            self._kept = (part, Rows(*self._read(part, list(_COLUMNS))))
        return self._kept[1]

    def _read(self, part: int, names: list[str]) -> list[NDArray[Any]]:
        """Some columns of a part, as they were written."""
        try:
            table = self._parquet.read_table(self._path(part), columns=names)
            return [self._values(table, name) for name in names]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            wanted, received = (
                f"a Parquet file with the columns {', '.join(_COLUMNS)}",
                f"what cannot be read ({error})",
            )
            raise self.refuse_size(self._path(part), wanted, received) from None

    def _values(self, table: Any, name: str) -> NDArray[Any]:
        """A column as it was written."""
        column = table.column(name).combine_chunks()
        if name == "identifier":
            if self.identifier_type.kind == "S":
                return np.array([text.encode() for text in column.to_pylist()], dtype=self.identifier_type)
            return np.asarray(column.to_numpy(zero_copy_only=False), dtype=self.identifier_type)
        kind = self.precision.stored if name == "features" else self.target_type
        shape = (self.width,) if name == "features" else self.target_shape
        flat = column.flatten() if shape else column
        return np.array(flat.to_numpy(zero_copy_only=False), dtype=kind).reshape(len(column), *shape)

    def _column(self, values: NDArray[Any]) -> Any:
        flat = self._arrow.array(np.ascontiguousarray(values).reshape(-1))
        if values.ndim == 1:
            return flat
        return self._arrow.FixedSizeListArray.from_arrays(flat, math.prod(values.shape[1:]))

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.parquet"


def _in_order_only() -> UnsupportedError:
    return UnsupportedError("seed: Parquet files are read in their order. Use format='memmap', or seed=None.")


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        msg = (
            "format='parquet': pyarrow is not installed. Run pip install 'contrastive-curvature[parquet]', or use "
            "format='memmap'."
        )
        raise UnsupportedError(msg) from None

"""Where the rows of a feature folder are: in files that are mapped into memory, or in Parquet files.

Both keep the columns of :attr:`.FeatureHeader.columns`.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature import validate
from contrastive_curvature.artifact import sha256_of, write_whole
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.feature_folder.header import FeatureHeader


class MemoryMap:
    """``features.bin``, ``targets.bin`` and ``identifiers.bin``: rows after each other, nothing else."""

    def __init__(self, folder: Path, header: FeatureHeader) -> None:
        self._folder, self._columns, self._rows_per_part = folder, header.columns, header.rows_per_part
        self._mapped: dict[str, NDArray[Any]] = {}

    def write(self, part: int, rows: dict[str, NDArray[Any]]) -> str:
        """Write a part and return its checksum; the files grow part by part."""
        self._mapped.clear()
        self._refuse_links()
        for name, kind in self._columns.items():
            self._path(name).touch()
            with self._path(name).open("r+b") as file:
                file.seek(part * self._rows_per_part * kind.itemsize)
                file.write(rows[name].astype(kind.base, copy=False).tobytes())
                file.flush()
                os.fsync(file.fileno())
        return self.checksum(part, len(rows["targets"]))

    def checksum(self, part: int, points: int) -> str:
        """Return the checksum of a part of so many points, as it is on disk."""
        digest = hashlib.sha256()
        for name, kind in self._columns.items():
            size = kind.itemsize
            first = part * self._rows_per_part * size
            digest.update(np.fromfile(self._path(name), np.uint8, points * size, offset=first).data)
        return digest.hexdigest()

    def finish(self, header: FeatureHeader) -> None:
        """Remove what a killed process left after the last point."""
        self._refuse_links()
        for name, kind in self._columns.items():
            os.truncate(self._path(name), (header.points or 0) * kind.itemsize)

    def check(self, header: FeatureHeader) -> None:
        """Refuse files that are missing or of another size; contents are not read."""
        for name, kind in self._columns.items():
            path, wanted = self._path(name), (header.points or 0) * kind.itemsize
            size = path.stat().st_size if path.is_file() else None
            if size != wanted:
                received = "no such file" if size is None else f"{size:,} bytes"
                _refuse(path, f"{wanted:,} bytes, of {header.points:,} points", received)

    def read(self, name: str, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Return rows of a column."""
        mapped = self._map(name)
        if isinstance(rows, slice):
            return mapped[rows]
        # Neighbours on disk are read together.
        order = rows.argsort()
        return mapped[rows[order]][order.argsort()]

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._mapped:
            path, kind = self._path(name), self._columns[name]
            # A killed process may have left a part of a row at the end.
            n = path.stat().st_size // kind.itemsize
            # Copy-on-write: torch warns of arrays that cannot be written to, and the file must not change.
            self._mapped[name] = np.memmap(path, dtype=kind, mode="c", shape=(n,))
        return self._mapped[name]

    def _refuse_links(self) -> None:
        for path in map(self._path, self._columns):
            if path.is_symlink():
                received = "a symbolic link, which would be written through"
                raise InputError(str(path), "a file of this folder", received, "Put the file in its place.")

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"


_FIELDS = {"features": "features", "targets": "target", "identifiers": "identifier"}
"""Names of the columns in Parquet files."""


class Parquet:
    """``part-000000.parquet`` and so on, with the columns ``features``, ``target`` and ``identifier``.

    ``features`` has lists of fixed length F; of ``bfloat16`` the 16 bits, as ``uint16``. Targets of several numbers are
    lists too.
    """

    def __init__(self, folder: Path, header: FeatureHeader) -> None:
        self._folder, self._columns, self._rows_per_part = folder, header.columns, header.rows_per_part
        self._arrow, self._parquet = _pyarrow()
        fields = [(_FIELDS[name], self._type(kind)) for name, kind in self._columns.items()]
        self._schema = self._arrow.schema(fields)
        self._kept: dict[str, tuple[int, NDArray[Any]]] = {}

    def write(self, part: int, rows: dict[str, NDArray[Any]]) -> str:
        """Write a part and return its checksum."""
        columns = [self._array(rows[name], kind) for name, kind in self._columns.items()]
        table = self._arrow.table(columns, schema=self._schema)
        # Features compress badly, and a checksum is read far more often than a byte is saved.
        path = self._path(part)
        write_whole(path, lambda file: self._parquet.write_table(table, file, compression="none"), follow=False)
        return sha256_of(self._path(part))

    def checksum(self, part: int, points: int) -> str:
        """Return the checksum of the file of a part."""
        del points
        return sha256_of(self._path(part))

    def finish(self, header: FeatureHeader) -> None:
        """Remove what a killed process left after the last point."""
        part = len(header.parts)
        while self._path(part).is_file():
            self._path(part).unlink()
            part += 1

    def check(self, header: FeatureHeader) -> None:
        """Refuse files that are missing, or have other columns or another number of rows; contents are not read."""
        for part in range(len(header.parts)):
            path, (start, stop) = self._path(part), header.rows_of(part)
            wanted = f"a Parquet file with the columns {', '.join(self._schema.names)} of {stop - start:,} points"
            if not path.is_file():
                _refuse(path, wanted, "no such file")
            try:
                file = self._parquet.ParquetFile(path)
            except (OSError, ValueError) as error:
                _refuse(path, wanted, f"what cannot be read ({error})")
            with file:
                if file.metadata.num_rows != stop - start or not file.schema_arrow.equals(self._schema):
                    received = f"one with the columns {', '.join(file.schema_arrow.names)}"
                    _refuse(path, wanted, f"{received} of {file.metadata.num_rows:,} points")

    def read(self, name: str, rows: slice) -> NDArray[Any]:
        """Return rows of a column; the last part that was read is kept in memory."""
        kind, size = self._columns[name], self._rows_per_part
        found = [np.empty((0, *kind.shape), kind.base)]
        for part in range(rows.start // size, -(-rows.stop // size)):
            first = part * size
            found.append(self._part(name, part)[max(0, rows.start - first) : rows.stop - first])
        return np.concatenate(found)

    def _part(self, name: str, part: int) -> NDArray[Any]:
        if name not in self._kept or self._kept[name][0] != part:
            kind = self._columns[name]
            column = self._parquet.read_table(self._path(part), columns=[_FIELDS[name]]).column(0).combine_chunks()
            if kind.kind == "S":
                column = column.cast(self._arrow.binary())
            flat = (column.flatten() if kind.shape else column).to_numpy(zero_copy_only=False)
            self._kept[name] = part, flat.astype(kind.base).reshape(-1, *kind.shape)
        return self._kept[name][1]

    def _type(self, kind: np.dtype[Any]) -> Any:
        """Return Arrow's type of a column."""
        one = self._arrow.string() if kind.kind == "S" else self._arrow.from_numpy_dtype(kind.base)
        return self._arrow.list_(one, math.prod(kind.shape)) if kind.shape else one

    def _array(self, values: NDArray[Any], kind: np.dtype[Any]) -> Any:
        """Return a column as Arrow holds it."""
        flat = self._arrow.array(np.char.decode(values, "utf-8") if kind.kind == "S" else values.reshape(-1))
        return self._arrow.FixedSizeListArray.from_arrays(flat, math.prod(kind.shape)) if kind.shape else flat

    def _path(self, part: int) -> Path:
        return self._folder / f"part-{part:06d}.parquet"


Storage = MemoryMap | Parquet


def storage_of(folder: Path, header: FeatureHeader) -> Storage:
    """Return the files of a folder."""
    return MemoryMap(folder, header) if header.format == "memmap" else Parquet(folder, header)


def without_damaged(storage: Storage, header: FeatureHeader) -> FeatureHeader:
    """Return the header with the parts alone whose checksums are right."""
    parts: list[str | None] = []
    for part, checksum in enumerate(header.parts):
        start, stop = header.rows_of(part)
        try:
            parts.append(checksum if storage.checksum(part, stop - start) == checksum else None)
        except OSError:
            parts.append(None)
    return header.model_copy(update={"parts": tuple(parts)})


def _refuse(path: Path, wanted: str, received: str) -> NoReturn:
    hint = "Call contrastive_curvature.features with the same arguments: it writes what is missing."
    raise InputError(str(path), wanted, received, hint)


def _pyarrow() -> tuple[Any, Any]:
    argument = "format='parquet' (not the default, 'memmap')"
    return validate.package(argument, "pyarrow", "parquet"), validate.package(argument, "pyarrow.parquet", "parquet")

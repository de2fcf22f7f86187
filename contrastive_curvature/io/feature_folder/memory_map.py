"""Features as plain arrays in three files, which are mapped into memory."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.io.feature_folder.header import Header
from contrastive_curvature.io.feature_folder.storage import Rows, Storage

__all__ = ["MemoryMap"]

_BLOCK = 2**22
"""Bytes that are read at once for a checksum."""


class MemoryMap(Storage):
    """``features.bin``, ``targets.bin`` and ``identifiers.bin``: rows after each other, little-endian, no header."""

    def __init__(self, folder: Path, header: Header) -> None:
        super().__init__(folder, header)
        self._files: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "features": (self.precision.stored, (self.width,)),
            "targets": (self.target_type, self.target_shape),
            "identifiers": (self.identifier_type, ()),
        }
        self._mapped: dict[str, NDArray[Any]] = {}

    def write(self, part: int, rows: Rows) -> str:
        """See :meth:`Storage.write`."""
        digest = hashlib.sha256()
        for name, values in rows._asdict().items():
            kind, _ = self._files[name]
            data = np.ascontiguousarray(values, dtype=kind).tobytes()
            digest.update(data)
            # Files grow part by part; a part that was damaged is written again at its place.
            handle = os.open(self._path(name), os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            with os.fdopen(handle, "r+b") as file:
                file.seek(part * self.rows_per_part * self._row_bytes(name))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        self._mapped.clear()
        return digest.hexdigest()

    def finish(self, header: Header) -> None:
        """See :meth:`Storage.finish`."""
        for name in self._files:
            os.truncate(self._path(name), (header.points or 0) * self._row_bytes(name))

    def checksum(self, part: int, start: int, stop: int) -> str | None:
        """See :meth:`Storage.checksum`."""
        digest = hashlib.sha256()
        for name in self._files:
            size = self._row_bytes(name)
            left = (stop - start) * size
            try:
                with self._path(name).open("rb") as file:
                    file.seek(start * size)
                    while left and (block := file.read(min(left, _BLOCK))):
                        digest.update(block)
                        left -= len(block)
            except OSError:
                return None
            if left:
                return None
        return digest.hexdigest()

    def check_sizes(self, header: Header) -> None:
        """See :meth:`Storage.check_sizes`."""
        for name in self._files:
            path, wanted = self._path(name), (header.points or 0) * self._row_bytes(name)
            size = path.stat().st_size if path.is_file() else None
            if size != wanted:
                received = "no such file" if size is None else f"{size:,} bytes"
                raise self.refuse_size(path, f"{wanted:,} bytes, of {header.points:,} points", received)

    def rows(self, start: int, stop: int) -> Rows:
        """See :meth:`Storage.rows`."""
        return Rows(*(self._map(name)[start:stop] for name in self._files))

    def check_order(self) -> None:
        """See :meth:`Storage.check_order`: every order will do."""

    def chosen(self, numbers: NDArray[np.int64]) -> Rows:
        """See :meth:`Storage.chosen`."""
        # Neighbours on disk are read together.
        order = numbers.argsort()
        back = order.argsort()
        return Rows(*(self._map(name)[numbers[order]][back] for name in self._files))

    def targets(self, start: int, stop: int) -> NDArray[Any]:
        """See :meth:`Storage.targets`."""
        return self._map("targets")[start:stop]

    def identifiers(self, start: int, stop: int) -> NDArray[Any]:
        """See :meth:`Storage.identifiers`."""
        return self._map("identifiers")[start:stop]

    def features(self) -> NDArray[Any]:
        """See :meth:`Storage.features`."""
        return self._map("features")

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._mapped:
            kind, shape = self._files[name]
            path = self._path(name)
            n = path.stat().st_size // self._row_bytes(name)
            # Copy-on-write: torch warns of arrays that cannot be written to, and the file must not change.
            self._mapped[name] = np.memmap(path, dtype=kind, mode="c", shape=(n, *shape))
        return self._mapped[name]

    def _row_bytes(self, name: str) -> int:
        kind, shape = self._files[name]
        return kind.itemsize * math.prod(shape)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

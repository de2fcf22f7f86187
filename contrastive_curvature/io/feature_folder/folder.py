"""``FeatureFolder(path)``: saved features as a loader of batches, whole or a shard of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header, folder_path, read_header
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.network.given_features import FeatureSource, feature_inputs

HEADER = "header.safetensors"
"""The file that says what the others hold. It is written after them, so a folder whose header is complete is, too."""

Precision = Literal["float16", "bfloat16", "float32", "float64"]
"""torch's names of the types that features can be saved in."""

TargetType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]

_WRITE_AGAIN = "Call contrastive_curvature.features with the same arguments: it writes what is missing."


class FeatureHeader(Header):
    """What a feature folder holds.

    Args:
        dtype: Type of the features.
        source: The encoder that computed the features.
        target_type: torch's and NumPy's name of the type of the targets.
        target_shape: Shape of one target.
        identifiers: NumPy's name of their type: ``int64``, or ``S`` and the bytes of the longest text in UTF-8.
        rows_per_part: Number of points of every part but the last.
        class_names: Names of the classes that the targets number; ``None`` without.
        parts: Checksums of the parts that are written.
        points: Number N of points; ``None`` until all are written.
    """

    kind: ClassVar[str] = "features"
    described: ClassVar[str] = "a feature folder"
    made_by: ClassVar[str] = "contrastive_curvature.features(encoder, loader, path) writes one."
    repaired_by: ClassVar[str] = "Delete the folder, and write it again."

    dtype: Precision
    source: FeatureSource
    target_type: TargetType
    target_shape: tuple[PositiveInt, ...]
    identifiers: Annotated[str, Field(pattern="^(int64|S[1-9][0-9]*)$")]
    rows_per_part: PositiveInt
    class_names: tuple[str, ...] | None = None
    parts: tuple[str, ...] = ()
    points: PositiveInt | None = None


class Arrays:
    """``features.bin``, ``targets.bin`` and ``identifiers.bin``: rows after each other, nothing else.

    Args:
        folder: Where they are.
        header: Their types, all little-endian; ``bfloat16``, unknown to NumPy, is stored as its bits, ``uint16``.
    """

    def __init__(self, folder: Path, header: FeatureHeader) -> None:
        features = np.dtype("uint16" if header.dtype == "bfloat16" else header.dtype)
        self.kinds = {
            "features": np.dtype((features.newbyteorder("<"), (header.source.width,))),
            "targets": np.dtype((np.dtype(header.target_type).newbyteorder("<"), header.target_shape)),
            "identifiers": np.dtype(header.identifiers).newbyteorder("<"),
        }
        self.paths = {name: folder / f"{name}.bin" for name in self.kinds}
        self._rows_per_part = header.rows_per_part
        self._mapped: dict[str, NDArray[Any]] = {}

    def keep(self, parts: int) -> None:
        """Leave so many parts in the files, after which :meth:`write` writes."""
        for name, path in self.paths.items():
            if path.is_symlink():
                received = "a symbolic link, which would be written through"
                raise InputError(str(path), "a file of this folder", received, "Put the file in its place.")
            path.touch()
            os.truncate(path, parts * self._rows_per_part * self.kinds[name].itemsize)

    def write(self, rows: dict[str, NDArray[Any]]) -> None:
        """Write a part after the others."""
        self._mapped.clear()
        for name, path in self.paths.items():
            with path.open("ab") as file:
                file.write(rows[name].astype(self.kinds[name].base, copy=False).tobytes())
                file.flush()
                os.fsync(file.fileno())

    def checksum(self, part: int) -> str:
        """Return the checksum of a part as it is on disk, whole or not."""
        digest = hashlib.sha256()
        for name, path in self.paths.items():
            size = self._rows_per_part * self.kinds[name].itemsize
            if path.is_file():
                digest.update(np.fromfile(path, np.uint8, size, offset=part * size).data)
        return digest.hexdigest()

    def whole(self, header: FeatureHeader) -> tuple[str, ...]:
        """Return the checksums of the parts before the first damaged one."""
        damaged = (part for part, checksum in enumerate(header.parts) if self.checksum(part) != checksum)
        return header.parts[: next(damaged, None)]

    def read(self, name: str, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Return rows of an array."""
        if name not in self._mapped:
            # Copy-on-write: torch warns of arrays that cannot be written to, and the file must not change.
            self._mapped[name] = np.memmap(self.paths[name], dtype=self.kinds[name], mode="c")
        mapped = self._mapped[name]
        if isinstance(rows, slice):
            return mapped[rows]
        # Neighbours on disk are read together.
        order = rows.argsort()
        return mapped[rows[order]][order.argsort()]


def decode(stored: NDArray[Any], dtype: str) -> Tensor:
    """Return stored features as float32, or from float64 as float64; a copy."""
    features = _as_tensor(stored)
    if dtype == "bfloat16":
        features = features.view(torch.bfloat16)
    return features.to(torch.float64 if dtype == "float64" else torch.float32)


class FeatureFolder:
    """What :func:`contrastive_curvature.features` wrote, as a loader of batches ``(inputs, targets)``.

    It goes wherever a last-layer posterior takes a loader, as often as it is needed, and ``la(inputs)`` takes the
    inputs of one batch. Batches are read when they are needed: a batch of B points takes 4 B F bytes.

    Args:
        path: The folder.
        batch_size: Points of a batch.
        seed: ``None``: points in the order in which they were written. A whole number: in a random order, the same in
            every pass, for what takes the pairs or candidates inside a batch (``pairs="batch"``, losses of anchors).

    Attributes:
        path: The folder, absolute: processes elsewhere have other working directories.
        batch_size: Points of a batch.
        seed: Of the order of the points.
        dtype: torch's type that the features are stored in.
        width: Number F of features of a point.
        last_layer_name: Name of the layer that takes them in.
        source: The encoder that computed them.
        class_names: Names of the classes that the targets number; ``None`` without.

    Raises:
        InputError: It is no feature folder, not complete, damaged, or has files of another size.
    """

    def __init__(self, path: str | PathLike[str], batch_size: int = 4096, *, seed: int | None = None) -> None:
        self.path = folder_path("path", path)
        self._header = read_header(self.path / HEADER, FeatureHeader)
        self.batch_size = validate.count("batch_size", batch_size)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InputTypeError("seed", "a whole number or None", f"a {type(seed).__name__}")
        self.seed = seed
        if self._header.points is None:
            received = f"one with {len(self._header.parts)} parts"
            raise InputError(str(self.path), "a complete feature folder", received, _WRITE_AGAIN)
        self._arrays, self._rows = Arrays(self.path, self._header), range(self._header.points)
        for name, path in self._arrays.paths.items():
            wanted = self._header.points * self._arrays.kinds[name].itemsize
            size = path.stat().st_size if path.is_file() else None
            if size != wanted:
                received = "no such file" if size is None else f"{size:,} bytes"
                raise InputError(str(path), f"{wanted:,} bytes", received, _WRITE_AGAIN)
        self.dtype: torch.dtype = getattr(torch, self._header.dtype)
        self.source, self.class_names = self._header.source, self._header.class_names
        self.width, self.last_layer_name = self.source.width, self.source.last_layer

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._rows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Batches of features, lifted to float32 (from float64: as they are), and targets."""
        order = None if self.seed is None else self.numbers.numpy()
        for start in range(0, len(self._rows), self.batch_size):
            stop = start + self.batch_size
            rows = self._slice(start, stop) if order is None else order[start:stop]
            features = decode(self._arrays.read("features", rows), self._header.dtype)
            yield feature_inputs(features, self.source), _as_tensor(self._arrays.read("targets", rows))

    def __repr__(self) -> str:
        """Path, shape and type."""
        rows = self._rows
        some = "" if len(rows) == self._header.points else f", points {rows.start} to {rows.stop}"
        shape = f"{self._header.points} x {self.width}, {self._header.dtype}"
        return f"FeatureFolder({str(self.path)!r}: {shape}{some})"

    @property
    def dataset(self) -> range:
        """Rows of the folder, under the name that a ``DataLoader`` has for what tells how long a fit will take."""
        return self._rows

    @property
    def numbers(self) -> Tensor:
        """Rows of the folder that the points are, in the order of the batches, int64, shape (N,).

        With them, fits in several processes know which points their shards are.
        """
        if self.seed is None:
            return torch.arange(self._rows.start, self._rows.stop)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(len(self._rows), generator=generator) + self._rows.start

    @property
    def targets(self) -> Tensor:
        """Targets of all points, shape (N, ...), in the order in which they were written."""
        return _as_tensor(self._arrays.read("targets", self._slice()))

    @property
    def identifiers(self) -> NDArray[Any]:
        """Identifiers of all points, shape (N,): int64, or texts."""
        stored = self._arrays.read("identifiers", self._slice())
        return np.char.decode(stored, "utf-8") if stored.dtype.kind == "S" else stored.copy()

    @property
    def features(self) -> NDArray[Any]:
        """All features as they are stored, shape (N, F), mapped into memory; ``bfloat16`` as its bits, ``uint16``.

        The array is a private copy-on-write mapping: what is written to it does not reach the file.
        """
        # A mapping of its own, so that what is written to it changes no batch either.
        return Arrays(self.path, self._header).read("features", self._slice())

    def numpy(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Features of some points in memory, shape (stop - start, F), float32 (from float64: float64).

        Args:
            start: First point, counted from the first of this folder or shard.
            stop: The point after the last one; ``None`` for all.

        Raises:
            InputError: There are not so many points.
        """
        n = len(self._rows)
        stop = n if stop is None else stop
        if not 0 <= start <= stop <= n:
            raise InputError("start, stop", f"numbers of points from 0 to {n}", f"{start!r}, {stop!r}")
        features: NDArray[Any] = decode(
            self._arrays.read("features", self._slice(start, stop)), self._header.dtype
        ).numpy()
        return features

    def shard(self, index: int, count: int) -> FeatureFolder:
        """One of ``count`` contiguous parts of nearly equal size, as for one of several processes.

        Args:
            index: Which of them, from 0.
            count: How many there are. With more of them than points some are empty.

        Returns:
            A folder of these points alone; :attr:`numbers` says which rows of the whole folder they are.

        Raises:
            InputError: There is no such part.
        """
        validate.count("count", count)
        if not 0 <= index < count:
            raise InputError("index", f"a whole number from 0 to {count - 1}", index)
        n, first = len(self._rows), self._rows.start
        rows = range(first + n * index // count, first + n * (index + 1) // count)
        return _opened(self.path, self.batch_size, self.seed, rows)

    def verify(self) -> None:
        """Read everything, and compare it with the checksums that were taken when it was written.

        Raises:
            InputError: A part is damaged; the message names its points.
        """
        part = len(self._arrays.whole(self._header))
        if part < len(self._header.parts):
            start = part * self._header.rows_per_part
            stop = min(start + self._header.rows_per_part, self._header.points or 0)
            received = f"points {start} to {stop - 1} are damaged (part {part})"
            raise InputError(str(self.path), "the content that was written", received, _WRITE_AGAIN)

    def _slice(self, start: int = 0, stop: int | None = None) -> slice:
        """Return rows of the folder for points of this shard."""
        some = self._rows[start:stop]
        return slice(some.start, some.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """What another process needs to open the same points: no features are copied."""
        return _opened, (self.path, self.batch_size, self.seed, self._rows)


def _opened(path: Path, batch_size: int, seed: int | None, rows: range) -> FeatureFolder:
    folder = FeatureFolder(path, batch_size, seed=seed)
    folder._rows = rows
    return folder


def _as_tensor(stored: NDArray[Any]) -> Tensor:
    """Return a copy in memory, in the byte order of the machine."""
    return torch.from_numpy(np.array(stored, dtype=stored.dtype.newbyteorder("=")))

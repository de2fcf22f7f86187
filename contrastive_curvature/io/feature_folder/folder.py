"""``FeatureFolder(path)``: saved features, or a shard of them, as a loader of batches."""

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
    """The contents of a feature folder.

    Args:
        dtype: Dtype of the features.
        source: The encoder that computed the features.
        target_type: Name of the targets' dtype in torch and NumPy.
        target_shape: Shape of one target.
        identifiers: NumPy's name of the identifiers' dtype: ``int64``, or ``S`` and the length in bytes of the longest
            text in UTF-8.
        rows_per_part: Number of points of every part but the last.
        class_names: Names of the classes that the targets number; ``None`` without.
        parts: Checksums of the written parts.
        points: Number N of points; ``None`` until all points are written.
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
    """``features.bin``, ``targets.bin`` and ``identifiers.bin``: consecutive rows, without a header.

    Args:
        folder: Folder of the files.
        header: Header with the dtypes, all stored little-endian; ``bfloat16``, unknown to NumPy, is stored as its bits,
            ``uint16``.
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
        """Truncate the files to this number of parts; :meth:`write` appends to them."""
        for name, path in self.paths.items():
            if path.is_symlink():
                received = "a symbolic link, which would be written through"
                raise InputError(str(path), "a file of this folder", received, "Put the file in its place.")
            path.touch()
            os.truncate(path, parts * self._rows_per_part * self.kinds[name].itemsize)

    def write(self, rows: dict[str, NDArray[Any]]) -> None:
        """Append a part to the files."""
        self._mapped.clear()
        for name, path in self.paths.items():
            with path.open("ab") as file:
                file.write(rows[name].astype(self.kinds[name].base, copy=False).tobytes())
                file.flush()
                os.fsync(file.fileno())

    def checksum(self, part: int) -> str:
        """Return the checksum of a part on disk, even of an incomplete part."""
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
            # Copy-on-write: torch warns about read-only arrays, and the file must not change.
            self._mapped[name] = np.memmap(self.paths[name], dtype=self.kinds[name], mode="c")
        mapped = self._mapped[name]
        if isinstance(rows, slice):
            return mapped[rows]
        # Read in the order on disk, then restored to the requested order.
        order = rows.argsort()
        return mapped[rows[order]][order.argsort()]


def decode(stored: NDArray[Any], dtype: str) -> Tensor:
    """Copy stored features to float32; float64 stays float64."""
    features = _as_tensor(stored)
    if dtype == "bfloat16":
        features = features.view(torch.bfloat16)
    return features.to(torch.float64 if dtype == "float64" else torch.float32)


class FeatureFolder:
    """The folder of :func:`contrastive_curvature.features`, as a loader of batches ``(inputs, targets)``.

    A last-layer posterior accepts the folder wherever it accepts a loader, any number of times, and ``la(inputs)``
    accepts the inputs of one batch. Batches are read on demand: a batch of B points needs 4 B F bytes.

    Args:
        path: The folder.
        batch_size: Points of a batch.
        seed: ``None`` for the order in which the points were written. An integer for a random order, the same in every
            pass; needed if pairs or candidates come from one batch (``pairs="batch"``, losses of anchors).

    Attributes:
        path: The absolute path of the folder, since other processes may have other working directories.
        batch_size: Points of a batch.
        seed: Seed of the order of the points.
        dtype: torch's dtype of the stored features.
        width: Number F of features of a point.
        last_layer_name: Name of the layer whose inputs the features are.
        source: The encoder that computed the features.
        class_names: Names of the classes that the targets number; ``None`` without.

    Raises:
        InputError: The folder is not a feature folder, is incomplete or damaged, or has files of the wrong size.
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
        """Return the number of batches."""
        return -(-len(self._rows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield batches of features, converted to float32 (float64 stays float64), and targets."""
        order = None if self.seed is None else self.numbers.numpy()
        for start in range(0, len(self._rows), self.batch_size):
            stop = start + self.batch_size
            rows = self._slice(start, stop) if order is None else order[start:stop]
            features = decode(self._arrays.read("features", rows), self._header.dtype)
            yield feature_inputs(features, self.source), _as_tensor(self._arrays.read("targets", rows))

    def __repr__(self) -> str:
        """Show path, shape and dtype."""
        rows = self._rows
        some = "" if len(rows) == self._header.points else f", points {rows.start} to {rows.stop}"
        shape = f"{self._header.points} x {self.width}, {self._header.dtype}"
        return f"FeatureFolder({str(self.path)!r}: {shape}{some})"

    @property
    def dataset(self) -> range:
        """Return the rows of the folder, named as in a ``DataLoader``: a fit estimates its duration from it."""
        return self._rows

    @property
    def numbers(self) -> Tensor:
        """Return the row of every point in the folder, in the order of the batches, int64, shape (N,).

        Fits in several processes identify the points of their shards by these numbers.
        """
        if self.seed is None:
            return torch.arange(self._rows.start, self._rows.stop)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(len(self._rows), generator=generator) + self._rows.start

    @property
    def targets(self) -> Tensor:
        """Return the targets of all points, shape (N, ...), in the order in which they were written."""
        return _as_tensor(self._arrays.read("targets", self._slice()))

    @property
    def identifiers(self) -> NDArray[Any]:
        """Return the identifiers of all points, shape (N,): int64, or texts."""
        stored = self._arrays.read("identifiers", self._slice())
        return np.char.decode(stored, "utf-8") if stored.dtype.kind == "S" else stored.copy()

    @property
    def features(self) -> NDArray[Any]:
        """Return the stored features, shape (N, F), mapped into memory; ``bfloat16`` as its bits, ``uint16``.

        The array is a private copy-on-write mapping: writing to it does not change the file.
        """
        # A separate mapping, so that writing to it does not change a batch either.
        return Arrays(self.path, self._header).read("features", self._slice())

    def numpy(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return the features of some points, shape (stop - start, F), as float32 (float64 stays float64).

        Args:
            start: First point, counted from the first of this folder or shard.
            stop: The point after the last one; ``None`` for all.

        Raises:
            InputError: ``start`` or ``stop`` is out of range.
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
        """Return one of ``count`` contiguous parts of nearly equal size, for example one per process.

        Args:
            index: Number of the part, from 0.
            count: Number of parts. With more parts than points, some parts are empty.

        Returns:
            A folder of these points alone; its :attr:`numbers` are their rows in the whole folder.

        Raises:
            InputError: ``index`` is out of range.
        """
        validate.count("count", count)
        if not 0 <= index < count:
            raise InputError("index", f"a whole number from 0 to {count - 1}", index)
        n, first = len(self._rows), self._rows.start
        rows = range(first + n * index // count, first + n * (index + 1) // count)
        return _opened(self.path, self.batch_size, self.seed, rows)

    def verify(self) -> None:
        """Read the whole folder, and compare it with the checksums from its writing.

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
        """Pickle only the arguments to open the same points in another process, without features."""
        return _opened, (self.path, self.batch_size, self.seed, self._rows)


def _opened(path: Path, batch_size: int, seed: int | None, rows: range) -> FeatureFolder:
    folder = FeatureFolder(path, batch_size, seed=seed)
    folder._rows = rows
    return folder


def _as_tensor(stored: NDArray[Any]) -> Tensor:
    """Copy an array into memory, in the byte order of the machine."""
    return torch.from_numpy(np.array(stored, dtype=stored.dtype.newbyteorder("=")))

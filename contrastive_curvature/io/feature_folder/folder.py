"""``FeatureFolder(path)``: saved features as a loader of batches, whole or a shard of them."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import ArtifactFolder
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.io.feature_folder.columns import as_tensor, decode, decode_identifiers
from contrastive_curvature.io.feature_folder.header import FeatureHeader
from contrastive_curvature.io.feature_folder.storage import storage_of, without_damaged
from contrastive_curvature.network.given_features import feature_inputs


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
        class_names: Names of the classes that the targets number; ``None`` without.

    Raises:
        InputError: It is no feature folder, not complete, damaged, or has files of another size.
        UnsupportedError: It has Parquet files, and pyarrow is not installed or there is a ``seed``.
    """

    def __init__(self, path: str | PathLike[str], batch_size: int = 4096, *, seed: int | None = None) -> None:
        folder = ArtifactFolder(path, FeatureHeader)
        self.path, self._header = folder.path, folder.read()
        self.batch_size = validate.count("batch_size", batch_size)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InputTypeError("seed", "a whole number or None", f"a {type(seed).__name__}")
        self.seed = seed
        if not self._header.complete:
            there = sum(part is not None for part in self._header.parts)
            hint = "Call contrastive_curvature.features with the same arguments: it goes on where it stopped."
            raise InputError(str(self.path), "a complete feature folder", f"one with {there} parts", hint)
        self._storage = storage_of(self.path, self._header)
        self._storage.check(self._header)
        if seed is not None and self._header.format == "parquet":
            # A random order would read whole parts for single points.
            raise UnsupportedError("seed: Parquet files are read in their order. Use format='memmap', or seed=None.")
        self._rows = range(self._header.points or 0)
        self.dtype: torch.dtype = getattr(torch, self._header.dtype)
        self.class_names = self._header.class_names
        self.width, self.last_layer_name = self._header.source.width, self._header.source.last_layer

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._rows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Batches of features, lifted to float32 (from float64: as they are), and targets."""
        order = None if self.seed is None else self.numbers.numpy()
        for start in range(0, len(self._rows), self.batch_size):
            rows = self._slice(start, start + self.batch_size)
            chosen: Any = rows if order is None else order[start : start + self.batch_size]
            features = decode(self._storage.read("features", chosen), self._header.dtype)
            yield feature_inputs(features, self._header.source), as_tensor(self._storage.read("targets", chosen))

    def __repr__(self) -> str:
        """Path, shape and type."""
        mine = self._rows
        some = "" if len(mine) == self._header.points else f", points {mine.start} to {mine.stop}"
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
        return as_tensor(self._storage.read("targets", self._slice()))

    @property
    def identifiers(self) -> NDArray[Any]:
        """Identifiers of all points, shape (N,): int64, or texts."""
        return decode_identifiers(self._storage.read("identifiers", self._slice()).copy())

    @property
    def features(self) -> NDArray[Any]:
        """All features as they are stored, shape (N, F), mapped into memory; ``bfloat16`` as its bits, ``uint16``.

        The array is a private copy-on-write mapping: what is written to it does not reach the file.

        Raises:
            UnsupportedError: The folder has Parquet files.
        """
        if self._header.format == "parquet":
            raise UnsupportedError(
                "features: Parquet files have no one array in memory. Iterate over the folder, or take some rows with "
                "folder.numpy(start, stop); format='memmap' has one array."
            )
        # A mapping of its own, so that what is written to it changes no batch either.
        return storage_of(self.path, self._header).read("features", self._slice())

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
        features = decode(self._storage.read("features", self._slice(start, stop)), self._header.dtype)
        found: NDArray[Any] = features.numpy()
        return found

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
        out = FeatureFolder(self.path, self.batch_size, seed=self.seed)
        out._rows = range(first + n * index // count, first + n * (index + 1) // count)
        return out

    def verify(self) -> None:
        """Read everything, and compare it with the checksums that were taken when it was written.

        Raises:
            InputError: A part is damaged; the message names its points.
        """
        parts = without_damaged(self._storage, self._header).parts
        if None in parts:
            part = parts.index(None)
            start, stop = self._header.rows_of(part)
            received = f"points {start} to {stop - 1} are damaged (part {part})"
            hint = "Call contrastive_curvature.features with the same arguments: it writes them again."
            raise InputError(str(self.path), "the content that was written", received, hint)

    def _slice(self, start: int = 0, stop: int | None = None) -> slice:
        """Return rows of the folder for points of this shard."""
        some = self._rows[start:stop]
        return slice(some.start, some.stop)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to open the same points: no features are copied."""
        return {"path": self.path, "batch_size": self.batch_size, "seed": self.seed, "rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the folder again."""
        self.__init__(state["path"], state["batch_size"], seed=state["seed"])  # type: ignore[misc]
        self._rows = state["rows"]

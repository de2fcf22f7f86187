"""What a job runs over: Parquet files or a feature folder, in parts."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.feature_folder import FeatureFolder
from contrastive_curvature.io.feature_folder.header import HEADER
from contrastive_curvature.io.jobs.files import Paths
from contrastive_curvature.io.jobs.parquet_parts import ParquetParts, Reader, default_parts

__all__ = ["FolderParts", "Parts", "Source", "parts_of"]

Source = ParquetParts | FeatureFolder | Paths
"""What users give."""


class Parts(Protocol):
    """A data set in parts."""

    def __len__(self) -> int:
        """Number of parts."""

    def __getitem__(self, part: int) -> Any:
        """The loader of a part."""

    @property
    def fingerprint(self) -> str:
        """A text that other data changes."""


@dataclass(frozen=True)
class FolderParts:
    """A feature folder in parts.

    Args:
        folder: The folder.
        count: Number of parts.
    """

    folder: FeatureFolder
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: int) -> FeatureFolder:
        """The loader of a part, by its index from 0."""
        if not 0 <= part < self.count:
            raise IndexError(part)
        return self.folder.shard(part, self.count)

    def __iter__(self) -> Iterator[FeatureFolder]:
        return (self[part] for part in range(self.count))

    @property
    def fingerprint(self) -> str:
        """A text that other data changes: the header has a checksum of every part of the folder."""
        header = (self.folder.path / HEADER).read_bytes()
        rows = self.folder.dataset
        return f"{hashlib.sha256(header).hexdigest()[:32]} {rows.start}:{rows.stop}"


def parts_of(
    source: Any,
    parts: int | None = None,
    batch_size: int | None = None,
    read: Reader | None = None,
    columns: Sequence[str] | None = None,
) -> Parts:
    """Take apart what a user gave as ``source``.

    Args:
        source: :class:`ParquetParts`, a feature folder or its path, or Parquet files.
        parts: Number of parts; ``None`` for the default.
        batch_size: Rows of a batch; ``None`` for 4,096.
        read: See :class:`ParquetParts`.
        columns: See :class:`ParquetParts`.

    Raises:
        InputError: An option has no effect on this source; or see :class:`ParquetParts` and :class:`FeatureFolder`.
        InputTypeError: The source is something else.
    """
    given = {"parts": parts, "batch_size": batch_size, "read": read, "columns": columns}
    if isinstance(source, (ParquetParts, FolderParts)):
        _refuse(given, f"a {type(source).__name__}, which has its own")
        return source
    is_path = isinstance(source, (str, os.PathLike))
    if is_path and (Path(source) / HEADER).is_file():
        source = FeatureFolder(Path(source).absolute(), 4096 if batch_size is None else batch_size)
    elif isinstance(source, FeatureFolder) and batch_size is not None:
        _refuse({"batch_size": batch_size}, "a FeatureFolder, which has its own")
    if isinstance(source, FeatureFolder):
        _refuse({"read": read, "columns": columns}, "a feature folder, whose batches are known")
        n = len(source.dataset)
        count = default_parts(n) if parts is None else validate.count("parts", parts)
        if count > n:
            raise InputError(expected("parts", f"at most {n:,}, the number of points", count))
        # Absolute, as processes elsewhere have other working directories.
        source = copy.copy(source)
        source.path = source.path.absolute()
        return FolderParts(source, count)
    if not is_path and not isinstance(source, (list, tuple)):
        wanted = "Parquet files, a ParquetParts, or a feature folder"
        raise InputTypeError(expected("source", wanted, f"a {type(source).__name__}"))
    return ParquetParts(
        source, parts, batch_size=4096 if batch_size is None else batch_size, read=read, columns=columns
    )


def _refuse(given: dict[str, Any], source: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(expected(name, f"None with {source}", f"{value!r}"[:80]))

"""What a job runs over: Parquet files or a feature folder, in parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from contrastive_curvature.errors import InputError
from contrastive_curvature.io.feature_folder import FeatureFolder
from contrastive_curvature.io.feature_folder.header import HEADER
from contrastive_curvature.io.jobs.parquet_parts import ParquetParts, Paths, Reader, need, number_of_parts

Source = ParquetParts | FeatureFolder | Paths
"""What users give."""


class FolderParts:
    """A feature folder in parts, with the interface of :class:`ParquetParts`."""

    def __init__(self, folder: FeatureFolder, parts: int | None) -> None:
        self._folder, self._count = folder, number_of_parts(parts, len(folder.dataset))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: int) -> FeatureFolder:
        if part >= self._count:
            raise IndexError(part)
        return self._folder.shard(part, self._count)

    @property
    def fingerprint(self) -> str:
        """A text that other data changes: the header has a checksum of every part of the folder."""
        header = (self._folder.path / HEADER).read_bytes()
        rows = self._folder.dataset
        return f"{hashlib.sha256(header).hexdigest()[:32]} {rows.start}:{rows.stop}"

    def kept_types(self) -> dict[str, Any]:
        """Return the type of identifiers; nothing else can be passed through."""
        whole_numbers = self[0].identifiers.dtype.kind in "iu"
        return {"identifier": need("pyarrow").int64() if whole_numbers else need("pyarrow").string()}

    def to_embed(self, part: int, keep: Sequence[str]) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield inputs, identifiers and no further columns of the batches of a part."""
        del keep
        loader, start = self[part], 0
        # Batches are in another order than identifiers where the folder has a seed.
        order = loader.numbers.numpy() - loader.dataset.start
        identifiers = need("pyarrow").array(loader.identifiers[order])
        for x, y in loader:
            yield x, identifiers.slice(start, len(y)), []
            start += len(y)


Parts = ParquetParts | FolderParts


def parts_of(
    source: Source | Parts,
    parts: int | None = None,
    batch_size: int | None = None,
    read: Reader | None = None,
    columns: Sequence[str] | None = None,
) -> Parts:
    """Divide what a user gave as ``source``; refuse options that have no effect on it."""
    if isinstance(source, (ParquetParts, FolderParts)):
        _refuse("a ParquetParts", parts=parts, batch_size=batch_size, read=read, columns=columns)
        return source
    if isinstance(source, FeatureFolder):
        _refuse("a FeatureFolder", batch_size=batch_size, read=read, columns=columns)
        return FolderParts(source, parts)
    if isinstance(source, (str, os.PathLike)) and (Path(source) / HEADER).is_file():
        _refuse("a feature folder", read=read, columns=columns)
        return FolderParts(FeatureFolder(source, 4096 if batch_size is None else batch_size), parts)
    return ParquetParts(
        source, parts, batch_size=4096 if batch_size is None else batch_size, read=read, columns=columns
    )


def _refuse(source: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(name, f"None with {source}, which has its own", f"{value!r}"[:80])

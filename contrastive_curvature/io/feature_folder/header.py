"""The header of a feature folder: how features, targets and identifiers are stored, and which parts are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from contrastive_curvature.artifact import ArtifactFolder, Header
from contrastive_curvature.network.given_features import FeatureSource

HEADER = Header.file_name

FORMATS = ("memmap", "parquet")

PRECISIONS = ("float16", "bfloat16", "float32", "float64")
"""torch's names of the types that features can be saved in."""


TARGET_TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


def _one_of(names: tuple[str, ...]) -> Any:
    return Field(pattern=f"^({'|'.join(names)})$")


class FeatureHeader(Header):
    """What a feature folder holds.

    Args:
        format: Of :data:`FORMATS`.
        dtype: Of :data:`PRECISIONS`.
        source: The encoder that computed the features.
        target_type: torch's and NumPy's name of the type of the targets, of :data:`TARGET_TYPES`.
        target_shape: Shape of one target.
        identifiers: NumPy's name of their type: ``int64``, or ``S`` and the bytes of the longest text in UTF-8.
        rows_per_part: Number of points of every part but the last.
        class_names: Names of the classes that the targets number; ``None`` without.
        points: Number N of points; ``None`` until all have been seen once.
        parts: Checksum of every part, ``None`` for one that is not there.
    """

    kind: ClassVar[str] = "features"
    described: ClassVar[str] = "a feature folder"
    made_by: ClassVar[str] = "contrastive_curvature.features(encoder, loader, path) writes one."
    repaired_by: ClassVar[str] = "Delete the folder, and write it again."

    format: str = _one_of(FORMATS)
    dtype: str = _one_of(PRECISIONS)
    source: FeatureSource
    target_type: str = _one_of(TARGET_TYPES)
    target_shape: tuple[PositiveInt, ...]
    identifiers: str = _one_of(("int64", "S[1-9][0-9]*"))
    rows_per_part: PositiveInt
    class_names: tuple[str, ...] | None = None
    points: int | None = None
    parts: tuple[str | None, ...] = ()

    @model_validator(mode="after")
    def _are_columns(self) -> Self:
        try:
            _ = self.columns
        except (ValueError, OverflowError):
            raise ValueError("source and target_shape: no array has so many columns") from None
        return self

    @property
    def columns(self) -> dict[str, np.dtype[Any]]:
        """Return name and type of what is stored of a point, little-endian; ``bfloat16``, unknown to NumPy, as bits."""
        features = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        return {
            "features": np.dtype((features.newbyteorder("<"), (self.source.width,))),
            "targets": np.dtype((np.dtype(self.target_type).newbyteorder("<"), self.target_shape)),
            "identifiers": np.dtype(self.identifiers).newbyteorder("<"),
        }

    @property
    def complete(self) -> bool:
        """Return whether every point has been written."""
        if self.points is None or None in self.parts:
            return False
        return len(self.parts) == -(-self.points // self.rows_per_part)

    def rows_of(self, part: int) -> tuple[int, int]:
        """Return the first row of a part, and the row after its last one."""
        stop = (part + 1) * self.rows_per_part
        return part * self.rows_per_part, stop if self.points is None else min(stop, self.points)

    def with_part(self, part: int, checksum: str) -> FeatureHeader:
        """Return the header once a part is written."""
        parts = [*self.parts, *[None] * (part + 1 - len(self.parts))]
        parts[part] = checksum
        return self.model_copy(update={"parts": tuple(parts)})


def read_header(path: Path) -> FeatureHeader:
    """Return the header of a feature folder."""
    return ArtifactFolder(path, FeatureHeader).read()

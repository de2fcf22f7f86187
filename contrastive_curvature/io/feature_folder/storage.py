"""Where the rows of a feature folder are: the calls that the memory-mapped files and the Parquet files share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.feature_folder.header import Header
from contrastive_curvature.io.feature_folder.precision import TARGET_TYPES

__all__ = ["Rows", "Storage"]


class Rows(NamedTuple):
    """Points as they are stored.

    Attributes:
        features: Shape (B, F).
        targets: Shape (B, ...).
        identifiers: Shape (B,).
    """

    features: NDArray[Any]
    targets: NDArray[Any]
    identifiers: NDArray[Any]


class Storage(ABC):
    """The files of a feature folder besides its header.

    Args:
        folder: The folder.
        header: What it says of types and shapes.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.precision = header.precision
        self.width = header.source.width
        self.target_type = np.dtype(TARGET_TYPES[header.target_type])
        self.target_shape = header.target_shape
        self.identifier_type = header.identifiers.stored
        self.rows_per_part = header.rows_per_part

    @abstractmethod
    def write(self, part: int, rows: Rows) -> str:
        """Write a part and give its checksum; what a killed process leaves of it, the header does not list."""

    @abstractmethod
    def finish(self, header: Header) -> None:
        """Remove what lies behind the last point: what a killed process with more data may have left."""

    @abstractmethod
    def checksum(self, part: int, start: int, stop: int) -> str | None:
        """Checksum of a part as it is on disk, ``None`` where it is not there whole."""

    @abstractmethod
    def check_sizes(self, header: Header) -> None:
        """Refuse files that are missing or of another size than the header says; contents are not read.

        Raises:
            InputError: There are.
        """

    @abstractmethod
    def rows(self, start: int, stop: int) -> Rows:
        """The points from ``start`` to before ``stop``."""

    @abstractmethod
    def check_order(self) -> None:
        """Refuse a random order of points.

        Raises:
            UnsupportedError: The files are read in their order only.
        """

    @abstractmethod
    def chosen(self, numbers: NDArray[np.int64]) -> Rows:
        """The points of these numbers, in this order."""

    @abstractmethod
    def targets(self, start: int, stop: int) -> NDArray[Any]:
        """Their targets alone, shape (B, ...)."""

    @abstractmethod
    def identifiers(self, start: int, stop: int) -> NDArray[Any]:
        """Their identifiers alone, shape (B,)."""

    @abstractmethod
    def features(self) -> NDArray[Any]:
        """All features as they are stored, shape (N, F), without reading them.

        Raises:
            UnsupportedError: The files have no such form.
        """

    def refuse_size(self, path: Path, wanted: str, received: str) -> InputError:
        """The error of a file that is not whole."""
        hint = "Call contrastive_curvature.features with the same arguments: it writes what is missing."
        return InputError(expected(str(path), wanted, received, hint))

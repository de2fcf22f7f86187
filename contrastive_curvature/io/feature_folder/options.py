"""What a user asks of :func:`contrastive_curvature.features`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.errors import InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.feature_folder.header import FORMATS
from contrastive_curvature.io.feature_folder.identifiers import GivenIdentifiers, check_identifiers
from contrastive_curvature.io.feature_folder.precision import Precision, parse_precision
from contrastive_curvature.network.loader import check_loader, in_fixed_order

__all__ = ["Options", "check_loader_order"]

_PART_BYTES = 2**26
"""Features of one part: what is held in memory, written at once, and lost by an interruption."""


@dataclass(frozen=True)
class Options:
    """Options of a feature folder.

    Attributes:
        precision: Of the features.
        storage: ``"memmap"`` or ``"parquet"``.
        identifiers: Of the points.
        last_layer_name: The name that the user gave, or ``None``.
        label_key: Where batches that are mappings keep the labels.
        rows_per_part: The number that the user gave, or ``None``.
    """

    precision: Precision
    storage: str
    identifiers: GivenIdentifiers
    last_layer_name: str | None
    label_key: str
    rows_per_part: int | None

    @classmethod
    def checked(
        cls, dtype: Any, storage: Any, identifiers: Any, last_layer_name: Any, label_key: Any, rows_per_part: Any
    ) -> Options:
        """Check what the user passed.

        Raises:
            InputError: A value is unknown or out of range.
            InputTypeError: A value has the wrong type.
        """
        precision = parse_precision(dtype)
        validate.choice("format", storage, FORMATS)
        if last_layer_name is not None and not isinstance(last_layer_name, str):
            raise InputTypeError(expected("last_layer_name", "a name or None", f"a {type(last_layer_name).__name__}"))
        if not isinstance(label_key, str):
            raise InputTypeError(expected("label_key", "a name", f"a {type(label_key).__name__}"))
        if rows_per_part is not None:
            validate.count("rows_per_part", rows_per_part)
        return cls(precision, storage, check_identifiers(identifiers), last_layer_name, label_key, rows_per_part)

    def rows_for(self, width: int) -> int:
        """Rows of a part for features of this width."""
        return self.rows_per_part or max(1, _PART_BYTES // (width * self.precision.stored.itemsize))


def check_loader_order(loader: Any) -> Any:
    """A loader of all points in the order of the data set, where it is a ``DataLoader``.

    Raises:
        InputTypeError: It cannot be iterated over.
        UnsupportedError: It leaves points out, or gives every process a part of the data.
    """
    check_loader(loader, "loader", once=True)
    if getattr(loader, "drop_last", False) is True:
        msg = "loader: drop_last=True leaves out the last points of the data. Use drop_last=False."
        raise UnsupportedError(msg)
    return in_fixed_order(loader)

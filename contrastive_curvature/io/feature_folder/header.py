"""The header of a feature folder: one small JSON file that says what the other files hold, and which parts are done."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.feature_folder.identifiers import IdentifierType
from contrastive_curvature.io.feature_folder.precision import PRECISIONS, TARGET_TYPES, Precision
from contrastive_curvature.network.given_features import FeatureSource

__all__ = ["FORMATS", "HEADER", "Header", "read_header", "write_header"]

HEADER = "header.json"

FORMATS = ("memmap", "parquet")

_FORMAT = "contrastive_curvature.features"

_VERSION = 1

_MOST_BYTES = 2**28
"""Largest header that is read."""


@dataclass(frozen=True)
class Header:
    """What a feature folder holds.

    Attributes:
        storage: ``"memmap"`` or ``"parquet"``.
        precision: Of the features.
        source: The encoder that they came from.
        target_type: torch's name of the targets' type.
        target_shape: Shape of one target.
        identifiers: Their type.
        rows_per_part: Number of points of every part but the last.
        points: Number N of points; ``None`` until all have been seen once.
        parts: Checksum of every part, ``None`` for one that is not there.
    """

    storage: str
    precision: Precision
    source: FeatureSource
    target_type: str
    target_shape: tuple[int, ...]
    identifiers: IdentifierType
    rows_per_part: int
    points: int | None = None
    parts: tuple[str | None, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Whether every point has been written."""
        if self.points is None or None in self.parts:
            return False
        return len(self.parts) == -(-self.points // self.rows_per_part)

    def rows_of(self, part: int) -> tuple[int, int]:
        """First row of a part, and the row after its last one."""
        stop = (part + 1) * self.rows_per_part
        return part * self.rows_per_part, stop if self.points is None else min(stop, self.points)

    def with_part(self, part: int, checksum: str | None) -> Header:
        """The header once a part has this checksum, or is gone."""
        parts = [*self.parts, *[None] * (part + 1 - len(self.parts))]
        parts[part] = checksum
        return replace(self, parts=tuple(parts))

    def to_plain(self) -> dict[str, Any]:
        """Strings and numbers, for JSON."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "storage": self.storage,
            "dtype": self.precision.name,
            "encoder": self.source.to_plain(),
            "targets": {"dtype": self.target_type, "shape": list(self.target_shape)},
            "identifiers": {"kind": self.identifiers.kind, "bytes": self.identifiers.bytes},
            "rows_per_part": self.rows_per_part,
            "points": self.points,
            "parts": list(self.parts),
        }


def write_header(folder: Path, header: Header) -> None:
    """Write the header, whole or not at all."""
    plain = header.to_plain()
    text = json.dumps({**plain, "checksum": _checksum(plain)}, indent=1) + "\n"
    write_whole(folder / HEADER, lambda file: file.write(text.encode()))


def read_header(folder: Path) -> Header:
    """Read and check the header of a folder.

    Raises:
        InputError: There is none, it is damaged, of a later version, or malformed.
    """
    path = folder / HEADER
    hint = "contrastive_curvature.features(encoder, loader, path) writes one."
    if not path.is_file():
        raise InputError(expected(str(folder), "a feature folder", f"no file {HEADER} in it", hint))
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(expected(str(path), "a header", f"{path.stat().st_size} bytes"))
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(expected(str(path), "a header in JSON", f"what cannot be read ({error})")) from None
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise InputError(expected(str(path), "the header of a feature folder", "another JSON file", hint))
    if plain.get("version") != _VERSION:
        received = f"version {plain.get('version')!r}"
        raise InputError(expected(str(path), f"version {_VERSION}", received, "Use the release that wrote it."))
    checksum = plain.pop("checksum", None)
    if checksum != _checksum(plain):
        raise InputError(expected(str(path), "a header with the checksum that it states", "another: it is damaged"))
    return _parsed(plain, str(path))


def _parsed(plain: dict[str, Any], name: str) -> Header:
    targets, identifiers = plain.get("targets"), plain.get("identifiers")
    shape = targets.get("shape") if isinstance(targets, dict) else None
    parts = plain.get("parts")
    good = {
        "storage": plain.get("storage") in FORMATS,
        "dtype": plain.get("dtype") in PRECISIONS,
        "targets": isinstance(targets, dict)
        and targets.get("dtype") in TARGET_TYPES
        and isinstance(shape, list)
        and all(_is_size(n) for n in shape),
        "identifiers": isinstance(identifiers, dict)
        and identifiers.get("kind") in ("int64", "text")
        and _is_size(identifiers.get("bytes"))
        and (identifiers["kind"] == "text" or identifiers["bytes"] == 8),
        "rows_per_part": _is_size(plain.get("rows_per_part")),
        "points": plain.get("points") is None or _is_size(plain.get("points")),
        "parts": isinstance(parts, list)
        and all(part is None or (isinstance(part, str) and re.fullmatch(r"[0-9a-f]{64}", part)) for part in parts),
    }
    wrong = [key for key, fine in good.items() if not fine]
    if wrong:
        raise InputError(expected(f"{name}: {wrong[0]}", "a value that this release writes", f"{plain.get(wrong[0])}"))
    source = FeatureSource.of_plain(plain.get("encoder"), f"{name}: encoder")
    header = Header(
        plain["storage"],
        PRECISIONS[plain["dtype"]],
        source,
        targets["dtype"],  # type: ignore[index]
        tuple(shape),  # type: ignore[arg-type]
        IdentifierType(identifiers["kind"], identifiers["bytes"]),  # type: ignore[index]
        plain["rows_per_part"],
        plain["points"],
        tuple(parts),  # type: ignore[arg-type]
    )
    if header.points is not None and len(header.parts) > -(-header.points // header.rows_per_part):
        raise InputError(expected(f"{name}: parts", "no more of them than the points fill", f"{len(header.parts)}"))
    return header


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**62


def _checksum(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

"""``--out``: tables that are written as their rows come, and whether a file or a folder can be written at all."""

from __future__ import annotations

import csv
import io
import itertools
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np

from contrastive_curvature.apps.cli.console import BadInputError, needed
from contrastive_curvature.artifact import final_target, write_whole

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.sources import Source

Rows = Mapping[str, Any]
"""Columns of some rows, by name: arrays or lists."""


def check_output(path: Path, sources: Iterable[Source]) -> None:
    """Refuse a file that cannot be written, and one of the inputs, before anything is computed."""
    target = final_target(path)
    if target.exists() and any(source.path.exists() and source.path.samefile(target) for source in sources):
        raise BadInputError(f"--out {path}", "another file than the inputs", "one of them")
    if path.suffix.lower() == ".parquet":
        needed("pyarrow", f"--out {path}", "pip install pyarrow; or name a .csv")


def write_table(path: Path, parts: Iterable[Rows]) -> Counter[str]:
    """Write a table whose rows come in parts, and return how many rows are true in each column of booleans.

    An error leaves what was there under that name. ``-`` is stdout.
    """
    true: Counter[str] = Counter()

    def counted() -> Iterator[Rows]:
        for part in parts:
            true.update({name: int(column.sum()) for name, column in part.items() if _is_bool(column)})
            yield part

    writer = _write_parquet if path.suffix.lower() == ".parquet" else _write_csv
    if path == Path("-"):
        writer(sys.stdout.buffer, counted())
    else:
        write_whole(path, lambda file: writer(file, counted()))
    return true


def _write_csv(file: BinaryIO, parts: Iterator[Rows]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        rows = csv.writer(_Lines(text))
        first = next(parts)
        rows.writerow(first)
        for part in itertools.chain([first], parts):
            # As JSON and SQL write them, which pandas and others read as booleans too.
            columns = [np.where(c, "true", "false") if _is_bool(c) else c for c in part.values()]
            rows.writerows(zip(*columns, strict=True))
    finally:
        # The wrapper would close the file, which its owner has yet to flush.
        text.detach()


def _is_bool(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype == bool


class _Lines:
    """Where ``csv.writer`` writes.

    It quotes what has a character of its line end: with its own one also a carriage return, which would split a row.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def _write_parquet(file: BinaryIO, parts: Iterator[Rows]) -> None:
    pa = needed("pyarrow", "--out", "pip install pyarrow")
    first = pa.table(next(parts))
    with needed("pyarrow.parquet", "--out", "pip install pyarrow").ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(pa.table(part, schema=first.schema))


def check_writable(folder: Path, target: Path) -> None:
    """Refuse a folder that cannot be made, or not be written; ``target`` is the same with all links followed."""
    above = target
    while not above.exists():
        above = above.parent
    # Only a trial tells of a file system that takes no folders, or no long names. Writers use such a name too.
    probe = above / f".{target.name}.{secrets.token_hex(6)}.tmp"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        received = f"{above}: {error.strerror or error}"
        raise BadInputError(f"--out {folder}", "a folder that can be written", received) from error

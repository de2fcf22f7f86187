"""A table of texts: ``.csv`` with a header, or ``.jsonl`` with one object a line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.cli.errors import BadInputError
from contrastive_curvature.errors import expected

if TYPE_CHECKING:
    from contrastive_curvature.cli.sources import Columns

__all__ = ["read_table"]


def read_table(path: Path, columns: Columns) -> tuple[list[str], NDArray[Any] | None, list[str]]:
    """Texts, classes (int64 or texts; ``None`` without) and identifiers of a table.

    Raises:
        BadInputError: It cannot be read, is empty, a row has no text, or only some have a class.
    """
    texts: list[str] = []
    classes: list[Any] = []
    ids: list[str] = []
    for number, row in enumerate(_rows(path)):
        text = row.get(columns.text)
        if not isinstance(text, str) or not text.strip():
            hint = f"The row has {', '.join(map(str, row)) or 'nothing'}; --text-column names another column."
            raise BadInputError(expected(f"{path}", f"a text in {columns.text!r} of row {number}", f"{text!r}", hint))
        texts.append(text)
        classes.append(row.get(columns.label))
        ids.append(str(number) if columns.id is None else _id(path, row, columns.id, number))
    if not texts:
        raise BadInputError(expected(f"{path}", "at least one row", "none"))
    return texts, _classes(path, classes, columns.label), ids


def _rows(path: Path) -> Iterator[dict[Any, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                yield from csv.DictReader(file, strict=True)
                return
            for number, line in enumerate(file):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise BadInputError(
                            expected(f"{path}", "one JSON object a line", f"{line[:40]!r}, line {number}")
                        )
                    yield row
    except OSError as error:
        raise BadInputError(expected(f"{path}", "a file that can be read", error.strerror or f"{error}")) from error
    except (ValueError, csv.Error) as error:
        kind = "a CSV file with a header" if path.suffix.lower() == ".csv" else "one JSON object a line"
        raise BadInputError(expected(f"{path}", f"{kind} in UTF-8", f"what cannot be read ({error})")) from error


def _id(path: Path, row: dict[Any, Any], name: str, number: int) -> str:
    if row.get(name) is None:
        raise BadInputError(expected(f"{path}", f"an identifier in {name!r} of row {number}", "none"))
    return str(row[name])


def _classes(path: Path, found: list[Any], name: str) -> NDArray[Any] | None:
    missing = [row for row, value in enumerate(found) if value is None or value == ""]
    if len(missing) == len(found):
        return None
    if missing:
        raise BadInputError(
            expected(f"{path}", f"a class in {name!r} of every row or of none", f"none in row {missing[0]}")
        )
    if all(type(value) is int for value in found):
        return np.array(found, dtype=np.int64)
    return np.array([str(value) for value in found])

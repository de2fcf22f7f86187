"""A table of texts: ``.csv`` with a header, or ``.jsonl`` with one object a line."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.texts import readable
from contrastive_curvature.errors import expected

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.sources import Columns

__all__ = ["read_table"]

_LONGEST = 2**31 - 1
"""Characters of a field of a .csv at most; Python's own limit is 131,072."""


def read_table(path: Path, columns: Columns) -> tuple[list[str], NDArray[Any] | None, list[str]]:
    """Texts, classes (int64 or texts; ``None`` without) and identifiers of a table.

    Raises:
        BadInputError: It cannot be read, is empty, a row has no text or too many fields, or only some have a class.
    """
    texts: list[str] = []
    classes: list[Any] = []
    ids: list[str] = []
    for number, row in enumerate(_rows(path)):
        text = row.get(columns.text)
        if not isinstance(text, str) or not text.strip():
            hint = f"The row has {', '.join(map(str, row)) or 'nothing'}; --text-column names another column."
            raise BadInputError(expected(f"{path}", f"a text in {columns.text!r} of row {number}", f"{text!r}", hint))
        if readable(text) != text:
            raise BadInputError(expected(f"{path}", f"Unicode in {columns.text!r} of row {number}", f"{text[:40]!r}"))
        texts.append(text)
        classes.append(row.get(columns.label))
        ids.append(str(number) if columns.id is None else _id(path, row, columns.id, number))
    if not texts:
        raise BadInputError(expected(f"{path}", "at least one row", "none"))
    return texts, _classes(path, classes, columns.label), ids


def _rows(path: Path) -> Iterator[dict[Any, Any]]:
    before = csv.field_size_limit(_LONGEST)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                yield from _csv_rows(path, file)
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
    except (ValueError, RecursionError, csv.Error) as error:
        kind = "a CSV file with a header" if path.suffix.lower() == ".csv" else "one JSON object a line"
        raise BadInputError(expected(f"{path}", f"{kind} in UTF-8", f"what cannot be read ({error})")) from error
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path, file: TextIO) -> Iterator[dict[Any, Any]]:
    rows = csv.DictReader(file, strict=True)
    names = rows.fieldnames or []
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise BadInputError(expected(f"{path}", "a name for each column", f"{twice[0]!r} twice in the header"))
    for number, row in enumerate(rows):
        if None in row:
            hint = "Quote texts that hold commas."
            came = f"{len(names) + len(row[None])}"
            raise BadInputError(
                expected(f"{path}", f"{len(names)} fields in row {number}, as in the header", came, hint)
            )
        yield row


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
        large = next((row for row, value in enumerate(found) if not -(2**63) <= value < 2**63), None)
        if large is not None:
            wanted = f"whole numbers of 64 bits in {name!r}"
            raise BadInputError(expected(f"{path}", wanted, f"a larger one in row {large}", "Write them as texts."))
        return np.array(found, dtype=np.int64)
    return np.array([str(value) for value in found])

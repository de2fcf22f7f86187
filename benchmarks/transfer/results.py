"""The result of an encoder as a small JSON file, and when it may be kept instead of made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_atomically
from benchmarks.transfer.judge import Judgement
from benchmarks.transfer.rows import Row, all_rows

Result = dict[str, Any]

VERSION = 5
"""To be raised when figures change their meaning: results of another version are made again."""

_DIGITS = 4


def key_of(features: Path) -> str:
    """What a result depends on: the feature file, and the meaning of its figures.

    Changes of the library are not in it; ``--again`` judges anew after them.
    """
    out = hashlib.blake2b(repr(VERSION).encode(), digest_size=16)
    with features.open("rb") as file:
        while block := file.read(2**22):
            out.update(block)
    return out.hexdigest()


def read_result(path: Path, key: str | None = None) -> Result | None:
    """A result that is there and was made from the same key (any key where none is given); else ``None``."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if found["version"] == VERSION and key in (None, found["key"]) else None


def missing_rows(result: Result, again: Sequence[str]) -> list[Row]:
    """The rows that a result has neither figures of nor a reason to leave out, or that are to be judged again."""
    there = {*result["rows"], *result["skipped"]}
    return [row for row in all_rows() if row.name not in there or row.name in again]


def with_rows(result: Result, new: Result) -> Result:
    """A result with the rows of another one of the same encoder in their places, and without those that are no more."""
    rows, skipped = ({**result[part], **new[part]} for part in ("rows", "skipped"))
    names = [row.name for row in all_rows()]
    return {
        **new,
        "rows": {name: rows[name] for name in names if name in rows and name not in new["skipped"]},
        "skipped": {name: skipped[name] for name in names if name in skipped and name not in new["rows"]},
        "warned": {**result["warned"], **new["warned"]},
    }


def read_results(folder: Path) -> list[Result]:
    """All results of a folder, by name."""
    found = (read_result(path) for path in sorted(folder.glob("*.json")))
    return [result for result in found if result is not None]


def write_result(path: Path, result: Result) -> Result:
    """Write a result with figures of four digits and one line a row; gives it as a reader will find it."""
    rounded = _rounded(result)
    write_atomically(path, "\n".join(_lines(rounded)) + "\n")
    return rounded


def save_scores(path: Path, judgement: Judgement) -> None:
    """Write the scores themselves, for rules that combine them: arrays ``ROW:SET`` and ``right``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        f"{row}:{name}": score.numpy().astype(np.float32)
        for row, sets in judgement.scores.items()
        for name, score in sets.items()
    }
    np.savez_compressed(path, right=judgement.retrieval.right.numpy(), **arrays)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return value


def _lines(result: Result) -> Iterator[str]:
    yield "{"
    for name in (name for name in result if name != "rows"):
        yield f" {json.dumps(name)}: {json.dumps(result[name])},"
    yield ' "rows": {'
    yield ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result["rows"].items())
    yield " }"
    yield "}"

"""What may stand in the files of a run folder: one that is cut short, or another program's, is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

_CURVES = ("scores", "precision_at_1", "nearest", "embeddings", "p_values", "calibration")

Figures = dict[str, float | None]


class FailedCell(BaseModel):
    """Why a cell has no figures."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    row: str
    seed: int
    members: list[int]
    failed: str


class FinishedCell(BaseModel):
    """What a cell gave; see :func:`benchmarks.experiments.store.save_cell`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    row: str
    seed: int
    members: list[int]
    method: str
    options: dict[str, Any]
    figures: Figures
    variants: dict[str, Figures]
    seconds: Figures
    machine: dict[str, Any]


def read_json(path: Path, wanted: str, instead: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        wanted: What it should be, for the message.
        instead: What to do where it is not.

    Raises:
        InputError: It cannot be read, is damaged, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(expected(str(path), wanted, f"a damaged file ({reason})", instead)) from None
    if not isinstance(found, dict):
        raise InputError(expected(str(path), wanted, f"a file with a {type(found).__name__}", instead))
    return found


def read_cell(path: Path) -> dict[str, Any]:
    """Read a cell's result, ``seedN/KEY.json``.

    Raises:
        InputError: It is damaged, or belongs to another cell.
    """
    wanted, hint = "a cell's result in JSON", "Remove it, and the cell is evaluated again."
    content = read_json(path, wanted, hint)
    try:
        cell = (FailedCell if "failed" in content else FinishedCell).model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        came = f"a damaged file ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise InputError(expected(str(path), wanted, came, hint)) from None
    if (cell.row, f"seed{cell.seed}") != (path.stem, path.parent.name):
        came = f"one of seed {cell.seed}, {cell.row}"
        raise InputError(expected(str(path), f"{wanted}, of {path.parent.name}, {path.stem}", came, hint))
    return content


def check_curves(path: Path, content: dict[str, Any], cell: Path, points: int | None = None) -> None:
    """Refuse what are no curves.

    Args:
        path: ``curves.pt``, where it was read.
        content: What was read.
        cell: The cell's figures, which mark it as finished.
        points: Number of test images, where it is known.

    Raises:
        InputError: A part is missing, or of another number of images.
    """
    precision = content.get("precision_at_1")
    if set(content) != set(_CURVES) or not isinstance(precision, Tensor):
        came = f"a damaged file ({', '.join(sorted(map(str, content)))})"
    elif points not in (None, len(precision)):
        came = f"those of {len(precision)} test images, not of {points}"
    else:
        return
    hint = f"Remove {cell}, and the cell is evaluated again."
    raise InputError(expected(str(path), f"a cell's curves, with {', '.join(_CURVES)}", came, hint))

"""What may stand in the files of a run folder. Any of them may be cut short, edited, or another program's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

__all__ = ["check_cell", "check_curves", "check_number", "read_json"]

_BINS = ("edges", "count", "confidence", "accuracy")


def read_json(path: Path, wanted: str, instead: str) -> dict[str, Any]:
    """Read a JSON object, numbers finite.

    Args:
        path: The file.
        wanted: What it should be, for the message.
        instead: What to do where it is not.

    Returns:
        The object.

    Raises:
        InputError: It cannot be read, is damaged, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(expected(str(path), wanted, f"a damaged file ({reason})", instead)) from None
    if not isinstance(found, dict):
        raise InputError(expected(str(path), wanted, f"a file with a {type(found).__name__}", instead))
    return found


def check_cell(path: Path, content: dict[str, Any]) -> None:
    """Refuse what is no cell's result.

    Args:
        path: ``seedN/KEY.json``, where it was read.
        content: What was read.

    Raises:
        InputError: A key is missing, has another type, or belongs to another cell.
    """

    def refuse(wanted: str, came: str) -> Never:
        hint = "Remove it, and the cell is evaluated again."
        raise InputError(expected(str(path), f"a cell's result, {wanted}", f"a damaged file ({came})", hint))

    failed = "failed" in content
    rest = ("failed",) if failed else ("method", "options", "figures", "variants", "seconds", "machine")
    missing = [key for key in ("row", "seed", "members", *rest) if key not in content]
    if missing:
        refuse(f"with {', '.join(missing)}", "not there")
    for key, kind in {
        "row": str,
        "method": str,
        "failed": str,
        "options": dict,
        "machine": dict,
        "members": list,
    }.items():
        if key in content and not isinstance(content[key], kind):
            refuse(f"{key} a {kind.__name__}", f"a {type(content[key]).__name__}")
    if content["row"] != path.stem or type(content["seed"]) is not int or f"seed{content['seed']}" != path.parent.name:
        refuse(f"of {path.parent.name}, {path.stem}", f"one of seed {content['seed']!r}, {content['row']}")
    members = content["members"]
    if not all(type(seed) is int for seed in members) or len(set(members)) < len(members):
        refuse("members different whole numbers", f"{members}")
    if failed:
        return
    _check_numbers(content["figures"], "figures", refuse)
    _check_numbers(content["seconds"], "seconds", refuse)
    if not isinstance(content["variants"], dict):
        refuse("variants a dict", f"a {type(content['variants']).__name__}")
    for name, figures in content["variants"].items():
        _check_numbers(figures, f"variants[{name!r}]", refuse)
    seconds = content["seconds"]
    if "fit" not in seconds or not check_number(seconds.get("predict")) or seconds["predict"] <= 0:
        refuse("seconds with fit, and predict above zero", f"{seconds}")


def check_curves(path: Path, content: object, cell: Path, points: int | None = None) -> None:
    """Refuse what are no curves.

    Args:
        path: ``curves.pt``, where it was read.
        content: What was read.
        cell: The cell's figures, which mark it as finished.
        points: Number of test images, where it is known.

    Raises:
        InputError: A part is missing, has another type or another length.
    """

    def refuse(wanted: str, came: object) -> Never:
        hint = f"Remove {cell}, and the cell is evaluated again."
        raise InputError(expected(str(path), f"a cell's curves, {wanted}", f"a damaged file ({came})", hint))

    parts = ("scores", "precision_at_1", "nearest", "embeddings", "p_values", "calibration")
    if not isinstance(content, dict) or set(content) != set(parts):
        refuse(f"with {', '.join(parts)}", sorted(content, key=str) if isinstance(content, dict) else type(content))
    precision, nearest = content["precision_at_1"], content["nearest"]
    if not _is_vector(precision) or not precision.is_floating_point():
        refuse("precision_at_1 a tensor (N,)", _kind(precision))
    if bool(((precision < 0) | (precision > 1) | precision.isinf()).any()):
        refuse("precision_at_1 in [0, 1]", "numbers outside")
    n = len(precision) if points is None else points
    if len(precision) != n:
        refuse(f"precision_at_1 of {n} test images", f"of {len(precision)}")
    if not _is_vector(nearest) or nearest.dtype != torch.int64 or len(nearest) != n or bool((nearest < 0).any()):
        refuse(f"nearest {n} indices", _kind(nearest))
    scores = content["scores"]
    if not isinstance(scores, dict):
        refuse("scores a dict", _kind(scores))
    for name, pair in scores.items():
        if not isinstance(name, str) or not isinstance(pair, dict) or set(pair) != {"inside", "outside"}:
            refuse("scores with inside and outside", f"{name!r}: {_kind(pair)}")
        inside, outside = pair["inside"], pair["outside"]
        if not _is_finite(inside) or len(inside) != n:
            refuse(f"scores[{name!r}] finite, inside {n} of them", _kind(inside))
        if outside is not None and not _is_finite(outside):
            refuse(f"scores[{name!r}] finite, outside a tensor (M,) or None", _kind(outside))
    dots = content["embeddings"]
    if not isinstance(dots, dict) or set(dots) != {"inside", "outside"} or not _are_points(dots["inside"], n):
        refuse("embeddings inside, a finite tensor (at most N, D), and outside", _kind(dots))
    if dots["outside"] is not None and not _are_points(dots["outside"]):
        refuse("embeddings outside finite, (M, D), or None", _kind(dots["outside"]))
    known = content["p_values"]
    if known is not None:
        if not isinstance(known, dict) or set(known) != {"inside", "outside"}:
            refuse("p_values None or with inside and outside", _kind(known))
        if not _are_shares(known["inside"]) or len(known["inside"]) != n:
            refuse(f"p_values inside {n} numbers in (0, 1]", _kind(known["inside"]))
        if known["outside"] is not None and not _are_shares(known["outside"]):
            refuse("p_values outside numbers in (0, 1], or None", _kind(known["outside"]))
    bins = content["calibration"]
    if bins is None:
        return
    if not isinstance(bins, dict) or set(bins) != set(_BINS) or not all(_is_vector(part) for part in bins.values()):
        refuse(f"calibration None or with {', '.join(_BINS)}", _kind(bins))
    count = len(bins["count"])
    if [len(bins[name]) for name in _BINS] != [count + 1, count, count, count] or int(bins["count"].sum()) < 1:
        refuse("calibration with bins of one number", [len(bins[name]) for name in _BINS])


def check_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_numbers(value: object, name: str, refuse: Any) -> None:
    if not isinstance(value, dict):
        refuse(f"{name} a dict", f"a {type(value).__name__}")
    for key, number in value.items():
        if number is not None and not check_number(number):
            refuse(f"{name} numbers", f"{key} = {number!r}")


def _is_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and len(value) > 0 and not value.is_complex()


def _is_finite(value: object) -> bool:
    return isinstance(value, Tensor) and _is_vector(value) and bool(value.isfinite().all())


def _are_shares(value: object) -> bool:
    return isinstance(value, Tensor) and _is_finite(value) and bool(((value > 0) & (value <= 1)).all())


def _are_points(value: object, most: int | None = None) -> bool:
    fits = isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point() and bool(value.isfinite().all())
    return fits and len(value) > 0 and (most is None or len(value) <= most)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _refuse_constant(name: str) -> Never:
    msg = f"{name} is no number"
    raise ValueError(msg)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_constant(text)
    return number

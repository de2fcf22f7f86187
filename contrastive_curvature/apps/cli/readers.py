"""Readers of ``.npz`` files, tables of texts and images; nothing in these files is executed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import BadInputError, needed, readable, their_code

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.encoders import Encoder

_AXES = {"features": 2, "embeddings": 2, "inputs": None, "weight": 2, "bias": 1}
STDIN = Path("-")
"""Where a source is read from stdin."""

_NAMED = 10
"""Broken images that a warning names."""

_IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

csv.field_size_limit(2**31 - 1)  # a text may be longer than Python's own limit of 131,072 characters


class UnreadableError(BadInputError):
    """A file of an image that is damaged, or is none."""


class Columns(NamedTuple):
    """Columns of a table as options name them; by default ``text``, ``label``, and the number of the row."""

    text: str | None = None
    label: str | None = None
    id: str | None = None


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the arrays of an ``.npz`` that have known names, checked, and the names of all."""
    wanted = "an .npz with the arrays features, embeddings or inputs"
    try:
        # An array of objects would be unpickled, which can run anything.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            names = getattr(archive, "files", [])
            found = {name: np.asarray(archive[name]) for name in names if name in (*_AXES, "labels", "ids")}
    except Exception as error:  # numpy, zipfile and the decompressors raise many kinds for damaged files
        received = f"what cannot be read ({str(error) or type(error).__name__})"
        hint = "Save numbers or texts, as labels.astype(str)." if "Object arrays" in str(error) else ""
        raise BadInputError(f"{path}", wanted, received, hint) from error
    if isinstance(archive, np.ndarray):
        hint = "numpy.savez(file, features=...) writes one."
        raise BadInputError(f"{path}", wanted, "a single array", hint)
    if "bias" in found and "weight" not in found:
        raise BadInputError(f"{path}", "weight beside bias", "bias alone")
    return {name: _checked(f"{path}: {name}", name, array) for name, array in found.items()}, names


def _checked(argument: str, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if name in ("labels", "ids"):
        if array.ndim != 1 or array.dtype.kind not in "iuU":
            received = f"{array.dtype}, shape {array.shape}"
            raise BadInputError(argument, "a list of whole numbers or texts", received)
        return array
    if array.dtype.kind not in "fiu":
        raise BadInputError(argument, "real numbers", f"an array of {array.dtype}")
    axes = _AXES[name]
    if array.ndim == 0 or (axes is not None and array.ndim != axes) or 0 in array.shape:
        wanted = "at least one axis" if axes is None else f"{axes} axes"
        raise BadInputError(argument, f"{wanted}, none empty", f"shape {array.shape}")
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(floats).reshape(len(floats), -1).all(1)
    if not finite.all():
        raise BadInputError(argument, "finite numbers", f"NaN or infinity in row {np.argmin(finite)}")
    return floats


def read_table(path: Path, columns: Columns) -> tuple[list[str], NDArray[Any] | None, list[str]]:
    """Return the texts, the classes (integers or texts; ``None`` without) and the identifiers of a table."""
    is_csv = path.suffix.lower() == ".csv"
    name = columns.text or "text"
    texts: list[str] = []
    classes: list[Any] = []
    ids: list[str] = []
    try:
        with _text_file(path) as file:
            for number, row in enumerate(_csv_rows(path, file) if is_csv else _json_rows(path, file)):
                text = row.get(name)
                if not isinstance(text, str) or not text.strip():
                    hint = f"The row has {', '.join(row) or 'nothing'}; --text-column names another column."
                    raise BadInputError(f"{path}", f"a text in {name!r} of row {number}", f"{text!r}", hint)
                if columns.id is not None and row.get(columns.id) is None:
                    wanted = f"an identifier in {columns.id!r} of row {number}"
                    raise BadInputError(f"{path}", wanted, "none")
                texts.append(text)
                classes.append(row.get(columns.label or "label"))
                ids.append(str(number if columns.id is None else row[columns.id]))
    except (ValueError, csv.Error) as error:
        kind = "a CSV file with a header" if is_csv else "one JSON object a line"
        raise BadInputError(f"{path}", f"{kind} in UTF-8", f"what cannot be read ({error})") from error
    if not texts:
        raise BadInputError(f"{path}", "at least one row", "none")
    return texts, _classes(path, classes, columns.label or "label"), ids


def _text_file(path: Path) -> contextlib.AbstractContextManager[TextIO]:
    if path == STDIN:
        return contextlib.nullcontext(io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def _csv_rows(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    rows = csv.reader(file, strict=True)
    names = next(rows, [])
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        raise BadInputError(f"{path}", "a name for each column", f"{twice[0]!r} twice in the header")
    for number, row in enumerate(filter(None, rows)):
        if len(row) > len(names):
            wanted = f"{len(names)} fields in row {number}, as in the header"
            raise BadInputError(f"{path}", wanted, f"{len(row)}", "Quote texts that hold commas.")
        yield dict(zip(names, row, strict=False))


def _json_rows(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise BadInputError(f"{path}", "one JSON object a line", f"{line[:40]!r}, line {number}")
            yield row


def _classes(path: Path, found: list[Any], name: str) -> NDArray[Any] | None:
    missing = [row for row, value in enumerate(found) if value is None or value == ""]
    if len(missing) == len(found):
        return None
    if missing:
        wanted = f"a class in {name!r} of every row or of none"
        raise BadInputError(f"{path}", wanted, f"none in row {missing[0]}")
    if all(type(value) is int for value in found):
        integers = np.array(found)
        # Integers beyond 64 bits are texts.
        if integers.dtype.kind in "iu":
            return integers
    return np.array([str(value) for value in found])


def find_images(folder: Path) -> list[Path]:
    """Return the images in a folder and in those inside it, sorted; links are followed, hidden names left out."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in files if not name.startswith(".")):
            if not path.exists():
                hint = "Remove the link, or bring back what it leads to."
                wanted = "a link to a file or a folder"
                raise BadInputError(f"{path}", wanted, "one that leads nowhere", hint)
            if path.suffix.lower() in _IMAGES and path.is_file():
                found.append(path)
    if not found:
        hint = "A feature folder has a header.json."
        raise BadInputError(f"{folder}", f"images ({', '.join(_IMAGES)}) or saved features", "none", hint)
    return sorted(found)


def readable_images(folder: Path, files: list[Path]) -> list[Path]:
    """Return the images that can be read, and warn of the others."""
    whole = []
    for file in files:
        with contextlib.suppress(UnreadableError):
            _picture(file)
            whole.append(file)
    broken = sorted(set(files) - set(whole))
    if not whole:
        raise BadInputError(f"{folder}", "images", f"{len(broken):,} files, none of which can be read")
    if broken:
        named = ", ".join(readable(str(file.relative_to(folder))) for file in broken[:_NAMED])
        rest = f" and {len(broken) - _NAMED:,} more" if len(broken) > _NAMED else ""
        msg = f"{folder}: {len(broken):,} of {len(files):,} images cannot be read and are left out: {named}{rest}"
        warnings.warn(msg, UserWarning, stacklevel=2)
    return whole


def _picture(file: Path) -> Any:
    """Return an image as Pillow has it, in colours."""
    image = needed("PIL.Image", f"{file}", "pip install pillow")
    try:
        with image.open(file) as opened:
            return opened.convert("RGB")
    except Exception as error:  # PIL raises many kinds for damaged files
        received = f"what cannot be read ({str(error) or type(error).__name__})"
        raise UnreadableError(f"{file}", "an image", received, "--skip-unreadable leaves such files out.") from error


def read_image(file: Path, encoder: Encoder) -> Any:
    """Return an image as a tensor that the encoder takes."""
    from torch import Tensor

    picture = _picture(file)
    argument = f"the transform of {encoder.name}"
    assert encoder.transform is not None
    with their_code(argument, f"a tensor for {file}"):
        made = encoder.transform(picture)
    if not isinstance(made, Tensor):
        raise BadInputError(argument, f"a torch.Tensor for {file}", f"a {type(made).__name__}")
    return made

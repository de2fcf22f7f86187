"""One small file that says which job a folder belongs to, so that only the same job goes on in it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["MANIFEST", "open_folder"]

MANIFEST = "_job.json"
"""Its name begins with an underscore: readers of a folder of Parquet files leave such names out."""

_FORMAT, _VERSION = "contrastive_curvature.job", 1


def open_folder(argument: str, path: object, job: Mapping[str, Any]) -> Path:
    """Make the folder of a job, or go on in it.

    Several processes may do so at the same time: they write the same.

    Args:
        argument: Name of the path for error messages.
        path: The folder; it is made if need be, inside one that exists.
        job: What has to be the same to go on, as texts and numbers.

    Raises:
        InputTypeError: The path is no path.
        InputError: The folder above does not exist; the folder has other things in it, or belongs to another job.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise InputTypeError(expected(argument, "the name of a folder", f"a {type(path).__name__}"))
    folder, plain = Path(path).absolute(), {"format": _FORMAT, "version": _VERSION, **job}
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError(expected(argument, "a folder in one that exists", f"no folder {folder.parent}")) from None
    except (FileExistsError, NotADirectoryError):
        raise InputError(expected(argument, "a folder", f"{folder}, a file")) from None
    file = folder / MANIFEST
    if file.is_file():
        _check_same(argument, folder, _read(argument, file), plain)
        return folder
    strange = sorted(name for name in os.listdir(folder) if not name.startswith(f".{MANIFEST}."))
    if strange and file.is_file():
        # Another process has just begun.
        _check_same(argument, folder, _read(argument, file), plain)
        return folder
    if strange:
        received = f"{folder}, which has {strange[0]!r} in it and no {MANIFEST}"
        raise InputError(expected(argument, "a new or an empty folder, or one of this job", received))
    content = (json.dumps(plain, indent=1, sort_keys=True) + "\n").encode()

    def write(opened: BinaryIO) -> None:
        opened.write(content)

    write_whole(file, write)
    return folder


def _read(argument: str, file: Path) -> dict[str, Any]:
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise InputError(expected(argument, f"a folder with a {MANIFEST} of a job", f"{file}, which is something else"))
    return found


def _check_same(argument: str, folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*wanted, *found]):
        if found.get(name) != wanted.get(name):
            hint = f"Use another folder, or delete {folder} to start over."
            mine = f"one of a job with the same {name} ({wanted.get(name)!r})"
            raise InputError(expected(argument, mine, f"{found.get(name)!r} in {folder}", hint))

"""Checkpoint files: written atomically, with a version and a checksum, and read without executing code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from contrastive_curvature.atomic import write_whole
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.online.archive import archive_flaw
from contrastive_curvature.online.plain import check_plain, checksum, portable

__all__ = ["FORMAT", "VERSION", "load_checkpoint", "save_checkpoint"]

FORMAT = "contrastive_curvature.checkpoint"
VERSION = 2
"""Increased whenever a file of an older version could be misread. Version 1 had no checksum."""

_REMOVE = "Remove it to start anew."


def save_checkpoint(path: Path | str, content: dict[str, Any]) -> None:
    """Write a checkpoint such that at every moment the file is either the complete old one or the complete new one.

    A symbolic link is followed. An existing file keeps its mode, and a new one gets the mode of the umask.

    Args:
        path: The file; its folder must exist.
        content: Tensors, numbers, strings, ``None``, and dictionaries, lists and tuples of them.

    Raises:
        InputTypeError: The content holds an object of another type, which could not be read without executing code.
        InputError: The folder does not exist, or the path is no regular file.
        OSError: The file cannot be written, for example because the disk is full. The old file stays.
    """
    if type(content) is not dict:
        raise InputTypeError(expected("content", "a dictionary", f"a {type(content).__name__}"))
    check_plain(content, "content")
    content = portable(content)
    whole = {"format": FORMAT, "version": VERSION, "checksum": checksum(content), "content": content}
    write_whole(path, lambda file: torch.save(whole, file))


def load_checkpoint(path: Path | str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: The file.
        device: Device of the tensors that are read.

    Returns:
        The content that :func:`save_checkpoint` was given.

    Raises:
        InputTypeError: ``path`` is not a path.
        InputError: The file does not exist, is damaged, was written by another program, or has another version.
    """
    if not isinstance(path, (str, Path)):
        raise InputTypeError(expected("path", "the name of a file", f"a {type(path).__name__}"))
    path = Path(path)
    if "\0" in str(path) or not path.is_file():
        raise _refused(path, "no such file", "")
    # The file is opened once, because another process may replace it at any moment.
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            loaded = _read(path, file, size, device)
            return _checked(path, loaded, size)
    except InputError:
        raise
    except pickle.UnpicklingError:
        # torch's own message recommends to disable the protection.
        raise _refused(path, "a file that holds more than plain content", _NOT_READ) from None
    except Exception as error:  # errors on damaged archives have no common base class
        received = f"a file that cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise _refused(path, received, _REMOVE) from error


_NOT_READ = "It was not read, because reading it would run code."


def _read(path: Path, file: BinaryIO, size: int, device: torch.device | str) -> Any:
    if flaw := archive_flaw(file, size):
        raise _refused(path, flaw, _NOT_READ if "more than plain content" in flaw else _REMOVE)
    file.seek(0)
    return torch.load(file, map_location=device, weights_only=True)


def _checked(path: Path, loaded: Any, size: int) -> dict[str, Any]:
    if type(loaded) is not dict or loaded.get("format") != FORMAT:
        raise _refused(path, "another program's file", "")
    version = loaded.get("version")
    # In Python True == 1, so the type is compared too.
    if type(version) is not int or version != VERSION:
        hint = "Read it with the release of contrastive_curvature that wrote it."
        raise _refused(path, f"version {version}", hint)
    if set(loaded) != {"format", "version", "checksum", "content"} or type(loaded["content"]) is not dict:
        raise _refused(path, "a file with missing or additional entries", _REMOVE)
    content: dict[str, Any] = loaded["content"]
    try:
        check_plain(content, "content", size)
    except InputTypeError as error:
        raise _refused(path, f"a file that holds something else ({error})", _REMOVE) from None
    if checksum(content) != loaded["checksum"]:
        raise _refused(path, "a damaged file (the content is not that of its checksum)", _REMOVE)
    return content


def _refused(path: Path, received: str, hint: str) -> InputError:
    return InputError(expected(str(path), f"a checkpoint of version {VERSION}", received, hint))

"""Checkpoint files: written whole or not at all, with a version and a checksum, and read without executing anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.online.archive import flaw
from contrastive_curvature.online.atomic import write_whole
from contrastive_curvature.online.plain import check_plain, checksum, portable

__all__ = ["FORMAT", "VERSION", "load_checkpoint", "save_checkpoint"]

FORMAT = "contrastive_curvature.checkpoint"
VERSION = 2
"""Raised whenever a file of an older version could be misread. 1 had no checksum."""

_ANEW = "Remove it to start anew."


def save_checkpoint(path: Path | str, content: dict[str, Any]) -> None:
    """Write a checkpoint so that the file of that name is at every moment either the old one or the new one.

    A symbolic link is followed, the mode of a file that is there is kept, and that of a new one is the umask's.

    Args:
        path: The file; its folder exists.
        content: Tensors, numbers, strings, ``None``, and dictionaries, lists and tuples of them.

    Raises:
        InputTypeError: Something else is in the content: it could not be read back without executing code.
        InputError: The folder does not exist, or the name is that of something else than a file.
        OSError: The file cannot be written, on a full disk for instance. The old one stays.
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
        device: Where its tensors go.

    Returns:
        The content that :func:`save_checkpoint` was given.

    Raises:
        InputError: There is no such file, it is damaged, another program's, or of a version that is not understood.
    """
    if not isinstance(path, (str, Path)):
        raise InputTypeError(expected("path", "the name of a file", f"a {type(path).__name__}"))
    path = Path(path)
    if "\0" in str(path) or not path.is_file():
        raise _refused(path, "no such file", "")
    # One open file: another process may put a new one in its place at any moment.
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = _read(path, file, size, device)
            return _checked(path, found, size)
    except InputError:
        raise
    except pickle.UnpicklingError:
        # torch's own message recommends to switch the protection off.
        raise _refused(path, "a file that holds more than plain content", _NOT_READ) from None
    except Exception as error:  # what a damaged archive raises has no common base
        came = f"a file that cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise _refused(path, came, _ANEW) from error


_NOT_READ = "It was not read, since that would run code."


def _read(path: Path, file: BinaryIO, size: int, device: torch.device | str) -> Any:
    if broken := flaw(file, size):
        raise _refused(path, broken, _NOT_READ if "more than plain content" in broken else _ANEW)
    file.seek(0)
    return torch.load(file, map_location=device, weights_only=True)


def _checked(path: Path, found: Any, size: int) -> dict[str, Any]:
    if type(found) is not dict or found.get("format") != FORMAT:
        raise _refused(path, "another program's file", "")
    version = found.get("version")
    # Python takes True for the number 1.
    if type(version) is not int or version != VERSION:
        hint = "Read it with the release of contrastive_curvature that wrote it."
        raise _refused(path, f"version {version}", hint)
    if set(found) != {"format", "version", "checksum", "content"} or type(found["content"]) is not dict:
        raise _refused(path, "a file without content, or with more than that", _ANEW)
    content: dict[str, Any] = found["content"]
    try:
        check_plain(content, "content", size)
    except InputTypeError as error:
        raise _refused(path, f"a file that holds something else ({error})", _ANEW) from None
    if checksum(content) != found["checksum"]:
        raise _refused(path, "a damaged file (the content is not that of its checksum)", _ANEW)
    return content


def _refused(path: Path, came: str, hint: str) -> InputError:
    return InputError(expected(str(path), f"a checkpoint of version {VERSION}", came, hint))

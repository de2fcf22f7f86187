"""Checkpoint files: written whole or not at all, with a version, and read without executing anything in them."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["FORMAT", "VERSION", "load_checkpoint", "save_checkpoint"]

FORMAT = "contrastive_curvature.checkpoint"
VERSION = 1
"""Raised whenever a file of an older version could be misread."""

# Exact types: a subclass, such as NumPy's float64 or an enumeration, is stored by the name of its class.
_PLAIN = {str, bool, int, float, type(None), Tensor, nn.Parameter}


def save_checkpoint(path: Path | str, content: dict[str, Any]) -> None:
    """Write a checkpoint so that the file of that name is at every moment either the old one or the new one.

    Args:
        path: The file; its folder exists.
        content: Tensors, numbers, strings, ``None``, and dictionaries, lists and tuples of them.

    Raises:
        InputTypeError: Something else is in the content: it could not be read back without executing code.
    """
    path = Path(path)
    _check_plain(content, "content")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, "content": content}, file)
            file.flush()
            # Without it a power cut could leave the new name on an empty file.
            os.fsync(file.fileno())
        # mkstemp gives a file that nobody else may read.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


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
    path = Path(path)
    wanted = f"a checkpoint of version {VERSION}"
    if not path.is_file():
        raise InputError(expected(str(path), wanted, "no such file"))
    try:
        # torch reads past flipped bits.
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        found = None if broken else torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        # torch's own message recommends to switch the protection off.
        came = "a file that holds more than plain content"
        raise InputError(expected(str(path), wanted, came, "It was not read, since that would run code.")) from None
    except Exception as error:  # what a damaged archive raises has no common base
        came = f"a file that cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise InputError(expected(str(path), wanted, came, "Remove it to start anew.")) from error
    if broken:
        raise InputError(expected(str(path), wanted, f"a damaged file ({broken})", "Remove it to start anew."))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(expected(str(path), wanted, "another program's file"))
    if found.get("version") != VERSION:
        hint = "Read it with the release of contrastive_curvature that wrote it."
        raise InputError(expected(str(path), wanted, f"version {found.get('version')}", hint))
    return found["content"]


def _check_plain(value: Any, where: str) -> None:
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, torch.Size):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]")
    elif type(value) not in _PLAIN:
        hint = "Only these can be read back without executing code."
        wanted = "tensors, numbers, strings, and dictionaries, lists and tuples of them"
        raise InputTypeError(expected(where, wanted, f"a {type(value).__name__}", hint))

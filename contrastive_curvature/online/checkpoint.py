"""Checkpoint files: written atomically with a version, and read without executing code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, expected

FORMAT = "contrastive_curvature.checkpoint"
VERSION = 3
"""Increased whenever a file of an older version could be misread."""


def save_checkpoint(path: Path | str, content: dict[str, Any]) -> None:
    """Write a checkpoint such that at every moment the file is either the complete old one or the complete new one.

    A symbolic link is followed. An existing file keeps its mode, and a new one gets the mode of the umask.

    Args:
        path: The file; its folder must exist.
        content: What ``torch.load(weights_only=True)`` reads: tensors, numbers, strings, ``None``, and dictionaries,
            lists and tuples of them.

    Raises:
        InputError: The folder does not exist, or the path is no regular file.
        OSError: The file cannot be written, for example because the disk is full. The old file stays.
    """
    whole = {"format": FORMAT, "version": VERSION, "content": content}
    write_whole(path, lambda file: torch.save(whole, file))


def load_checkpoint(path: Path | str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: The file.
        device: Device of the tensors that are read.

    Returns:
        The content that :func:`save_checkpoint` was given.

    Raises:
        InputError: The file does not exist, is damaged, was written by another program, has another version, or holds
            what cannot be read without executing code.
    """
    if not Path(path).is_file():
        raise _refused(path, "no such file")
    # Opened once, because another process may replace the file at any moment.
    with open(path, "rb") as file:
        try:
            # torch reads a file whose bits have changed without complaint.
            damaged = zipfile.ZipFile(file).testzip()
            file.seek(0)
            loaded = None if damaged else torch.load(file, map_location=device, weights_only=True)
        except pickle.UnpicklingError:
            # torch's own message recommends to disable the protection.
            hint = "It was not read, because reading it would run code."
            raise _refused(path, "a file that holds more than tensors, numbers and strings", hint) from None
        except Exception as error:  # errors on damaged archives have no common base class
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise _refused(path, f"a file that cannot be read ({reason})", "Remove it to start anew.") from error
    if damaged:
        raise _refused(path, f"a damaged file (in {damaged})", "Remove it to start anew.")
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise _refused(path, "another program's file")
    if loaded["version"] != VERSION:
        hint = "Read it with the release of contrastive_curvature that wrote it."
        raise _refused(path, f"version {loaded['version']}", hint)
    return loaded["content"]


def _refused(path: Path | str, received: str, hint: str = "") -> InputError:
    return InputError(expected(str(path), f"a checkpoint of version {VERSION}", received, hint))

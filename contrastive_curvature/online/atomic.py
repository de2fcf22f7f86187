"""Files that are written whole or not at all, and leave nothing behind when the writer is killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from contrastive_curvature.errors import InputError, expected

if sys.platform != "win32":
    import fcntl

__all__ = ["final_target", "write_whole"]

_LEFT_FOR = 24 * 3600.0
"""Seconds after which nobody still writes a file."""


def final_target(path: Path | str) -> Path:
    """Where a file of that name is kept: the end of its symbolic links.

    Raises:
        InputError: The links go in a circle, the folder does not exist, or something that is no file has that name.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise InputError(expected(str(path), "a file or a link to one", "symbolic links that go in a circle"))
    if not target.parent.is_dir():
        raise InputError(expected(str(path), "a file in a folder that exists", f"no folder {target.parent}"))
    if target.exists() and not target.is_file():
        raise InputError(expected(str(path), "a file", "a folder, a device or a pipe of that name"))
    return target


def write_whole(path: Path | str, write: Callable[[BinaryIO], None]) -> None:
    """Write a file so that its name stands at every moment for the old content or for the new.

    A symbolic link stays, and its target is replaced. A file that is there keeps its mode; another one gets the mode
    that the user's umask gives to new files. What killed writers of the same file have left is removed.

    Args:
        path: The file; its folder exists.
        write: Writes the content.

    Raises:
        InputError: See :func:`final_target`.
        OSError: The file cannot be written, on a full disk for instance. The old one stays.
    """
    target = final_target(path)
    _remove_leftovers(target)
    handle, name = _open_temporary(target)
    try:
        with os.fdopen(handle, "wb") as file:
            _keep_mode(file, target)
            write(file)
            file.flush()
            # Without it a power cut could leave the new name on an empty file.
            os.fsync(file.fileno())
            if sys.platform != "win32":
                # While the file is still locked: an unlocked one is there to be removed.
                os.replace(name, target)
        if sys.platform == "win32":
            os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        # torch's writer hides why it could not write.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _open_temporary(target: Path) -> tuple[int, str]:
    while True:
        name = str(target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp")
        # Not tempfile.mkstemp, whose files nobody else may read; nor os.umask, which is the whole process's.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        handle = os.open(name, flags, 0o666)
        if sys.platform == "win32":
            return handle, name
        try:
            # The lock goes with the process, however that ends. Where files cannot be locked, nobody removes them.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle, name
        except BaseException:
            os.close(handle)
            raise
        # Another writer took it for a leftover before it was locked.
        os.close(handle)


def _keep_mode(file: BinaryIO, target: Path) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))


def _remove_leftovers(target: Path) -> None:
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.tmp")
    former = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}")
    # What cannot be listed or removed harms nobody.
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            path = target.parent / name
            if ours.fullmatch(name) or (former.fullmatch(name) and _is_former_leftover(path)):
                with contextlib.suppress(OSError):
                    _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    if sys.platform == "win32":
        os.unlink(path)
        return
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(handle)


def _is_former_leftover(path: Path) -> bool:
    """Whether a file is an unfinished one of the releases that did not lock: private, old, and unreadable by anything.

    A user's own file may have such a name, and is none of these.
    """
    with contextlib.suppress(OSError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != 0o600:
            return False
        if time.time() - found.st_mtime < _LEFT_FOR or zipfile.is_zipfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(4) in (b"", b"PK\x03\x04")
    return False

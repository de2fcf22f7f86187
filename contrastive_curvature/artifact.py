"""Atomic writing of files: a file is written completely or not at all, also if the writing process is killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from contrastive_curvature.errors import InputError, expected

if sys.platform != "win32":
    import fcntl


def final_target(path: Path | str) -> Path:
    """Return the path of a file after all symbolic links are followed."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise InputError(expected(str(path), "a file or a link to one", "symbolic links that form a circle"))
    if not target.parent.is_dir():
        raise InputError(expected(str(path), "a file in a folder that exists", f"no folder {target.parent}"))
    if target.exists() and not target.is_file():
        raise InputError(expected(str(path), "a file", "a folder, a device or a pipe of that name"))
    return target


def write_whole(path: Path | str, write: Callable[[BinaryIO], None]) -> None:
    """Write a file such that at every moment its name refers to the complete old content or to the complete new one.

    If the path is a symbolic link, the link stays and its target is replaced. An existing file keeps its mode; a new
    file gets the mode of the user's umask. Unfinished files of killed writers of the same file are removed.
    """
    target = final_target(path)
    _remove_abandoned(target)
    handle, name = _open_temporary(target)
    try:
        with os.fdopen(handle, "wb") as file:
            _keep_mode(file, target)
            write(file)
            file.flush()
            # Without fsync, a power cut could leave an empty file under the new name.
            os.fsync(file.fileno())
            if sys.platform != "win32":
                # Renamed while the file is locked, because other writers remove unlocked unfinished files.
                os.replace(name, target)
        if sys.platform == "win32":
            os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        # torch's writer replaces the OSError by a RuntimeError that does not give the reason.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _open_temporary(target: Path) -> tuple[int, str]:
    while True:
        name = str(target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp")
        # tempfile.mkstemp would create a file that other users cannot read, and os.umask would affect all threads.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        handle = os.open(name, flags, 0o666)
        if sys.platform == "win32":
            return handle, name
        try:
            # The system releases the lock when the process ends. On a file system without locks, no writer removes
            # unfinished files.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle, name
        except BaseException:
            os.close(handle)
            raise
        # Another writer removed the file as abandoned before it was locked.
        os.close(handle)


def _keep_mode(file: BinaryIO, target: Path) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))


def _remove_abandoned(target: Path) -> None:
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.tmp")
    # Unfinished files that cannot be listed or removed do no harm.
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            if unfinished.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_unless_locked(target.parent / name)


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

"""A lock that lets only one training at a time use a checkpoint."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from contrastive_curvature.atomic import final_target
from contrastive_curvature.errors import InputError, expected

if sys.platform != "win32":
    import fcntl
else:
    import msvcrt

__all__ = ["lock_checkpoint"]

_LOCKED: set[Path] = set()
"""Checkpoints that threads of this process use: the locks of the system do not distinguish threads."""
_LOCKED_GUARD = threading.Lock()


@contextlib.contextmanager
def lock_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Prevent other trainings from using a checkpoint.

    The lock belongs to this process alone, and the system releases it when the process ends for any reason. A killed
    process leaves an empty file ``.NAME.lock`` beside the checkpoint. This file does not block later trainings, and the
    next one removes it. (``flock`` is not used: the worker processes of a data loader would inherit the lock, and they
    may live longer than the training.)

    Args:
        checkpoint: The file, which need not exist yet.

    Raises:
        InputError: Another training uses the checkpoint, or its folder is not writable.
    """
    target = final_target(checkpoint)
    with _LOCKED_GUARD:
        if target in _LOCKED:
            raise _refused(checkpoint, "this process")
        _LOCKED.add(target)
    try:
        handle = _open_locked(checkpoint, target.parent / f".{target.name}.lock")
        try:
            yield
        finally:
            _release(handle, target.parent / f".{target.name}.lock")
    finally:
        with _LOCKED_GUARD:
            _LOCKED.discard(target)


def _open_locked(checkpoint: Path, name: Path) -> int | None:
    while True:
        try:
            handle = os.open(name, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            hint = f"Its folder must be writable; if {name} belongs to another user, remove it."
            raise InputError(expected("checkpoint", "a file that can be written", f"{error}", hint)) from error
        try:
            if not _try_lock(handle):
                raise _refused(checkpoint, "another process")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(name)):
                    return handle
        except OSError as error:
            os.close(handle)
            msg = (
                f"checkpoint: {checkpoint} is on a file system without locks ({error}). Two trainings that are started "
                "with it at the same time will not notice each other."
            )
            warnings.warn(msg, UserWarning, stacklevel=6)
            return None
        except InputError:
            os.close(handle)
            raise
        # The previous owner has removed this lock file, so a third training could create and lock a new one.
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _release(handle: int | None, name: Path) -> None:
    if handle is None:
        return
    # Removed before the release, after which the lock may belong to another training. Windows cannot remove open files.
    with contextlib.suppress(OSError):
        os.unlink(name)
    os.close(handle)


def _refused(checkpoint: Path, who: str) -> InputError:
    hint = "Wait until that training has ended, or use another checkpoint for each training and each process."
    received = f"{checkpoint}, which another training in {who} is using"
    return InputError(expected("checkpoint", "a file that no other training uses", received, hint))

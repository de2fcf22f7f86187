"""One training at a time for one checkpoint."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.online.atomic import final_target

if sys.platform != "win32":
    import fcntl
else:
    import msvcrt

__all__ = ["in_use"]

_HELD: set[Path] = set()
"""Of this process: the system's locks are the process's, and do not tell its threads apart."""
_GUARD = threading.Lock()


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """Keep other trainings off a checkpoint.

    The system holds the lock for this process alone and drops it when the process ends, however it does. The empty file
    ``.NAME.lock`` that a killed process leaves beside the checkpoint stops nobody, and goes with the next training.
    (A lock of ``flock``'s kind would pass to the worker processes of a data loader, which live on for a while.)

    Args:
        checkpoint: The file, which may not be there yet.

    Raises:
        InputError: Another training uses it, or its folder cannot be written to.
    """
    target = final_target(checkpoint)
    with _GUARD:
        if target in _HELD:
            raise _refused(checkpoint, "this process")
        _HELD.add(target)
    try:
        handle = _locked(checkpoint, target.parent / f".{target.name}.lock")
        try:
            yield
        finally:
            _release(handle, target.parent / f".{target.name}.lock")
    finally:
        with _GUARD:
            _HELD.discard(target)


def _locked(checkpoint: Path, name: Path) -> int | None:
    while True:
        try:
            handle = os.open(name, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            hint = f"Its folder must be one to write to; if {name} is another user's, remove it."
            raise InputError(expected("checkpoint", "a file that can be written", f"{error}", hint)) from error
        try:
            if not _take(handle):
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
        # Who held it before has removed the file, so that a third one would make another.
        os.close(handle)


def _take(handle: int) -> bool:
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
    # Removed while it is held: afterwards it may be another's. Windows removes no open file, which then stays.
    with contextlib.suppress(OSError):
        os.unlink(name)
    os.close(handle)


def _refused(checkpoint: Path, who: str) -> InputError:
    hint = "Wait until it has ended, or give each training, and each process, a checkpoint of its own."
    came = f"{checkpoint}, which another training in {who} is using"
    return InputError(expected("checkpoint", "a file that no other training uses", came, hint))

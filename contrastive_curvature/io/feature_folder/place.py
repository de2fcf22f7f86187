"""The folder itself: made if need be, foreign content refused, one writer at a time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.feature_folder.header import HEADER, Header
from contrastive_curvature.io.feature_folder.memory_map import MemoryMap
from contrastive_curvature.io.feature_folder.parquet import Parquet
from contrastive_curvature.io.feature_folder.storage import Storage

if sys.platform != "win32":
    import fcntl

__all__ = ["check_path", "only_writer", "prepare_folder", "storage_of"]


def check_path(path: object) -> Path:
    """A path as such.

    Raises:
        InputTypeError: Neither text nor a path.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise InputTypeError(expected("path", "the name of a folder", f"a {type(path).__name__}"))
    return Path(path)


def prepare_folder(folder: Path) -> None:
    """Make a folder, if need be, and refuse one that has other content than features.

    Raises:
        InputError: Its parent does not exist, it is a file, or there is something else in it.
    """
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError(expected("path", "a folder in one that exists", f"no folder {folder.parent}")) from None
    except FileExistsError:
        raise InputError(expected("path", "a folder", f"{folder}, a file")) from None
    # What a killed process may leave beside the first header begins with a dot.
    strange = [name for name in os.listdir(folder) if not name.startswith(f".{HEADER}.")]
    if strange and not (folder / HEADER).is_file():
        received = f"{folder}, which has {sorted(strange)[0]!r} in it and no {HEADER}"
        raise InputError(expected("path", "a new or an empty folder, or one of features", received))


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing the same folder; the system ends this with the process.

    Raises:
        InputError: Another one is writing it.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "Wait for it, or use another path."
            raise InputError(expected("path", "a folder that nobody else is writing", f"{folder}", hint)) from None
        except OSError:
            # A file system without locks.
            yield
            return
        try:
            yield
        finally:
            # Worker processes of a loader share the handle, and may live longer.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def storage_of(folder: Path, header: Header) -> Storage:
    """The files of a folder.

    Raises:
        UnsupportedError: They are Parquet files, and pyarrow is not installed.
    """
    return MemoryMap(folder, header) if header.storage == "memmap" else Parquet(folder, header)

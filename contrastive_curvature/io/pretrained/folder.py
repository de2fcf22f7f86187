"""Writing the folder of a saved posterior: at every moment it is complete, or not there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.pretrained.config import numbers_named
from contrastive_curvature.io.pretrained.layout import CARD, CONFIG, TENSORS
from contrastive_curvature.io.pretrained.target import check_target, checked_path, told

if sys.platform != "win32":
    import fcntl

__all__ = ["check_target", "checked_path", "write_folder"]

_held: set[tuple[int, int, int]] = set()
"""Device and number of the folders that are locked, each with the thread that did it."""


def write_folder(
    target: Path, tensors: tuple[str, bytes], config: bytes, card: bytes, *, overwrite: bool = True
) -> None:
    """Write a folder such that who reads it finds the complete old content, the complete new one, or no folder.

    A new folder is written beside its place and renamed. In one that is there, the new numbers come first, under a name
    of their own; then ``config.json``, which names them, is replaced in one step; then the model card, and the old
    numbers go. Other files stay.

    Args:
        target: From :func:`checked_path`, seen by :func:`check_target`.
        tensors: Name and content of the file of numbers.
        config: Content of ``config.json``.
        card: Content of the model card.
        overwrite: Whether a posterior that somebody else has saved there meanwhile may be replaced.

    Raises:
        InputError: The folder cannot be written, for example because the disk is full, or it holds by now what must not
            be written. What was there stays.
    """
    files = {tensors[0]: tensors[1], CONFIG: config, CARD: card}
    with told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or not os.listdir(target):
            _remove_abandoned(target)
            if _write_new(target, files):
                return
        with _locked(target):
            # Between the first check and the lock, somebody else may have written there.
            check_target(target, overwrite=overwrite)
            _replace(target, tensors, config, card)


def _write_new(target: Path, files: Mapping[str, bytes]) -> bool:
    """Write a folder beside its place and rename it; whether that was possible."""
    made = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    made.mkdir()
    try:
        with _locked(made):
            for name, content in files.items():
                _write(made / name, content)
            try:
                os.rename(made, target)
            except OSError:
                # Somebody made the folder meanwhile, or this system renames over no empty folder.
                if target.is_dir():
                    return False
                raise
            return True
    finally:
        # Gone by then, if all went well.
        shutil.rmtree(made, ignore_errors=True)


def _replace(target: Path, tensors: tuple[str, bytes], config: bytes, card: bytes) -> None:
    """Write into a folder that is there; who calls it holds the lock."""
    name, numbers = tensors
    # The same name means the same numbers; a reader may have them open.
    there = _holds(target / name, numbers)
    try:
        if not there:
            _write(target / name, numbers)
        _write(target / CONFIG, config)
    except BaseException:
        if not there and numbers_named(target) != name:
            with contextlib.suppress(OSError):
                os.unlink(target / name)
        raise
    try:
        _write(target / CARD, card)
    except OSError as error:
        came = f"{target / CARD}: {error.strerror or error}"
        hint = "The new posterior is in the folder, and loads; only its model card is the old one."
        raise InputError(expected("folder", "a folder that can be written", came, hint)) from error
    finally:
        # Listed after the new configuration is there. Of a writer on a system without locks, what its configuration
        # names stays.
        kept = {name, numbers_named(target)}
        # Who reads the old numbers now keeps them; what cannot be removed does no harm.
        with contextlib.suppress(OSError):
            for old in [other for other in os.listdir(target) if TENSORS.fullmatch(other) and other not in kept]:
                with contextlib.suppress(OSError):
                    os.unlink(target / old)


def _write(path: Path, content: bytes) -> None:
    def write(file: BinaryIO) -> None:
        file.write(content)

    write_whole(path, write)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases when the process ends.

    Raises:
        InputError: The same thread holds it, which would wait for itself: a signal came while it saved.
    """
    if sys.platform == "win32":
        yield
        return
    while True:
        handle = os.open(folder, os.O_RDONLY)
        try:
            status = os.fstat(handle)
            key = (status.st_dev, status.st_ino, threading.get_ident())
            if key in _held:
                came = f"{folder}, which this thread is saving to, as when a signal handler saves, too"
                raise InputError(expected("folder", "a folder that is not being written", came, "Name another folder."))
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # While it waited, another writer may have renamed a whole folder to this place.
            if os.path.samestat(status, os.stat(folder)):
                _held.add(key)
                try:
                    yield
                finally:
                    _held.discard(key)
                return
        finally:
            os.close(handle)


def _remove_abandoned(target: Path) -> None:
    """Remove unfinished folders of killed writers of the same folder."""
    if sys.platform == "win32":
        return
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.tmp")
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            path = target.parent / name
            if unfinished.fullmatch(name) and path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(path, ignore_errors=True)
                    finally:
                        os.close(handle)

"""Writing the folder of a saved posterior: at every moment it is complete, or not there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from contrastive_curvature.atomic import write_whole
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.pretrained.config import is_config, is_damaged, numbers_named
from contrastive_curvature.pretrained.layout import CARD, CONFIG, TENSORS

if sys.platform != "win32":
    import fcntl

__all__ = ["check_target", "checked_path", "told", "write_folder"]


def checked_path(folder: object) -> Path:
    """A path of a folder, with ``~`` and all symbolic links followed.

    Raises:
        InputTypeError: It is no path.
        InputError: It is empty, or the links form a circle.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InputTypeError(expected("folder", "a path of a folder", f"a {type(folder).__name__}"))
    given = os.fspath(folder)
    if not isinstance(given, str) or not given or "\0" in given:
        raise InputError(expected("folder", "a path of a folder", given))
    try:
        path = Path(os.path.realpath(Path(given).expanduser()))
    except (ValueError, RuntimeError) as error:
        raise InputError(expected("folder", "a path of a folder", f"{given!r} ({error})")) from error
    if os.path.islink(path):
        raise InputError(expected("folder", "a folder or a link to one", "symbolic links that form a circle"))
    return path


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a folder that must not be written, before anything is computed.

    Args:
        target: From :func:`checked_path`.
        overwrite: Whether a saved posterior may be replaced.

    Raises:
        InputError: It is a file, holds something else than a saved posterior, or one, and ``overwrite`` is false.
    """
    with told(target):
        if target.exists() and not target.is_dir():
            raise InputError(expected("folder", "a folder", f"{target}, which is a file"))
        present = sorted(os.listdir(target)) if target.is_dir() else []
    if not present:
        return
    if CONFIG in present and is_config(target / CONFIG):
        if not overwrite:
            hint = "Pass overwrite=True to replace it, or name another folder."
            raise InputError(expected("folder", "a new folder", f"{target}, which holds a saved posterior", hint))
        return
    if overwrite and _only_remains(target, present):
        return
    hint = "Name another folder: this one may hold something that nobody wants to lose."
    came = f"{target}, which holds {present[0]!r} and no saved posterior"
    raise InputError(expected("folder", "a new folder, or one with a saved posterior", came, hint))


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


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if isinstance(error.filename, str) else ""
        came = f"{folder}: {reason}{where}"
        hint = "Nothing was changed there; free some space, or name another folder."
        raise InputError(expected("folder", "a folder that can be written", came, hint)) from error


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


def _only_remains(target: Path, present: list[str]) -> bool:
    """Whether a folder holds files of a saved posterior alone, of which ``config.json`` is missing or damaged."""
    own = [name for name in present if not name.startswith(".")]
    if not all(TENSORS.fullmatch(name) or name in (CONFIG, CARD) for name in own):
        return False
    # Many things have a config.json and a README.md; numbers under such a name, only a posterior has.
    some = not own or any(TENSORS.fullmatch(name) for name in own)
    return some and (CONFIG not in own or is_damaged(target / CONFIG))


def _write(path: Path, content: bytes) -> None:
    def write(file: BinaryIO) -> None:
        file.write(content)

    write_whole(path, write)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases when the process ends."""
    if sys.platform == "win32":
        yield
        return
    while True:
        handle = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # While it waited, another writer may have renamed a whole folder to this place.
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                yield
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

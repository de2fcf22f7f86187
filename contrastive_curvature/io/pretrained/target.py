"""The folder that a posterior is saved to: its path, and whether it may be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.pretrained.config import is_config, is_damaged
from contrastive_curvature.io.pretrained.layout import CARD, CONFIG, TENSORS

__all__ = ["check_target", "checked_path", "told"]


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


def _only_remains(target: Path, present: list[str]) -> bool:
    """Whether a folder holds files of a saved posterior alone, of which ``config.json`` is missing or damaged."""
    own = [name for name in present if not name.startswith(".")]
    if not all(TENSORS.fullmatch(name) or name in (CONFIG, CARD) for name in own):
        return False
    # Many things have a config.json and a README.md; numbers under such a name, only a posterior has.
    some = not own or any(TENSORS.fullmatch(name) for name in own)
    return some and (CONFIG not in own or is_damaged(target / CONFIG))

"""The folder of a report: it holds the files of one evaluation, and nothing of anybody else."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, expected

__all__ = ["CHARTS", "NUMBERS", "PAGE", "check_target", "write_report", "writing"]

PAGE, NUMBERS = "report.html", "metrics.json"
CHARTS = frozenset(f"{name}.{kind}" for name in ("novelty", "sparsification", "reliability") for kind in ("png", "svg"))


def check_target(folder: Path | str, argument: str = "folder") -> Path:
    """Refuse a folder that must not be written, before anything is computed.

    Args:
        folder: From the user.
        argument: Its name in messages.

    Returns:
        The folder with all links followed.

    Raises:
        InputError: It is a file, or holds other files than those of a report.
    """
    target = Path(os.path.realpath(folder))
    if not target.exists():
        return target
    if not target.is_dir():
        raise InputError(expected(argument, "a folder", f"the file {folder}"))
    foreign = sorted(
        entry.name
        for entry in os.scandir(target)
        if not entry.name.startswith(".") and (entry.name not in {PAGE, NUMBERS, *CHARTS} or not entry.is_file())
    )
    if foreign:
        came = f"{folder}, which holds {foreign[0]!r}"
        hint = "Name another folder: this one may hold something that nobody wants to lose."
        raise InputError(expected(argument, "a new folder, or one with an earlier report alone", came, hint))
    return target


def write_report(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files of a report; those of an earlier one go.

    All is written beside its place first, so that an error, such as a full disk, changes nothing. The page comes last.

    Args:
        target: From :func:`check_target`.
        contents: By name.

    Raises:
        OSError: A file cannot be written.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    else:
        # It may be the current folder, or the root of a disk, neither of which can be renamed.
        made = target / f".report.{secrets.token_hex(6)}.tmp"
    made.mkdir()
    try:
        for name, content in contents.items():
            write_whole(made / name, writing(content))
        if made.parent != target:
            os.rename(made, target)
            return
        try:
            _take(made, target, contents)
        except KeyboardInterrupt:
            # What is left takes no time, and a page beside the plots of another evaluation helps nobody.
            _take(made, target, contents)
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _take(made: Path, target: Path, names: Collection[str]) -> None:
    """Move the files of a report to their place, the page last; can be called again after an interruption."""
    left = sorted(os.listdir(made), key=lambda name: name == PAGE)
    if PAGE in left:
        # Without a page, nobody takes what a killed process leaves for a report.
        (target / PAGE).unlink(missing_ok=True)
    for name in CHARTS.difference(names):
        (target / name).unlink(missing_ok=True)
    for name in left:
        os.replace(made / name, target / name)


def writing(content: bytes) -> Callable[[BinaryIO], None]:
    """What :func:`.write_whole` takes to write these bytes."""

    def write(file: BinaryIO) -> None:
        file.write(content)

    return write

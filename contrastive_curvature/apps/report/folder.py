"""The folder of a report: it holds the files of one evaluation, and nothing of anybody else."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError

PAGE, NUMBERS = "report.html", "metrics.json"
_CHARTS = ("novelty", "sparsification", "reliability", "det")
CHARTS = frozenset(f"{name}.{kind}" for name in _CHARTS for kind in ("png", "svg"))


def check_target(folder: Path | str, argument: str = "folder") -> Path:
    """Return a folder with all links followed; refuse a file, and a folder with other files than those of a report."""
    target = Path(os.path.realpath(folder))
    if not target.exists():
        return target
    if not target.is_dir():
        raise InputError(argument, "a folder", f"the file {folder}")
    foreign = sorted(
        entry.name
        for entry in target.iterdir()
        if not entry.name.startswith(".") and (entry.name not in {PAGE, NUMBERS, *CHARTS} or not entry.is_file())
    )
    if foreign:
        came = f"{folder}, which holds {foreign[0]!r}"
        hint = "Name another folder: this one may hold something that nobody wants to lose."
        raise InputError(argument, "a new folder, or one with an earlier report alone", came, hint)
    return target


def write_report(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files of a report by name; those of an earlier one go.

    All is written beside its place first, so that an error, such as a full disk, changes nothing. The page goes first
    and comes last: without one, nobody takes for a report what a killed process leaves.
    """
    is_new = not target.exists()
    # An earlier folder may be the current one, or the root of a disk, neither of which can be renamed.
    made = (target.parent if is_new else target) / f".{target.name}.{secrets.token_hex(6)}.tmp"
    made.mkdir(parents=True)
    try:
        for name, content in contents.items():
            write_bytes(made / name, content)
        if is_new:
            made.rename(target)
            return
        for name in (PAGE, *CHARTS.difference(contents)):
            (target / name).unlink(missing_ok=True)
        for name in sorted(contents, key=lambda name: name == PAGE):
            os.replace(made / name, target / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file whole or not at all."""
    write_whole(path, lambda file: file.write(content))

"""What all loaders ask of the files before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.experiments.data.archive import names_in
from contrastive_curvature.errors import InputError, expected

_NAMED = 8
"""Missing files that a message names."""


def require(root: Path, names: Sequence[str], how: str) -> None:
    """Check that files and folders are there.

    Args:
        root: The data root.
        names: Paths below it.
        how: How to get them, a sentence.

    Raises:
        InputError: Some are not.
    """
    missing = [name for name in names if not (root / name).exists()]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        came = f"no {', '.join(str(root / name) for name in missing[:_NAMED])}{more}"
        raise InputError(expected(f"data root {root}", "the data set's files", came, how))


def fetch(download: Callable[[], object], what: str, how: str) -> None:
    """Run a download.

    Args:
        download: Fetches, and verifies what it fetched.
        what: Name of the data set.
        how: What to do where it fails, a sentence.

    Raises:
        InputError: It failed.
    """
    try:
        download()
    except (OSError, RuntimeError) as error:
        came = f"none ({(str(error).strip().splitlines() or [type(error).__name__])[-1]})"
        raise InputError(expected("download=True", f"a download of {what}", came, how)) from None


def check_images(paths: Sequence[Path], how: str) -> None:
    """Check that image files are there, with one look into each folder.

    Args:
        paths: The files.
        how: What to do if not, a sentence.

    Raises:
        InputError: There are none, or some are missing.
    """
    if not paths:
        raise InputError(expected("images", "at least one", "none", how))
    seen = {folder: names_in(folder) for folder in {path.parent for path in paths}}
    missing = [path for path in paths if path.name not in seen[path.parent]]
    if missing:
        came = f"{len(missing)} missing, the first {missing[0]}"
        raise InputError(expected("images", f"all {len(paths)} files that the lists name", came, how))


def read_lines(path: Path, how: str) -> list[str]:
    """Read a list, without its empty lines.

    Args:
        path: Text, UTF-8.
        how: What to do with a damaged one, a sentence.

    Returns:
        Its lines.

    Raises:
        InputError: It is no text, or empty.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise InputError(expected(str(path), "text", "bytes that are none", how)) from None
    if not lines:
        raise InputError(expected(str(path), "lines", "an empty file", how))
    return lines

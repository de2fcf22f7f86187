"""Files of data sets: how they are read, also inside zip archives, and what loaders ask of them first."""

from __future__ import annotations

import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from contrastive_curvature.errors import InputError


@dataclass(frozen=True)
class LoadOptions:
    """What a loader may be told; each refuses, through ``load_data``, what it cannot follow.

    Args:
        download: Whether files that are missing may be fetched, with the library that has them.
        image_size: Side of the square images in pixels; ``None`` for the data set's own.
    """

    download: bool = False
    image_size: int | None = None


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, in a folder or in an archive.

    Raises:
        OSError: It is not there.
        InputError: The archive is damaged.
    """
    inside = _in_archive(path)
    if inside is None:
        return path.open("rb")
    archive, name = inside
    try:
        return _opened(archive, os.getpid()).open(name)
    except KeyError:
        raise FileNotFoundError(path) from None


def file_size(path: Path) -> int:
    """Bytes of a file, in a folder or in an archive."""
    inside = _in_archive(path)
    return path.stat().st_size if inside is None else _opened(inside[0], os.getpid()).getinfo(inside[1]).file_size


def names_in(folder: Path) -> frozenset[str]:
    """Names of what is in a folder, which may be one of an archive; none where there is no such folder."""
    inside = _in_archive(folder)
    if inside is None:
        return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()
    return _listed(inside[0], os.getpid()).get(inside[1], frozenset())


def _in_archive(path: Path) -> tuple[Path, str] | None:
    """The archive that a path goes through, and the rest of the path."""
    for parent in path.parents:
        if parent.suffix == ".zip" and parent.is_file():
            return parent, path.relative_to(parent).as_posix()
    return None


# One open file a process: two processes that share one would move each other's position in it.
@lru_cache(maxsize=8)
def _opened(archive: Path, _process: int) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        came = f"a damaged one ({error})"
        raise InputError(str(archive), "a zip archive", came, "Fetch it again.") from None


@lru_cache(maxsize=8)
def _listed(archive: Path, process: int) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in _opened(archive, process).namelist():
        folder, _, file = name.rpartition("/")
        found[folder].add(file)
    return {folder: frozenset(files) for folder, files in found.items()}


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
        raise InputError(f"data root {root}", "the data set's files", came, how)


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
        raise InputError("download=True", f"a download of {what}", came, how) from None


def check_images(paths: Sequence[Path], how: str) -> None:
    """Check that image files are there, with one look into each folder.

    Args:
        paths: The files.
        how: What to do if not, a sentence.

    Raises:
        InputError: There are none, or some are missing.
    """
    if not paths:
        raise InputError("images", "at least one", "none", how)
    seen = {folder: names_in(folder) for folder in {path.parent for path in paths}}
    missing = [path for path in paths if path.name not in seen[path.parent]]
    if missing:
        came = f"{len(missing)} missing, the first {missing[0]}"
        raise InputError("images", f"all {len(paths)} files that the lists name", came, how)


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
        raise InputError(str(path), "text", "bytes that are none", how) from None
    if not lines:
        raise InputError(str(path), "lines", "an empty file", how)
    return lines

"""Files in zip archives, read where they lie: a path may go on inside an archive, as ``faces.zip/faces/Ada/1.jpg``."""

from __future__ import annotations

import os
import zipfile
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import IO

from contrastive_curvature.errors import InputError, expected


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
        raise InputError(expected(str(archive), "a zip archive", came, "Fetch it again.")) from None


@lru_cache(maxsize=8)
def _listed(archive: Path, process: int) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in _opened(archive, process).namelist():
        folder, _, file = name.rpartition("/")
        found[folder].add(file)
    return {folder: frozenset(files) for folder, files in found.items()}

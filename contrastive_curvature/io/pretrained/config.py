"""``config.json`` of a saved posterior: written with a checksum, checked before anything is made of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.pretrained.layout import CONFIG, FORMAT, TENSORS, VERSION

__all__ = ["config_bytes", "damaged", "is_config", "is_damaged", "numbers_named", "read_config"]

_LARGEST = 2**26
"""Bytes: far more than the names of all parameters of any encoder take."""

_DEEPEST = 100
"""Levels: far more than any posterior has, and few enough for every function that follows them."""

_CHECKSUM = "checksum"


def config_bytes(config: dict[str, Any]) -> bytes:
    """A configuration as the file holds it, with a checksum."""
    whole = {"format": FORMAT, "format_version": VERSION, **config}
    whole[_CHECKSUM] = _checksum(whole)
    return (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder.

    Raises:
        InputError: There is none, or it is of something else, damaged, or of a later version.
    """
    path = folder / CONFIG
    config = _parsed(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        hint = "Name the folder that la.save_pretrained(folder) wrote; an encoder's own folder holds no posterior."
        raise InputError(expected(str(path), "the options of a saved posterior", "those of something else", hint))
    version = config.get("format_version")
    # The version stands before the checksum, whose form another version may change.
    if type(version) is not int or version < 1:
        raise damaged(path, "no version of the format")
    if version > VERSION:
        versions = config.get("versions")
        writer = versions.get("contrastive_curvature") if isinstance(versions, dict) else None
        by = f", written by contrastive_curvature {writer}" if isinstance(writer, str) else ""
        hint = "Update with: pip install -U contrastive-curvature"
        raise InputError(expected(str(path), f"format version {VERSION} or lower", f"{version}{by}", hint))
    if config.get(_CHECKSUM) != _checksum(config):
        raise damaged(path, "content that its checksum does not fit")
    tensors = config.get("tensors")
    if not isinstance(tensors, dict) or not TENSORS.fullmatch(str(tensors.get("file"))):
        raise damaged(path, "no file of numbers")
    return config


def is_config(path: Path) -> bool:
    """Whether a file is the configuration of a saved posterior, of any version."""
    try:
        config = _parsed(path)
    except InputError:
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def is_damaged(path: Path) -> bool:
    """Whether a file is no whole JSON, so that nobody's program can read it; not where it cannot be opened."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError:
        return False
    try:
        _parsed(path)
    except InputError:
        return True
    return False


def numbers_named(folder: Path) -> str | None:
    """Name of the file of numbers that the configuration in a folder refers to, where there is one."""
    try:
        tensors = read_config(folder)["tensors"]
    except InputError:
        return None
    return str(tensors["file"])


def damaged(path: Path, came: str) -> InputError:
    """The error for a file that is not as it was written."""
    hint = (
        "Copy or download the folder again; or save it again with la.save_pretrained(folder, overwrite=True), which "
        "replaces a damaged config.json where no other files than those of the posterior are beside it."
    )
    return InputError(expected(str(path), "the file as it was written", came, hint))


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        hint = "Name a folder that la.save_pretrained(folder) wrote."
        raise InputError(expected(str(path.parent), f"a folder with a {CONFIG}", "none of that name", hint)) from None
    except OSError as error:
        raise InputError(expected(str(path), "a file that can be read", error.strerror or str(error))) from None
    if len(content) > _LARGEST:
        raise damaged(path, f"more than {_LARGEST:,} bytes")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"no whole JSON ({type(error).__name__})") from None
    if _is_deeper(config, _DEEPEST):
        raise damaged(path, f"more than {_DEEPEST} levels of JSON")
    return config


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dictionaries stand in each other on more levels than that."""
    present = [value]
    for _ in range(levels):
        inner = [
            part.values() if isinstance(part, dict) else part for part in present if isinstance(part, (dict, list))
        ]
        if not inner:
            return False
        present = [part for parts in inner for part in parts]
    return any(isinstance(part, (dict, list)) for part in present)


def _checksum(config: dict[str, Any]) -> str:
    rest = {name: value for name, value in config.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()

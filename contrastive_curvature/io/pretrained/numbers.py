"""The file of numbers of a saved posterior: safetensors, with its checksum in ``config.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.io.pretrained.config import damaged
from contrastive_curvature.io.pretrained.layout import FORMAT, tensors_name

__all__ = ["numbers_bytes", "read_numbers"]

_AT_ONCE = 2**20


def numbers_bytes(tensors: dict[str, Tensor]) -> tuple[bytes, dict[str, Any]]:
    """Tensors as the file holds them, and what ``config.json`` says of it.

    Raises:
        UnsupportedError: A tensor has a type that safetensors does not know.
    """
    from safetensors.torch import save

    try:
        content = save(tensors, metadata={"format": "pt", "of": FORMAT})
    except (KeyError, ValueError) as error:
        kinds = sorted({str(tensor.dtype) for tensor in tensors.values()})
        msg = f"save_pretrained: safetensors has no place for one of the types {', '.join(kinds)} ({error})."
        raise UnsupportedError(msg) from error
    sha256 = hashlib.sha256(content).hexdigest()
    return content, {"file": tensors_name(sha256), "sha256": sha256, "bytes": len(content)}


def read_numbers(folder: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a folder, on the CPU.

    Args:
        folder: The folder.
        about: What ``config.json`` says of the file.

    Raises:
        FileNotFoundError: The file is not there.
        InputError: It cannot be read, or is not as it was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / about["file"]
    try:
        size = path.stat().st_size
        if size != about["bytes"]:
            raise damaged(path, f"{size:,} bytes instead of {about['bytes']:,}")
        if _checksum(path) != about["sha256"]:
            raise damaged(path, "content that its checksum does not fit")
        return load_file(path)
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        if type(error).__module__.startswith("contrastive_curvature"):
            raise
        raise damaged(path, f"what cannot be read ({error})") from error


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()

"""The IDX format, in which MNIST and Fashion-MNIST are published.

torchvision reads these files only when unpacked or when their checksums are the published ones (otherwise it downloads
them again and overwrites them). A copy in another order serves as well here, so the files are read without it.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

_BYTES = 8
"""Type code of unsigned bytes, the only one that these data sets use."""


def find_idx(folder: Path, stem: str) -> Path | None:
    """The file of that name in a folder, unpacked or gzipped; ``None`` where there is neither."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    The format: two zero bytes, the type code, the number of axes, then each axis' length as a big-endian 32-bit number,
    then the values, last axis fastest.

    Returns:
        uint8, with the shape that the file states.

    Raises:
        InputError: It is not such a file, or shorter or longer than it states.
    """
    hint = "Remove the file and fetch it again."
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(expected(str(path), "a gzip file", f"a damaged one ({error})", hint)) from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _BYTES:
        raise InputError(expected(str(path), "an IDX file of unsigned bytes", f"one that starts {content[:4]!r}", hint))
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        wanted = f"{math.prod(shape)} values for shape {tuple(shape)}"
        raise InputError(expected(str(path), wanted, f"{max(0, len(content) - start)}", hint))
    # bytearray: torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)

"""The file of a corpus in memory: safetensors, with a version and a checksum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.io.stores.faiss_index import KINDS
from contrastive_curvature.io.stores.store import Rows

__all__ = ["read", "write"]

_FORMAT = "contrastive_curvature.FaissStore"
_VERSION = 1
_TYPES = {"float32": "F32", "int64": "I64", "uint8": "U8"}
_WANTED = "a file that FaissStore.save wrote"


def write(path: Path | str, kind: str, rows: Rows, compressed: NDArray[np.uint8] | None) -> None:
    """Write a store.

    Args:
        path: The file.
        kind: Kind of the index.
        rows: What is in the store; the vectors are left out if ``compressed`` holds them.
        compressed: The bytes of an index that is not flat.

    Raises:
        InputError: The folder does not exist, or the path is no file.
    """
    arrays: dict[str, NDArray[Any]] = {"kappa": rows.kappa, "uncertainty": rows.uncertainty}
    arrays |= {"vectors": rows.vectors} if compressed is None else {"index": compressed}
    arrays |= _of_ids(rows.ids)
    # The largest alignment first, as safetensors orders them: then every array starts at a multiple of its item size.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    whole = {name: np.ascontiguousarray(array) for name, array in ordered}
    note = {"format": _FORMAT, "version": str(_VERSION), "kind": kind, "sha256": _checksum(kind, whole)}
    header: dict[str, Any] = {"__metadata__": note}
    end = 0
    for name, array in whole.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write_parts(file: BinaryIO) -> None:
        # safetensors' own writer would hold a second copy of all vectors in memory.
        file.write(len(text).to_bytes(8, "little") + text)
        for array in whole.values():
            file.write(array.reshape(-1).view(np.uint8).data)

    write_whole(path, write_parts)


def read(path: Path | str) -> tuple[str, Rows, NDArray[np.uint8] | None]:
    """Read a store: the kind of its index, its rows, and the bytes of an index that is not flat.

    Raises:
        InputError: There is no such file, it is damaged, or it is something else.
        UnsupportedError: A newer version wrote it.
    """
    if not Path(path).is_file():
        raise InputError(expected(str(path), _WANTED, "no such file"))
    try:
        with safe_open(str(path), framework="numpy") as file:
            note = file.metadata() or {}
            if note.get("format") != _FORMAT:
                raise InputError(expected(str(path), _WANTED, "a safetensors file of something else"))
            if note.get("version") != str(_VERSION):
                hint = "Install the version of this library that wrote it, or a newer one."
                raise UnsupportedError(expected(str(path), f"version {_VERSION}", f"{note.get('version')}", hint))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except (SafetensorError, OSError) as error:
        raise InputError(expected(str(path), _WANTED, f"a damaged or foreign file ({error})")) from None
    if note.get("kind") not in KINDS or _checksum(note["kind"], arrays) != note.get("sha256"):
        hint = "Copy it again, or build the store anew."
        raise InputError(expected(str(path), "content that agrees with its checksum", "a damaged file", hint))
    return note["kind"], *_rows(path, note["kind"], arrays)


def _rows(path: Path | str, kind: str, arrays: dict[str, Any]) -> tuple[Rows, NDArray[np.uint8] | None]:
    try:
        ids = _to_ids(arrays)
        vectors = arrays["vectors"] if kind == "flat" else np.empty((0, 0), dtype=np.float32)
        rows = Rows(ids, vectors, arrays["kappa"], arrays["uncertainty"])
        agree = rows.kappa.shape == rows.uncertainty.shape == ids.shape
        agree &= kind != "flat" or (vectors.ndim == 2 and len(vectors) == len(ids))
        compressed = None if kind == "flat" else arrays["index"].view(np.uint8)
    except (KeyError, ValueError):
        agree = False
    if not agree:
        raise InputError(expected(str(path), _WANTED, "arrays that do not fit together"))
    return rows, compressed


def _of_ids(ids: NDArray[Any]) -> dict[str, NDArray[Any]]:
    if ids.dtype != object:
        return {"ids": ids}
    encoded = [name.encode() for name in ids.tolist()]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return {"id_ends": ends, "id_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8)}


def _to_ids(arrays: dict[str, Any]) -> NDArray[Any]:
    if "ids" in arrays:
        return arrays["ids"]
    text, ends = arrays["id_bytes"].tobytes(), arrays["id_ends"].tolist()
    out = np.empty(len(ends), dtype=object)
    out[:] = [text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
    return out


def _checksum(kind: str, arrays: dict[str, Any]) -> str:
    digest = hashlib.sha256(kind.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()

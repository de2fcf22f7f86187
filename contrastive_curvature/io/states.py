"""States as bytes and as files: arrays and plain text with a version and a checksum, nothing that executes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.fit.contributions import Contributions
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, Findings, Origin, State
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.pairs.rows import Rows

VERSION = 2
_FORMAT = "contrastive_curvature.part"
_KEY = "part"
_PROBE = "probe"
_HEADER = 8
"""Bytes in front of the header of a safetensors file: its length, little endian."""


def save_state(state: State, path: Path | str) -> None:
    """Write a state to a safetensors file, completely or not at all.

    Args:
        state: The state.
        path: The file; its folder must exist.

    Raises:
        InputError: The path is no regular file in a folder that exists.
        InputTypeError: It is no path.
        OSError: The file cannot be written.
    """
    path, content = _checked(path), to_bytes(state)

    def write(file: BinaryIO) -> None:
        file.write(content)

    write_whole(path, write)


def load_state(path: Path | str) -> State:
    """Read what :func:`save_state` wrote. Nothing in the file is executed.

    Raises:
        InputError: There is no such file, or it is something else, damaged, or of another version.
        InputTypeError: It is no path.
    """
    try:
        content = _checked(path).read_bytes()
    except OSError as error:
        raise InputError(expected(str(path), "a file that can be read", error.strerror or str(error))) from error
    return from_bytes(content, str(path))


def _checked(path: object) -> Path:
    if not isinstance(path, (str, Path)):
        raise InputTypeError(expected("path", "a path of a file", f"a {type(path).__name__}"))
    return Path(path)


def to_bytes(state: State) -> bytes:
    """Return a state in the safetensors format."""
    from safetensors.torch import save

    found = state.found
    kept = dict(found.kept) if state.probe is None else {**found.kept, _PROBE: state.probe}
    tensors: dict[str, Tensor] = {f"sums/{name}": part for name, part in found.sums.items()}
    for name, rows in kept.items():
        tensors[f"kept/{name}/numbers"] = rows.numbers
        tensors |= {f"kept/{name}/columns/{column}": part for column, part in rows.columns.items()}
    if found.classes is not None:
        tensors |= {f"classes/{name}": part for name, part in vars(found.classes).items()}
    tensors = {name: part.detach().cpu().contiguous().clone() for name, part in tensors.items()}
    plain = {
        "kind": state.kind,
        "identity": dict(state.identity),
        "origins": {str(index): asdict(origin) for index, origin in state.origins.items()},
        "count": state.count,
        "kept": {name: [rows.size, rows.seed] for name, rows in kept.items()},
        "contributions": asdict(found.contributions),
    }
    text = json.dumps(plain, sort_keys=True)
    about = {"format": _FORMAT, "version": VERSION, "state": text, "checksum": _checksum(tensors, text)}
    # One entry: safetensors writes several in any order, and equal states shall be equal files.
    return save(tensors, {_KEY: json.dumps(about)})


def from_bytes(content: bytes, name: str = "state") -> State:
    """Return the state that :func:`to_bytes` gave."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    about = _about(content, name)
    if about.get("format") != _FORMAT:
        raise InputError(expected(name, "a state of a part of a data set", "a file of another kind"))
    if about.get("version") != VERSION:
        hint = "It was written by another version of contrastive_curvature: use that one, or compute the part again."
        raise InputError(expected(name, f"version {VERSION}", f"version {about.get('version')}", hint))
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(name) from error
    text = about.get("state")
    if not isinstance(text, str) or about.get("checksum") != _checksum(tensors, text):
        raise _damaged(name)
    try:
        return _state(json.loads(text), tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(name) from error


def _state(plain: dict[str, Any], tensors: dict[str, Tensor]) -> State:
    if plain["kind"] not in (STATISTICS, CURVATURE):
        raise ValueError(plain["kind"])
    kept = {}
    for name, (size, seed) in plain["kept"].items():
        columns = _under(tensors, f"kept/{name}/columns/")
        kept[name] = Rows(size, tensors[f"kept/{name}/numbers"], columns, seed)
    classes = _under(tensors, "classes/")
    origins = {
        int(index): Origin(**{**origin, "extremes": tuple(origin["extremes"])})
        for index, origin in plain["origins"].items()
    }
    probe = kept.pop(_PROBE, None)
    found = Findings(
        sum(origin.n for origin in origins.values()),
        _under(tensors, "sums/"),
        kept,
        ClassTable(**classes) if classes else None,
        Contributions.of_json(plain["contributions"]),
    )
    return State(plain["kind"], plain["identity"], origins, plain["count"], found, probe)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}


def _about(content: bytes, name: str) -> dict[str, Any]:
    """Return what stands in the header besides the tensors; empty in a safetensors file of somebody else."""
    length = int.from_bytes(content[:_HEADER], "little")
    try:
        metadata = json.loads(content[_HEADER : _HEADER + length]).get("__metadata__", {})
        return dict(json.loads(metadata[_KEY])) if _KEY in metadata else {}
    except (ValueError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise _damaged(name) from error


def _checksum(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        part = tensors[name].contiguous()
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(name: str) -> InputError:
    hint = "Compute this part again; the others stay as they are."
    return InputError(expected(name, "a whole safetensors file with a checksum that fits", "a damaged one", hint))

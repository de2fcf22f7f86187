"""Files that this library writes and reads: written completely or not at all, with one kind of header.

A header is a pydantic model in JSON, with the name of its format, a version, and a checksum. It stands in the metadata
of a safetensors file, with or without tensors. Nothing that is read is executed.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError

if sys.platform != "win32":
    import fcntl
if TYPE_CHECKING:
    from torch import Tensor

VERSION = 6
"""Of every format. It is raised where an older release would misread what this one writes."""

_ABANDONED = 3600
"""Seconds after which an unfinished file that nobody can lock belongs to a writer that was killed."""

_METADATA = "header"

_KINDS = {"bool": "BOOL", "uint": "U", "int": "I", "bfloat": "BF", "float": "F", "complex": "C"}
"""Names of torch's types in safetensors, without the number of bits."""

_LONGEST_HEADER = 100_000_000
"""Bytes of a header that readers of safetensors accept."""


def final_target(path: Path | str) -> Path:
    """Return the path of a file after all symbolic links are followed."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise InputError(str(path), "a file in a folder that exists", f"no folder {target.parent}")
    if target.exists() and not target.is_file():
        raise InputError(str(path), "a file", "a folder, a device or a pipe of that name")
    return target


def write_whole(path: Path | str, write: Callable[[BinaryIO], object], *, follow: bool = True) -> None:
    """Write a file so that its name always refers to the complete old content or to the complete new content.

    If the path is a symbolic link, the link stays and its target is replaced. Without ``follow`` the link itself is
    replaced; use this for names in a folder that somebody else may have created. An existing file keeps its mode; a new
    file gets the mode of the user's umask. Unfinished copies that killed writers of this file left are removed: at once
    where files have locks, otherwise after an hour.
    """
    target = final_target(path) if follow else Path(path)
    _remove_abandoned(target)
    file = _unfinished(target)
    try:
        with file:
            if target.exists() and not target.is_symlink():
                shutil.copymode(target, file.name)
            write(file)
            file.flush()
            # Without fsync, a power cut could leave an empty file under the new name.
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # an open file cannot be renamed there
            # While it is locked: otherwise another writer could take it for abandoned.
            os.replace(file.name, target)
    except BaseException as error:
        Path(file.name).unlink(missing_ok=True)
        # torch's writer replaces the OSError by a RuntimeError without the reason.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _unfinished(target: Path) -> BinaryIO:
    """Open a new file in the folder of a file, and lock it."""
    while True:
        file = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp").open("xb")
        _lock(file, wait=True)
        # Another writer may have removed it before it was locked.
        if os.path.exists(file.name):
            return file
        file.close()


def _remove_abandoned(target: Path) -> None:
    """Remove the unfinished copies of a file whose writers were killed, which released their locks."""
    for old in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 12}.tmp"):
        with contextlib.suppress(OSError):
            with old.open("rb") as file:
                if locked := _lock(file, wait=False):
                    old.unlink()
            if not locked and time.time() - old.stat().st_mtime > _ABANDONED:
                old.unlink()


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    """Lock a file until it is closed, and return whether its file system has locks.

    Raises:
        BlockingIOError: Another process has locked it, and ``wait`` is false.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def folder_path(argument: str, path: object) -> Path:
    """Return the path of a folder, with ``~`` and all symbolic links followed; the folder need not exist."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise InputTypeError(argument, "a path of a folder", repr(path))
    found = Path(os.path.realpath(Path(path).expanduser()))
    if found.exists() and not found.is_dir():
        raise InputError(argument, "a folder", f"{found}, which is a file")
    return found


class Header(BaseModel):
    """Header of a file or a folder; a subclass lists the content in its fields.

    Class attributes:
        kind: Name of the format.
        described: Description of such a file or folder in error messages.
        made_by: Sentence that says how a user creates one.
        repaired_by: Sentence that says what to do if it is damaged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]
    described: ClassVar[str]
    made_by: ClassVar[str] = ""
    repaired_by: ClassVar[str] = ""

    @classmethod
    def format_name(cls) -> str:
        """Return the name of the format in files."""
        return f"contrastive_curvature.{cls.kind}"

    def dumps(self) -> str:
        """Return the header as JSON, with format, version and checksum."""
        from contrastive_curvature import __version__

        content = self.model_dump(mode="json")
        about = {"format": self.format_name(), "version": VERSION, "written_by": __version__}
        return json.dumps({**about, "sha256": _checksum(content), "content": content}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def loads(cls, text: str | bytes, name: str) -> Self:
        """Read a header of :meth:`dumps`; ``name`` is the name of the file in error messages."""
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            cls.refuse(name, "a damaged one: no whole JSON", cls.repaired_by)
        if not isinstance(whole, dict) or whole.get("format") != cls.format_name():
            cls.refuse(name, "something else", cls.made_by)
        if whole.get("version") != VERSION:
            hint = f"contrastive_curvature {whole.get('written_by')} wrote it: use that release, or make it again."
            cls.refuse(name, f"version {whole.get('version')}", hint, f" of version {VERSION}")
        if whole.get("sha256") != _checksum(whole.get("content")):
            cls.refuse(name, "a damaged one: its checksum is another", cls.repaired_by)
        try:
            return cls.model_validate(whole["content"])
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"]))
            cls.refuse(name, f"one with {place}: {wrong['msg']}", cls.repaired_by)

    @classmethod
    def refuse(cls, name: str, got: str, hint: str = "", more: str = "") -> NoReturn:
        """Raise the error for a file or folder that is not of this kind."""
        raise InputError(name, cls.described + more, got, hint)


H = TypeVar("H", bound=Header)


def target_folder(argument: str, path: object, file: str, described: str, *, overwrite: bool) -> Path:
    """Return the path of a folder that may be written; refuse one with other content.

    Args:
        argument: Name of the path for error messages.
        path: The folder; it need not exist.
        file: Name of the file in it that says what it holds.
        described: What such a folder is called in error messages.
        overwrite: Whether one with that file may be written.

    Raises:
        InputError: It has something in it and no such file, or that file without ``overwrite``.
    """
    folder = folder_path(argument, path)
    # Unfinished files have names that begin with a dot.
    names = sorted(name for name in os.listdir(folder) if not name.startswith(".")) if folder.exists() else []
    if names and file not in names:
        got = f"{folder}, which has {names[0]!r} in it and no {file}"
        raise InputError(argument, f"a new or an empty folder, or {described}", got, "Name another folder.")
    if names and not overwrite:
        hint = "Pass overwrite=True to replace it, or name another folder."
        raise InputError(argument, "a new or an empty folder", f"{folder}, which holds {described}", hint)
    return folder


def write_tensors(path: Path | str, header: Header, tensors: Mapping[str, Tensor], *, follow: bool = True) -> None:
    """Write a safetensors file with a header and a checksum, without a copy of the tensors in memory.

    The library's own writer is not used: it writes a second file, which has another mode and no lock, and its error for
    a full disk is no ``OSError``. For ``follow`` see :func:`write_whole`.
    """
    from contrastive_curvature.network.digest import tensor_bytes

    metadata = {_METADATA: json.dumps({"header": header.dumps(), "tensors": _tensors_checksum(tensors)})}
    about, end = dict[str, Any](__metadata__=metadata), 0
    # The widest types first, so that each tensor begins at a multiple of the width of its type.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in ordered:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        about[name] = {"dtype": _type_name(tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(about).encode()
    if len(text) > _LONGEST_HEADER:
        raise UnsupportedError(f"{path}: {len(text):,} bytes of names and numbers are too many to save, beside arrays.")
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            for part in tensor_bytes(tensors[name]):
                file.write(part)

    write_whole(path, write, follow=follow)


def read_tensors(path: Path | str, kind: type[H]) -> tuple[H, dict[str, Tensor]]:
    """Read the header and the tensors of a file of :func:`write_tensors`."""
    header, checksum, tensors = _read(path, kind, whole=True)
    if checksum != _tensors_checksum(tensors):
        kind.refuse(str(path), "a damaged one: its checksum is another", kind.repaired_by)
    return header, tensors


def read_header(path: Path | str, kind: type[H]) -> H:
    """Return the header of a file that :func:`write_tensors` wrote; its tensors are not read."""
    return _read(path, kind, whole=False)[0]


def _read(path: Path | str, kind: type[H], *, whole: bool) -> tuple[H, str, dict[str, Tensor]]:
    from safetensors import safe_open

    if not Path(path).is_file():
        kind.refuse(str(path), "no such file", kind.made_by)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in (file.keys() if whole else ())}
    except SafetensorError:
        kind.refuse(str(path), "a damaged one, or something else", kind.repaired_by)
    if _METADATA not in metadata:
        kind.refuse(str(path), "a safetensors file of something else", kind.made_by)
    try:
        about = json.loads(metadata[_METADATA])
        text, checksum = about["header"], about["tensors"]
    except (ValueError, KeyError, TypeError):
        kind.refuse(str(path), "a damaged one", kind.repaired_by)
    return kind.loads(text, str(path)), checksum, tensors


def _type_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    return _KINDS[kind] + name.removeprefix(kind)


def _tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    from contrastive_curvature.network.digest import tensor_bytes

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in tensor_bytes(tensor):
            digest.update(part)
    return digest.hexdigest()


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

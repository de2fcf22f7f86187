"""Files that this library writes and reads: written completely or not at all, with one kind of header.

A header is a pydantic model in JSON, with the name of its format, a version, and a checksum. It is one small file of an
:class:`ArtifactFolder`, or part of the metadata of a safetensors file. Reading a file never executes code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Generic, NoReturn, Self, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from contrastive_curvature.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 3
"""Of every format. It is raised where an older release would misread what this one writes."""

_ABANDONED = 3600
"""Seconds after which a file that is still unfinished belongs to a writer that was killed."""

_METADATA = "header"


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
    file gets the mode of the user's umask. Unfinished copies of the same file that killed writers left more than an
    hour ago are removed.
    """
    target = final_target(path) if follow else Path(path)
    for old in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _ABANDONED:
                old.unlink()
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with unfinished.open("xb") as file:
            if target.exists() and not target.is_symlink():
                shutil.copymode(target, unfinished)
            write(file)
            file.flush()
            # Without fsync, a power cut could leave an empty file under the new name.
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        # torch's writer replaces the OSError by a RuntimeError without the reason.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def folder_path(argument: str, path: object) -> Path:
    """Return the path of a folder, with ``~`` and all symbolic links followed; the folder need not exist."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise InputTypeError(argument, "a path of a folder", repr(path))
    found = Path(os.path.realpath(Path(path).expanduser()))
    if found.exists() and not found.is_dir():
        raise InputError(argument, "a folder", f"{found}, which is a file")
    return found


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Header(BaseModel):
    """Header of a file or a folder; a subclass lists the content in its fields.

    Class attributes:
        kind: Name of the format.
        file_name: Name of the header file in a folder.
        described: Description of such a file or folder in error messages.
        made_by: Sentence that says how a user creates one.
        repaired_by: Sentence that says what to do if it is damaged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]
    file_name: ClassVar[str] = "header.json"
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
    def refuse(cls, name: str, received: str, hint: str = "", more: str = "") -> NoReturn:
        """Raise the error for a file or folder that is not of this kind."""
        raise InputError(name, cls.described + more, received, hint)


H = TypeVar("H", bound=Header)


class ArtifactFolder(Generic[H]):
    """A folder whose header describes its other files.

    The header is written last, so a folder with a header is complete, and a folder without a header is ignored.

    Args:
        path: The folder; it need not exist.
        header: The class of its header.
        argument: Name of the path for error messages.
        own: Pattern for names of other files that a killed writer may leave.
    """

    def __init__(
        self, path: object, header: type[H], argument: str = "path", own: re.Pattern[str] | None = None
    ) -> None:
        self.path, self._header, self._argument, self._own = folder_path(argument, path), header, argument, own
        self.header_path = self.path / header.file_name

    @property
    def exists(self) -> bool:
        """Return whether there is a header, of this or of another kind."""
        return self.header_path.is_file()

    def make(self, *, parents: bool = False) -> None:
        """Create the folder if needed; refuse a folder with other content, see :meth:`check`."""
        try:
            self.path.mkdir(parents=parents, exist_ok=True)
        except FileNotFoundError:
            received = f"no folder {self.path.parent}"
            raise InputError(self._argument, "a folder in one that exists", received) from None
        self.check()

    def check(self) -> None:
        """Refuse a folder with other content; a missing folder is accepted."""
        if not self.path.exists():
            return
        # Unfinished files and the lock have names that begin with a dot.
        others = [
            name
            for name in sorted(os.listdir(self.path))
            if not name.startswith(".") and not (self._own and self._own.fullmatch(name))
        ]
        if others and not self.exists:
            wanted = f"a new or an empty folder, or {self._header.described}"
            received = f"{self.path}, which has {others[0]!r} in it and no {self._header.file_name}"
            raise InputError(self._argument, wanted, received, "Name another folder.")

    @contextlib.contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Lock the folder against other writers; the system releases the lock when the process ends."""
        lock = self.path / ".lock"
        if lock.is_symlink():
            received = f"{lock}, a symbolic link, which would be written through"
            raise InputError(self._argument, "a folder with a lock of its own", received, "Remove the link.")
        try:
            with FileLock(lock, timeout=-1 if wait else 0):
                yield
        except Timeout:
            hint = "Wait for it, or name another folder."
            wanted = "a folder that nobody else is writing"
            raise InputError(self._argument, wanted, str(self.path), hint) from None

    def read(self) -> H:
        """Return the header."""
        try:
            text = self.header_path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            self._header.refuse(str(self.path), f"no {self._header.file_name} there", self._header.made_by)
        return self._header.loads(text, str(self.header_path))

    def write(self, header: H) -> None:
        """Replace the header in one step."""
        write_whole(self.header_path, lambda file: file.write(header.dumps().encode()), follow=False)


def write_tensors(path: Path | str, header: Header, tensors: Mapping[str, Tensor], *, follow: bool = True) -> None:
    """Write a safetensors file with a header and a checksum, without a copy of the tensors in memory.

    For ``follow`` see :func:`write_whole`.
    """
    from safetensors.torch import save_file

    plain = _plain(tensors)
    metadata = _metadata(header, plain)
    write_whole(path, lambda file: save_file(plain, file.name, metadata), follow=follow)


def read_tensors(path: Path | str, kind: type[H]) -> tuple[H, dict[str, Tensor]]:
    """Read the header and the tensors of a file of :func:`write_tensors`."""
    from safetensors import safe_open

    if not Path(path).is_file():
        kind.refuse(str(path), "no such file", kind.made_by)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except SafetensorError:
        kind.refuse(str(path), "a damaged one, or something else", kind.repaired_by)
    return _checked(metadata, tensors, kind, str(path))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU that share no memory, which safetensors requires."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != own.nbytes:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    return plain


def _metadata(header: Header, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    # Only one entry, because safetensors writes several in any order, but equal content should give equal files.
    return {_METADATA: json.dumps({"header": header.dumps(), "tensors": _tensors_checksum(tensors)})}


def _checked(
    metadata: Mapping[str, str], tensors: dict[str, Tensor], kind: type[H], name: str
) -> tuple[H, dict[str, Tensor]]:
    if _METADATA not in metadata:
        kind.refuse(name, "a safetensors file of something else", kind.made_by)
    try:
        about = json.loads(metadata[_METADATA])
        text, checksum = about["header"], about["tensors"]
    except (ValueError, KeyError, TypeError):
        kind.refuse(name, "a damaged one", kind.repaired_by)
    header = kind.loads(text, name)
    if checksum != _tensors_checksum(tensors):
        kind.refuse(name, "a damaged one: its checksum is another", kind.repaired_by)
    return header, tensors


def _tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

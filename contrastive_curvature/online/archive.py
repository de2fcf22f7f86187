"""Checks of a checkpoint file before torch reads it, so that a damaged or malicious file does no harm."""

from __future__ import annotations

import pickletools
import zipfile
from typing import BinaryIO

import torch

__all__ = ["archive_flaw"]

_ALLOWED_CALLS = {
    "collections Counter",
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
}
# Opcodes that name or call functions in other ways than GLOBAL, which the list above cannot check.
_FORBIDDEN_OPCODES = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"}


def archive_flaw(file: BinaryIO, size: int) -> str | None:
    """Find a flaw of an archive, without reading or unpacking more bytes than the file has.

    torch does not notice flipped bits, and it unpacks compressed entries. The functions that torch allows a file to
    call include ``bytearray``, with which a few bytes can allocate terabytes.

    Args:
        file: The file, open for reading.
        size: Size of the file in bytes.

    Returns:
        A short description of the flaw, or ``None``.

    Raises:
        Exception: The archive is damaged; the errors of ``zipfile`` and ``pickletools`` have no common base class.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            return "a file with compressed entries, which torch does not write"
        if sum(entry.file_size for entry in entries) > size:
            return "a file whose entries claim more bytes than it has"
        names = [entry.filename for entry in entries]
        if len(set(names)) != len(names):
            return "a file with two entries of one name"
        if broken := archive.testzip():
            return f"a damaged file ({broken})"
        for name in names:
            if name.endswith(".pkl") and (foreign := _foreign_call(archive.read(name))):
                return f"a file that holds more than plain content ({foreign})"
    return None


def _foreign_call(pickled: bytes) -> str | None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _FORBIDDEN_OPCODES:
            return opcode.name
        if opcode.name == "GLOBAL" and argument not in _ALLOWED_CALLS and not _is_tensor_type(str(argument)):
            return str(argument)
    return None


def _is_tensor_type(called: str) -> bool:
    module, _, name = called.partition(" ")
    if module != "torch":
        return False
    return name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)

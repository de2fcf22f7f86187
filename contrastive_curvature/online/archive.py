"""What a checkpoint file must be before torch reads it: an archive that claims no more than it has."""

from __future__ import annotations

import pickletools
import zipfile
from typing import BinaryIO

import torch

__all__ = ["flaw"]

_REBUILT = {
    "collections Counter",
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
}
# Names that are not in a GLOBAL, and calls that the list above does not see.
_OTHER_CALLS = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"}


def flaw(file: BinaryIO, size: int) -> str | None:
    """What is wrong with an archive, without reading more of it than there is.

    torch reads past flipped bits and unpacks compressed entries, and the names that it lets a file call include
    ``bytearray``, which makes terabytes of a few bytes.

    Args:
        file: Open for reading.
        size: Its bytes.

    Returns:
        A few words, or ``None`` if nothing is wrong.

    Raises:
        Exception: What a damaged archive raises has no common base.
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
        if opcode.name in _OTHER_CALLS:
            return opcode.name
        if opcode.name == "GLOBAL" and argument not in _REBUILT and not _is_kind_of_tensor(str(argument)):
            return str(argument)
    return None


def _is_kind_of_tensor(called: str) -> bool:
    module, _, name = called.partition(" ")
    if module != "torch":
        return False
    return name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)

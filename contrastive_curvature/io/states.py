"""States as safetensors files with a header and a checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.codec import TensorTable, from_tree, packed, to_tree, unpacked
from contrastive_curvature.fit.part_state import Origin, State
from contrastive_curvature.fit.total import Total
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.structures import STRUCTURES


class StateHeader(Header):
    """Header of a state's file: the state's tree, with names in place of tensors."""

    kind: ClassVar[str] = "part"
    described: ClassVar[str] = "a state of a part of a data set"
    made_by: ClassVar[str] = "la.part_statistics(loader, part).save(path) writes one."
    repaired_by: ClassVar[str] = "Compute this part again; the others stay as they are."

    tree: Any


def save_state(state: State, path: Path | str, *, follow: bool = True) -> None:
    """Write a state to a safetensors file, completely or not at all.

    Args:
        state: The state.
        path: The file; its folder must exist.
        follow: Whether to follow a symbolic link at this path; otherwise the link is replaced.

    Raises:
        InputError: The path is not a regular file in an existing folder.
        OSError: The file cannot be written.
    """
    table = TensorTable()
    tree = packed(to_tree(state), table, "state")
    write_tensors(path, StateHeader(tree=tree), table.tensors, follow=follow)


def load_state(path: Path | str) -> State:
    """Read a state that :func:`save_state` wrote. Nothing in the file is executed.

    Raises:
        InputError: The file does not exist, has another format or version, or is damaged.
    """
    header, tensors = read_tensors(path, StateHeader)
    known = (State, Origin, Total, Rows, ClassTable, *STRUCTURES.values())
    state: State = from_tree(str(path), unpacked(header.tree, tensors), known)
    return state

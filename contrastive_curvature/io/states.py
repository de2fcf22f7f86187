"""States as safetensors files with a header and a checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.codec import TensorTable, from_tree, packed, to_tree, unpacked
from contrastive_curvature.fit.contributions import Contributions, Largest, Place
from contrastive_curvature.fit.state import Origin, State
from contrastive_curvature.fit.total import Total
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.structures import STRUCTURES


class StateHeader(Header):
    """What stands in a state besides tensors: its tree, with names in the place of tensors."""

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
        follow: Whether a symbolic link there is followed; otherwise it is replaced.

    Raises:
        InputError: The path is no regular file in a folder that exists.
        OSError: The file cannot be written.
    """
    table = TensorTable()
    tree = packed(to_tree(state), table, "state")
    write_tensors(path, StateHeader(tree=tree), table.tensors, follow=follow)


def load_state(path: Path | str) -> State:
    """Read what :func:`save_state` wrote. Nothing in the file is executed.

    Raises:
        InputError: There is no such file, or it is something else, damaged, or of another version.
    """
    header, tensors = read_tensors(path, StateHeader)
    known = (State, Origin, Total, Rows, ClassTable, Contributions, Largest, Place, *STRUCTURES.values())
    state: State = from_tree(str(path), unpacked(header.tree, tensors), known)
    return state

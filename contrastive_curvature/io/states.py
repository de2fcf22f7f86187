"""States as safetensors files with a header and a checksum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.fit.contributions import Contributions
from contrastive_curvature.fit.state import Origin, State
from contrastive_curvature.fit.total import Total
from contrastive_curvature.io.pretrained.folder import TensorTable, flattened, restored
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.structures import structure_from

_PROBE = "probe"


class StateHeader(Header):
    """What stands in a state besides tensors; see :class:`.State`.

    Args:
        of: Kind of the state.
        identity: What has to be equal for two states to fit together.
        origins: The parts that are in it.
        count: Number of all parts.
        kept: Size and seed of every sample of points.
        contributions: Which points dominate.
        curvature: The curvature as plain values, with names in the place of its tensors.
    """

    kind: ClassVar[str] = "part"
    described: ClassVar[str] = "a state of a part of a data set"
    made_by: ClassVar[str] = "la.part_statistics(loader, part).save(path) writes one."
    repaired_by: ClassVar[str] = "Compute this part again; the others stay as they are."

    of: str
    identity: Mapping[str, str]
    origins: dict[int, Origin]
    count: int
    kept: dict[str, tuple[int | None, int]]
    contributions: Contributions
    curvature: Any = None


def save_state(state: State, path: Path | str) -> None:
    """Write a state to a safetensors file, completely or not at all.

    Args:
        state: The state.
        path: The file; its folder must exist.

    Raises:
        InputError: The path is no regular file in a folder that exists.
        OSError: The file cannot be written.
    """
    total = state.total
    kept = dict(total.kept) if state.probe is None else {**total.kept, _PROBE: state.probe}
    tensors = {f"sums/{name}": part for name, part in total.terms.items()}
    for name, rows in kept.items():
        tensors[f"kept/{name}/numbers"] = rows.numbers
        tensors |= {f"kept/{name}/columns/{column}": part for column, part in rows.columns.items()}
    if total.classes is not None:
        tensors |= {f"classes/{name}": part for name, part in vars(total.classes).items()}
    curvature = None
    if total.curvature is not None:
        table = TensorTable()
        curvature = flattened(total.curvature.tree(), table, "curvature")
        tensors |= table.tensors
    header = StateHeader(
        of=state.kind,
        identity=state.identity,
        origins=dict(sorted(state.origins.items())),
        count=state.count,
        kept={name: (rows.size, rows.seed) for name, rows in kept.items()},
        contributions=total.contributions,
        curvature=curvature,
    )
    write_tensors(path, header, tensors)


def load_state(path: Path | str) -> State:
    """Read what :func:`save_state` wrote. Nothing in the file is executed.

    Raises:
        InputError: There is no such file, or it is something else, damaged, or of another version.
    """
    header, tensors = read_tensors(path, StateHeader)
    kept = {
        name: Rows(size, tensors[f"kept/{name}/numbers"], _under(tensors, f"kept/{name}/columns/"), seed)
        for name, (size, seed) in header.kept.items()
    }
    probe = kept.pop(_PROBE, None)
    classes = _under(tensors, "classes/")
    n = sum(origin.n for origin in header.origins.values())
    table = ClassTable(**classes) if classes else None
    curvature = None if header.curvature is None else structure_from(restored(header.curvature, tensors))
    total = Total(n, _under(tensors, "sums/"), kept, table, header.contributions, curvature)
    return State(header.of, header.identity, header.origins, header.count, total, probe)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}

"""The structures of the curvature: which part is kept, how it adds up over points, and how its posterior is used."""

from contrastive_curvature.errors import InputError
from contrastive_curvature.removed import refuse_removed
from contrastive_curvature.structures.dense import Dense
from contrastive_curvature.structures.diagonal import Diagonal
from contrastive_curvature.structures.kron import Kron
from contrastive_curvature.structures.kron_lowrank import KronLowRank
from contrastive_curvature.structures.structure import Clamped, Structure

STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Diagonal, Dense, Kron, KronLowRank)}
"""By the name that ``hessian_structure`` takes."""

REMOVED_STRUCTURES = {
    "gp": "It was removed after version 0.2. 'full' gives its posterior, for the last layer or subset_of_weights="
    "'subnetwork'; for more weights use 'kron_lowrank' of the last layer, or 'kron' of all.",
    "lowrank": "It was removed after version 0.2. Use 'kron_lowrank' of the last layer, or 'kron' of all weights. "
    "docs/backends.md#curvlinops has the leading eigenpairs of all weights.",
}
"""Names that earlier versions took -> what to use instead."""


def structure_of(name: object, argument: str = "structure", known: tuple[str, ...] | None = None) -> type[Structure]:
    """Return the structure with this name.

    Args:
        name: The name.
        argument: Name of the user's argument, for the message.
        known: Allowed names; ``None`` for all.

    Raises:
        InputError: There is no structure of this name.
    """
    names = tuple(STRUCTURES) if known is None else known
    if not isinstance(name, str) or name not in names:
        hint = REMOVED_STRUCTURES.get(name, "") if isinstance(name, str) else ""
        if isinstance(name, str) and name in STRUCTURES:
            hint = f"{name!r} is for subset_of_weights={' or '.join(map(repr, STRUCTURES[name].weights))}."
        raise InputError(argument, f"one of {', '.join(map(repr, names))}", name, hint)
    return STRUCTURES[str(name)]


__all__ = [
    "REMOVED_STRUCTURES",
    "STRUCTURES",
    "Clamped",
    "Dense",
    "Diagonal",
    "Kron",
    "KronLowRank",
    "Structure",
    "structure_of",
]

__getattr__ = refuse_removed(__name__)

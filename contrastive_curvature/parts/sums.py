"""Names of the sums over points that states of curvatures have, and Kronecker factors as such sums."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["CURVATURE_SUM", "FEATURES", "added", "factors_of", "named_factors"]

CURVATURE_SUM = "curvature"
"""A diagonal (P,) or a matrix (P, P)."""

FEATURES = "features"
"""Of the kept inputs of the last layer."""

_FACTOR = "factor/"


def added(total: Mapping[str, Tensor], terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums with the same names, added up; a name may be missing on one side."""
    out = dict(total)
    for name, term in terms.items():
        out[name] = out[name] + term if name in out else term
    return out


def named_factors(factors: list[list[Tensor]]) -> dict[str, Tensor]:
    """Kronecker factors with a name each, as states have them."""
    return {f"{_FACTOR}{k}/{j}": part for k, group in enumerate(factors) for j, part in enumerate(group)}


def factors_of(sums: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Kronecker factors, from what :func:`named_factors` gave."""
    groups: dict[int, dict[int, Tensor]] = {}
    for name, part in sums.items():
        if name.startswith(_FACTOR):
            k, j = map(int, name.removeprefix(_FACTOR).split("/"))
            groups.setdefault(k, {})[j] = part
    return [[groups[k][j] for j in sorted(groups[k])] for k in sorted(groups)]

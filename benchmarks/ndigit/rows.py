"""The methods of the tables, with the options that were chosen on digits that training leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experiments.methods.base import Setting
from benchmarks.experiments.methods.hedged import Hedged, HedgedPoint
from benchmarks.experiments.methods.hedged_pairs import PairMethod
from benchmarks.experiments.methods.lifted import LaplaceLifted
from contrastive_curvature.errors import InputError, expected

__all__ = ["BASE", "LAM", "ROWS", "Row", "make_row", "rows_of"]

BASE = "point_soft"
"""Key of the row whose encoder LAM builds on."""
LAM = "laplace_lifted"


@dataclass(frozen=True)
class Row:
    """A method with its options.

    Args:
        key: As on the command line and in file names.
        title: As in the tables.
        method: Its class.
        options: For it.
    """

    key: str
    title: str
    method: type[PairMethod] | type[LaplaceLifted]
    options: dict[str, Any] = field(default_factory=dict)


_ADAM = {"optimizer": "adam"}
_TRAINED = {"a": 2.0, "b": 3.0, "match_lr": 10.0, **_ADAM}

ROWS = (
    Row(BASE, "Point embedding, soft contrastive loss", HedgedPoint, {"loss": "soft", **_TRAINED}),
    Row("point_hard", "Point embedding, hard margin", HedgedPoint, {"loss": "hard", "margin": 1.0, **_ADAM}),
    Row("hedged", "Hedged embedding, one Gaussian (MoG-1)", Hedged, {"components": 1, **_TRAINED}),
    Row("hedged_mixture", "Hedged embedding, two Gaussians (MoG-2)", Hedged, {"components": 2, **_TRAINED}),
    Row("hedged_mixture4", "Hedged embedding, four Gaussians (MoG-4)", Hedged, {"components": 4, **_TRAINED}),
    Row(LAM, "LAM (post-hoc) on the point embedding", LaplaceLifted),
)

_NOT_UNASKED = ("hedged_mixture4",)


def rows_of(methods: Sequence[str] | None) -> list[Row]:
    """The rows that are wanted, in the tables' order.

    Args:
        methods: Their keys; ``None`` for all but the mixture of four.

    Raises:
        InputError: A key is unknown or listed twice, or LAM is wanted without the encoder that it builds on.
    """
    known = [row.key for row in ROWS]
    wanted = [key for key in known if key not in _NOT_UNASKED] if methods is None else list(methods)
    if not wanted or set(wanted) - set(known) or len(set(wanted)) < len(wanted):
        raise InputError(expected("--methods", f"each once, of {', '.join(known)}", " ".join(wanted)))
    if LAM in wanted and BASE not in wanted:
        raise InputError(expected("--methods", f"{BASE} beside {LAM}, which builds on it", " ".join(wanted)))
    return [row for row in ROWS if row.key in wanted]


def make_row(row: Row, setting: Setting, batches: int, kl_weight: float) -> PairMethod | LaplaceLifted:
    """The method, still to be fitted or loaded.

    Args:
        row: Of the tables.
        setting: How encoders are made and trained.
        batches: Batches in an epoch.
        kl_weight: Weight of the divergences, for hedged embeddings.
    """
    if issubclass(row.method, LaplaceLifted):
        return row.method(setting, **row.options)
    more: dict[str, Any] = {"kl_weight": kl_weight} if issubclass(row.method, Hedged) else {}
    return row.method(setting, batches=batches, **row.options, **more)

"""A fit over several processes or jobs, each with a part of the data: the sums of one loop, merged."""

from __future__ import annotations

from collections.abc import Mapping

from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, add_up
from contrastive_curvature.fit.part_state import CURVATURE, STATISTICS, State
from contrastive_curvature.fit.passes import Passes


def statistics_of(f: Fit, passes: Passes, identity: Mapping[str, str]) -> State:
    """Return the statistics of the first pass over a part of the data."""
    total = f.source.statistics(f, passes)
    return State(STATISTICS, identity, {f.part[0]: passes.origin()}, f.part[1], total)


def curvature_of(f: Fit, passes: Passes, identity: Mapping[str, str], statistics: State) -> State:
    """Return the curvature that a part of the data adds, with the statistics of all parts."""
    pairs = f.source.pairs(f, statistics.total)
    (total,) = add_up(f, f.source.parts(f, pairs, passes))
    state = State(CURVATURE, identity, {f.part[0]: passes.origin()}, f.part[1], total)
    _check_origins(f, statistics, state, "loader")
    return state


def finish_parts(f: Fit, statistics: State, curvature: State) -> DatasetCurvature:
    """Return the curvature of all parts."""
    pairs = f.source.pairs(f, statistics.total)
    _check_origins(f, statistics, curvature, "curvature")
    (out,) = f.source.closed(f, pairs, [curvature.total])
    return out


def _check_origins(f: Fit, statistics: State, curvature: State, argument: str) -> None:
    """Refuse sums over other points than in the first pass of a part; ``argument`` names them in the message."""
    # Inputs of a loss of anchors may be augmented again.
    for part, again in curvature.origins.items() if f.options.loss.compares == "pairs" else ():
        before = statistics.origins.get(part)
        same = before is not None and (before.n, before.targets) == (again.n, again.targets)
        # A first pass that counts targets has no outputs.
        if same and before is not None and (not before.extremes or before.same_points(again)):
            continue
        n = 0 if before is None else before.n
        hint = "Give each part the same points in both passes, and use the same encoder."
        got = f"{again.n} points for {n}" if again.n != n else "other points, targets or outputs"
        raise InputError(argument, f"the points of part {part} of the statistics", got, hint)

"""A fit over several processes or jobs, each with a part of the data: the sums of one loop, merged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.exchange import ProcessGroup
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, add_up
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.fit.share import Claim, Share, sum_of_keys
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, Origin, State

_log = logging.getLogger("contrastive_curvature")

_GIVE = "Give every process its share: sampler=torch.utils.data.DistributedSampler(dataset, shuffle=False)."


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


def fit_together(
    f: Fit, passes: Passes, share: Share, exchange: ProcessGroup, identity: Mapping[str, str]
) -> DatasetCurvature | None:
    """Return the curvature of the parts of all processes; ``None`` if each process has all the data."""
    device = next(passes.encoder.parameters()).device
    statistics = _gathered(exchange, share, statistics_of(f, passes, identity))
    if statistics is None:
        return None
    statistics = statistics.to(device)
    curvature = _gathered(exchange, share, curvature_of(f, passes, identity, statistics))
    return None if curvature is None else finish_parts(f, statistics, curvature.to(device))


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


def _gathered(exchange: ProcessGroup, share: Share, state: State) -> State | None:
    """Return the merged state of all processes; ``None`` if every process has all the data."""
    heads = exchange.gather(Head(state.origins[exchange.rank], share.claim))
    if all_the_same(heads):
        _log.warning(
            "every process has the same points, so each fits alone; a DistributedSampler gives each a share of the work"
        )
        return None
    check_shares(heads)
    # Merge one at a time, because all states together may be all embeddings of the data set, or many matrices.
    return exchange.merge(state.to(torch.device("cpu")), State.merge)


class Head(NamedTuple):
    """Summary of the share of a process.

    Args:
        origin: Points that the process has read.
        claim: Points that its loader declares, if it does.
    """

    origin: Origin
    claim: Claim | None

    @property
    def empty(self) -> bool:
        """Whether the share has no point, as far as is known."""
        return not (self.origin.n if self.claim is None else self.claim.n)

    def same_points(self, other: Head) -> bool:
        """Return whether both certainly have the same points."""
        if self.claim is not None and other.claim is not None:
            return (self.claim.n, self.claim.keys) == (other.claim.n, other.claim.keys)
        return self.origin.same_points(other.origin)


def all_the_same(heads: list[Head]) -> bool:
    """Return whether every process has all the data instead of a part."""
    filled = [(rank, head) for rank, head in enumerate(heads) if not head.empty]
    twins = [(a, b) for k, (a, one) in enumerate(filled) for b, other in filled[k + 1 :] if one.same_points(other)]
    if not twins:
        return False
    if len(twins) == len(heads) * (len(heads) - 1) // 2:
        return True
    a, b = twins[0]
    raise InputError("train_loader", "other points in every process", f"the same in {a} and {b}", _GIVE)


def check_shares(heads: list[Head]) -> None:
    """Refuse samplers that leave points out, or pass a point to two processes."""
    claims = [head.claim for head in heads if head.claim is not None]
    sizes = {claim.points for claim in claims}
    if len(claims) < len([head for head in heads if not head.empty]) or not claims or sizes == {None}:
        return
    hint = "Use the same data set, num_replicas, seed and epoch in all samplers, and another rank in each."
    wanted = "samplers that give every point of the data set to one process"
    points = next(iter(sizes))
    if len(sizes) > 1 or points is None:
        raise InputError("train_loader", wanted, "data sets of different sizes", hint)
    claimed = sum(claim.n for claim in claims)
    if claimed != points:
        raise InputError("train_loader", wanted, f"{claimed} of {points} points", hint)
    if sum_of_keys(torch.arange(points)) != _wrapped(sum(claim.keys for claim in claims)):
        raise InputError("train_loader", wanted, "some points twice and others not at all", hint)


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63

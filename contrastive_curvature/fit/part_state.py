"""The contribution of one part of a data set to a fit; parts merge in any order and grouping."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import torch

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.fit.total import Total
from contrastive_curvature.network.inputs import Inputs

_TELLING = 32
"""Points from which on two parts are not alike by chance."""

STATISTICS, CURVATURE = "statistics", "curvature"
"""The two kinds of states: what a pass over the data has to know of all other parts, and what it then computes."""


@dataclass(frozen=True)
class Origin:
    """Summary of the points of a part in a few numbers.

    Args:
        n: Number of points.
        targets: A sum over the targets that changes with any target, modulo 2^64 as a signed number.
        along: Sum of the raw outputs along one direction.
        norm: Sum of the norms of the raw outputs.
        bound: Sum of the outputs along this direction, each times a number that depends on its target, so that it
            changes if the same targets are in another order.
        extremes: The lowest and the highest outputs along this direction, and norms, if outputs were computed. Sums
            over many points are nearly equal for two random halves of a data set; the extreme points are not.
        rounding: Largest relative difference of the outputs of a point in batches of different sizes.
    """

    n: int
    targets: int
    along: float
    norm: float
    bound: float = 0.0
    extremes: tuple[float, ...] = ()
    rounding: float = 1e-3

    def same(self, other: Origin) -> bool:
        """Return whether both hold the same points, with the outputs of the same encoder up to rounding."""
        if (self.n, self.targets) != (other.n, other.targets):
            return False
        near = max(self.rounding, other.rounding) * max(self.norm, other.norm)
        mine, theirs = (self.norm, self.along, self.bound), (other.norm, other.along, other.bound)
        return all(abs(a - b) <= near for a, b in zip(mine, theirs, strict=True))

    def same_points(self, other: Origin) -> bool:
        """Return whether both certainly hold the same points; ``False`` if this is unknown."""
        if not self.extremes or len(self.extremes) != len(other.extremes) or not self.same(other):
            return False
        # Numbers along the direction (even positions) alternate with norms; these numbers vary by about their own size.
        near = 2 * max(self.rounding, other.rounding) * max(abs(number) for number in self.extremes[::2])
        return all(abs(a - b) <= near for a, b in zip(self.extremes, other.extremes, strict=True))


@dataclass(frozen=True)
class State:
    """State of one part of a data set, or of several merged parts.

    Merging is associative and commutative, up to the rounding of sums.

    Args:
        kind: :data:`STATISTICS` or :data:`CURVATURE`.
        identity: Facts that must be equal for two states to fit together: options, encoder, data.
        origins: The parts in this state, by index.
        count: Number of all parts of the data set.
        total: Sum over these parts.
        probe: The smallest index of a part that has points, and a few made-up inputs as the encoder takes them.
    """

    kind: str
    identity: Mapping[str, str]
    origins: Mapping[int, Origin]
    count: int
    total: Total = field(default_factory=Total)
    probe: tuple[int, Inputs] | None = None

    @property
    def n(self) -> int:
        """Number of points."""
        return self.total.n

    @property
    def missing(self) -> list[int]:
        """Indices of the missing parts."""
        return [index for index in range(self.count) if index not in self.origins]

    def to(self, device: torch.device) -> State:
        """Return a copy on a device; numbers of points and the probe stay on the CPU."""
        return replace(self, total=self.total.to(device))

    def merge(self, other: State) -> State:
        """Return the state of both together.

        Raises:
            InputError: The states are of different data, encoders, options or kinds, or have a part in common.
        """
        check_fit_together(self, other)
        probes = [state.probe for state in (self, other) if state.probe is not None]
        return replace(
            self,
            origins={**self.origins, **other.origins},
            total=self.total + other.total,
            probe=min(probes, key=itemgetter(0), default=None),
        )

    @staticmethod
    def merged(states: Iterable[State]) -> State:
        """Merge all states into one, see :func:`merged`."""
        return merged(states)

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, see :func:`contrastive_curvature.io.states.save_state`."""
        from contrastive_curvature.io.states import save_state

        save_state(self, path)

    @staticmethod
    def load(path: Path | str) -> State:
        """Read a file of :meth:`save`, see :func:`contrastive_curvature.io.states.load_state`."""
        from contrastive_curvature.io.states import load_state

        return load_state(path)

    def check_complete(self) -> None:
        """Refuse a state with missing parts."""
        missing = self.missing
        if missing:
            wanted = f"all {self.count} parts"
            hint = "Compute the missing ones and merge them too; the others stay as they are."
            raise InputError(self.kind, wanted, f"none of {missing[:10]}", hint)


def merged(states: Iterable[State]) -> State:
    """Merge all states into one.

    Args:
        states: At least one.

    Raises:
        InputError: There is no state, or two of them do not fit together, see :meth:`State.merge`.
        InputTypeError: An entry is not a state.
    """
    if isinstance(states, State) or not isinstance(states, Iterable):
        got = "one of them" if isinstance(states, State) else f"a {type(states).__name__}"
        raise InputTypeError("states", "several states, as a list", got)
    remaining = list(states)
    for state in remaining:
        if not isinstance(state, State):
            raise InputTypeError("states", "states of parts of a data set", f"a {type(state).__name__}")
    if not remaining:
        raise InputError("states", "at least one", "none")
    # Sort by parts, so that the order of the files does not change the rounding.
    remaining.sort(key=lambda state: min(state.origins, default=0))
    while len(remaining) > 1:
        # Merge in pairs, so that kept points are not copied again for each of many parts.
        joined = [one.merge(other) for one, other in zip(remaining[::2], remaining[1::2], strict=False)]
        remaining = joined + remaining[2 * len(joined) :]
    return remaining[0]


def check_fit_together(first: State, second: State) -> None:
    """Refuse two states that are not of one fit."""
    if first.kind != second.kind:
        raise InputError("states", f"all of one kind, {first.kind!r}", f"{second.kind!r}")
    if first.count != second.count:
        hint = "Parts of one fit are counted alike: index 0 to count - 1 of the same count."
        raise InputError("states", f"parts of {first.count}", f"parts of {second.count}", hint)
    for name, one, other in _differences(first.identity, second.identity):
        hint = "States merge where the encoder, the options and the data are the same."
        raise InputError(f"states: {name}", f"{one} in all parts", f"{other} in another", hint)
    twice = sorted(set(first.origins) & set(second.origins))
    if twice:
        raise InputError("states", "every part once", f"part {twice[0]} twice")
    for a, origin in first.origins.items():
        for b, theirs in second.origins.items():
            if min(origin.n, theirs.n) >= _TELLING and origin.same_points(theirs):
                hint = "Every part has its own share of the data: a slice, a shard, or a DistributedSampler."
                got = f"the same {origin.n} points in parts {a} and {b}"
                raise InputError("states", "other points in every part", got, hint)


def check_identity(state: State, identity: Mapping[str, str]) -> None:
    """Refuse a state of another fit."""
    for name, mine, other in _differences(identity, state.identity):
        hint = "Use the encoder, the options and the data that the state was computed with."
        raise InputError(f"{state.kind}: {name}", str(mine), str(other), hint)


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the facts in which two fits differ."""
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def digest_of(state: State) -> str:
    """Return a short text that is equal for equal data, encoder and options, in any order of merging."""
    origins = {index: (origin.n, origin.targets) for index, origin in sorted(state.origins.items())}
    text = json.dumps([dict(sorted(state.identity.items())), origins, state.count])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

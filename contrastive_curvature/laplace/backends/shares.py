"""Whether the processes of one fit have different shares of the data, or each of them all of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.parts.share import Claim, Share, sum_of_keys
from contrastive_curvature.parts.state import Origin, State

__all__ = ["Head", "all_the_same", "check_shares"]

_GIVE = "Give every process its share: sampler=torch.utils.data.DistributedSampler(dataset, shuffle=False)."


@dataclass(frozen=True)
class Head:
    """What a process says of its share.

    Args:
        origin: Which points it has seen.
        claim: Which points its loader says that it gives.
    """

    origin: Origin
    claim: Claim | None

    @classmethod
    def of(cls, state: State, loader: Any, rank: int) -> Head:
        """Of the state of one process.

        Args:
            state: Of its share.
            loader: The share.
            rank: Of the process.
        """
        return cls(state.origins[rank], Share(loader, rank).claim)

    def text(self) -> bytes:
        """For other processes."""
        return json.dumps([asdict(self.origin), None if self.claim is None else asdict(self.claim)]).encode()

    @classmethod
    def of_text(cls, text: bytes) -> Head:
        """What :meth:`text` gave."""
        origin, claim = json.loads(text)
        return cls(
            Origin(**{**origin, "extremes": tuple(origin["extremes"])}), None if claim is None else Claim(**claim)
        )

    @property
    def empty(self) -> bool:
        """Whether the share has no point, as far as that is known."""
        return not (self.origin.n if self.claim is None else self.claim.n)

    def same_points(self, other: Head) -> bool:
        """Whether both surely have the same points."""
        if self.claim is not None and other.claim is not None:
            return (self.claim.n, self.claim.keys) == (other.claim.n, other.claim.keys)
        return self.origin.same_points(other.origin)


def all_the_same(heads: list[Head]) -> bool:
    """Whether every process has all the data, instead of a part of it.

    Raises:
        InputError: Some processes, but not all, have the same points.
    """
    filled = [(rank, head) for rank, head in enumerate(heads) if not head.empty]
    twins = [(a, b) for k, (a, one) in enumerate(filled) for b, other in filled[k + 1 :] if one.same_points(other)]
    if not twins:
        return False
    if len(twins) == len(heads) * (len(heads) - 1) // 2:
        return True
    a, b = twins[0]
    raise InputError(expected("train_loader", "other points in every process", f"the same in {a} and {b}", _GIVE))


def check_shares(heads: list[Head]) -> None:
    """Refuse samplers that leave points out, or give points to two processes.

    Raises:
        InputError: Their shares together are not the data set.
    """
    claims = [head.claim for head in heads if head.claim is not None]
    sizes = {claim.points for claim in claims}
    if len(claims) < len([head for head in heads if not head.empty]) or not claims or sizes == {None}:
        return
    hint = "Use the same data set, num_replicas, seed and epoch in all samplers, and another rank in each."
    wanted = "samplers that give every point of the data set to one process"
    points = next(iter(sizes))
    if len(sizes) > 1 or points is None:
        raise InputError(expected("train_loader", wanted, "data sets of different sizes", hint))
    given = sum(claim.n for claim in claims)
    if given != points:
        raise InputError(expected("train_loader", wanted, f"{given} of {points} points", hint))
    if sum_of_keys(range(points)) != _wrapped(sum(claim.keys for claim in claims)):
        raise InputError(expected("train_loader", wanted, "some points twice and others not at all", hint))


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63

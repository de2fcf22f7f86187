"""Evidence for the match of a query: six numbers, from the gallery and from the posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HITS = 10
"""Nearest gallery points that are averaged over, and that vote."""

FLOOR = 1e-6
"""Added to distances and novelties before their logarithm: cosines of float32 have about so many digits."""

_REPEATED = 1e-5
"""Numbers of the directions of a repeated input differ less."""

_ENTRIES = 2**24
"""Cosines, and numbers of gallery points that are looked at closely, in one block: 64 MiB in float32."""

COLUMNS = {
    "match": -1,  # log(1 - cosine) to the match,
    "mean": -1,  # on average to the ten nearest,
    "votes": 1,  # share of these that have the class of the match
    "gap": -1,  # the first, less the same to the nearest of another class (Lowe, 2004, section 7.1)
    "uncertainty": -1,  # logarithms of what the posterior says of the query alone
    "novelty": -1,
}
"""The numbers, and the sign with which each may enter P(right): a larger distance never raises it."""


@dataclass(frozen=True, eq=False)
class Embedded:
    """The embeddings of N inputs with the answers of the posterior, before any search.

    Attributes:
        directions: Unit vectors, float32, shape (N, D).
        uncertainty: In radians, shape (N,).
        novelty: Shape (N,).
        below: Unit vectors of the frozen encoder below a head, shape (N, F); ``None`` without a head.
    """

    directions: Tensor
    uncertainty: NDArray[np.float64]
    novelty: NDArray[np.float64]
    below: Tensor | None = None

    @classmethod
    def alone(cls, directions: Tensor) -> Self:
        """Return inputs without a posterior: a number that is the same for all says nothing."""
        return cls(directions, np.zeros(len(directions)), np.zeros(len(directions)))

    def __len__(self) -> int:
        return len(self.directions)

    def __getitem__(self, rows: Any) -> Self:
        """Return some of the inputs: a slice, or an array of row numbers or booleans."""
        chosen = np.arange(len(self))[rows]
        at = torch.from_numpy(chosen)
        below = None if self.below is None else self.below[at]
        return type(self)(self.directions[at], self.uncertainty[chosen], self.novelty[chosen], below)

    def to(self, device: torch.device) -> Self:
        """Return the inputs with directions on a device."""
        below = None if self.below is None else self.below.to(device)
        return replace(self, directions=self.directions.to(device), below=below)

    def distinct(self, classes: Tensor) -> NDArray[np.int64]:
        """Return the places of inputs without repetitions: the first of those with one direction and class (N,)."""
        seed = torch.Generator().manual_seed(0)
        axis = torch.randn(self.directions.shape[1], generator=seed, dtype=torch.float64, device="cpu")
        # Repetitions are neighbours in the order of their projections; batches of another size round in another way.
        along = (self.directions.cpu().double() @ axis).numpy()
        order = np.lexsort((along, classes.numpy()))
        sorted_to = self.directions[torch.from_numpy(order).to(self.directions.device)]
        apart = ((sorted_to[1:] - sorted_to[:-1]).abs().amax(1) > _REPEATED).cpu() | (classes[order].diff() != 0)
        return np.sort(np.minimum.reduceat(order, np.flatnonzero(np.append(True, apart.numpy()))))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Return the inputs of all parts, in order."""
        return cls(
            torch.cat([part.directions for part in parts]),
            np.concatenate([part.uncertainty for part in parts]),
            np.concatenate([part.novelty for part in parts]),
            joined([part.below for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class Searched:
    """What a search says of N queries.

    Attributes:
        evidence: Numbers of :data:`COLUMNS`, shape (N, 6).
        novelty: Shape (N,).
        right: Whether the matches are right, shape (N,); false where that is not known.
        classes: Numbers of the queries' classes, int64, shape (N,); -1 where they are not known.
        below: As ``evidence``, of the search of the frozen encoder's outputs below a head; ``None`` without a head.
        same: Whether the match of that search has the class of the match, shape (N,); ``None`` without a head.
    """

    evidence: NDArray[np.float64]
    novelty: NDArray[np.float64]
    right: NDArray[np.bool_]
    classes: NDArray[np.int64]
    below: NDArray[np.float64] | None = None
    same: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.evidence)

    def __getitem__(self, rows: Any) -> Searched:
        """Return some of the queries: an array of row numbers or booleans."""
        below, same = (None if part is None else part[rows] for part in (self.below, self.same))
        return Searched(self.evidence[rows], self.novelty[rows], self.right[rows], self.classes[rows], below, same)

    @property
    def present(self) -> NDArray[np.float64]:
        """Evidence that the gallery has the class: below a head, where no class has a place of its own."""
        return self.evidence if self.below is None else self.below


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all parts, in order; ``None`` if there are none."""
    return torch.cat([part for part in parts if part is not None]) if parts[0] is not None else None


def evidence(
    queries: Embedded,
    gallery: Tensor,
    classes: Tensor,
    without: Tensor | None = None,
    search: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Search a gallery, and return the evidence for each match.

    Args:
        queries: N embedded inputs.
        gallery: Unit vectors that are searched, shape (M, D).
        classes: Their classes, int64, shape (M,).
        without: One class a query, int64, shape (N,), whose points are taken out of the gallery for this query.
        search: Called with directions (B, D) and a number k, returns cosines and rows of the gallery, both (B, k), with
            a cosine of minus infinity for a missing row. It is called with a larger k until ten points of two classes
            remain besides the class ``without``, so an exact search gives the same numbers as the default, which
            compares with all points.

    Returns:
        The numbers of :data:`COLUMNS`, shape (N, 6), and the rows of the matches in the gallery, shape (N,). If no
        other class or no point is left, the distance is the largest possible, 2, and there are no votes.
    """
    columns, matches, classes, m = [], [], classes.to(gallery.device), len(gallery)
    step = max(1, _ENTRIES // (m + 2 * (_HITS + 1) * gallery.shape[1]))
    for start in range(0, len(queries), step):
        rows = slice(start, start + step)
        directions, k = queries.directions[rows].to(gallery), m if search is None else min(2 * _HITS, m)
        while True:
            if search is None:
                cosine, at, of = directions @ gallery.T, None, classes.expand(len(directions), m)
            else:
                cosine, at = search(directions, k)
                of = classes[at]
            if without is not None:
                cosine.masked_fill_(of == without[rows, None].to(classes), -torch.inf)
            top, hits = cosine.topk(min(_HITS, k), dim=1)
            there, voters = top > -torch.inf, of.gather(1, hits)
            other, far = cosine.masked_fill_(of == voters[:, :1], -torch.inf).max(1)
            if k == m or bool((there.all(1) & (other > -torch.inf)).all()):
                break
            k = min(2 * k, m)
        n = there.sum(1).clamp(min=1)
        agree = ((voters == voters[:, :1]) & there).sum(1) / n
        looked_at = torch.cat([hits, far[:, None]], dim=1)
        points = gallery[looked_at if at is None else at.gather(1, looked_at)].double()
        # From differences in float64: 1 - cosine of float32 rounds away what near duplicates differ by.
        apart = (directions[:, None].double() - points).square().sum(2) / 2
        apart.masked_fill_(~torch.cat([there, (other > -torch.inf)[:, None]], dim=1), 2.0)
        # Of no hit at all, the mean is that of one hit at the largest distance.
        there[:, 0] = True
        mean = torch.where(there, apart[:, :-1], 0).sum(1) / n
        nearest, average, others = torch.stack([apart[:, 0], mean, apart[:, -1]]).add(FLOOR).log().unbind()
        columns.append(torch.stack([nearest, average, agree.double(), nearest - others], dim=1))
        matches.append(hits[:, 0] if at is None else at.gather(1, hits[:, :1])[:, 0])
    alone = np.log(np.stack([queries.uncertainty, queries.novelty], axis=1).clip(FLOOR))
    return np.hstack([torch.cat(columns).cpu().numpy(), alone]), torch.cat(matches).cpu().numpy()

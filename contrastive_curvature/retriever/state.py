"""What a retriever answers from, as one value: no step changes a state, each returns another one.

``RetrieverState.fitted`` makes the first; ``added``, ``removed`` and ``learned`` return a state with other points or
other queries, and with the limits that follow from them: points, labels and limits are replaced together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.codec import NOT_SAVED
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.retriever.answers import Answers, as_array
from contrastive_curvature.retriever.evidence import Embedded, Searched, evidence, joined
from contrastive_curvature.retriever.index import Index, nearest
from contrastive_curvature.retriever.rule import Ranks, Rates, Rule, certified

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace

Names = Sequence[Hashable]

NAMED = 5
"""Classes, or identifiers, that are named in a message."""


class Gallery(NamedTuple):
    """M points that are searched.

    Attributes:
        directions: Unit vectors, shape (M, D).
        classes: Numbers of their labels, int64, shape (M,).
        identifiers: int64, ascending, shape (M,).
        next_identifier: Identifier of the next point that is added: no identifier is given twice.
        below: Unit vectors of the frozen encoder below a head, shape (M, F); ``None`` without a head.
    """

    directions: Tensor
    classes: Tensor
    identifiers: NDArray[np.int64]
    next_identifier: int
    below: Tensor | None


@dataclass(frozen=True, eq=False)
class RetrieverState:
    """Points that are searched, held-out queries, and the limits that follow from both.

    Methods take an ``index``, which is not part of the state: it is searched in place of the gallery, and its hits are
    checked against the gallery's directions; ``None`` searches the gallery.

    Attributes:
        rates: Error rates that the user allows.
        labels: Labels of the classes 0, 1 and so on.
        gallery: The points.
        held: N held-out queries, without duplicates.
        truth: Numbers of their classes, int64, shape (N,).
        feedback: Queries that were answered, and the numbers of their classes; ``None`` without any. They can lower the
            limit that the held-out queries give, never raise it.
        ceiling: The smallest limit on the score of an answer under which feedback was collected; beyond it the feedback
            is incomplete. Infinite without feedback, and after a change of the points or the held-out queries, which
            change the score itself.
        unseen: What sets the limit of ``false_matches``: queries of classes that the encoder was not trained on, and
            the numbers of their classes, or the ranks of such queries; ``None`` for classes taken out of the gallery.
        rule: The limits that decide between answer, unsure and unknown.
        posterior: What embeds inputs, held by nothing else; ``None`` if they are embeddings.
    """

    rates: Rates
    labels: tuple[Hashable, ...]
    gallery: Gallery
    held: Embedded
    truth: Tensor
    feedback: tuple[Embedded, Tensor] | None
    ceiling: float
    unseen: tuple[Embedded, Tensor] | Ranks | None
    rule: Rule
    posterior: ContrastiveLaplace | None = field(default=None, metadata=NOT_SAVED)

    @classmethod
    def fitted(
        cls,
        rates: Rates,
        posterior: ContrastiveLaplace | None,
        points: Embedded,
        names: Names,
        held: Embedded,
        held_names: Names,
        index: Index | None,
        unseen: tuple[Embedded, Names] | Ranks | None = None,
    ) -> RetrieverState:
        """Return the state of a gallery, of held-out queries and of queries of new classes, all with labels."""
        labels, truth = coded((), held_names)
        labels, classes = coded(labels, names)
        rows = held.distinct(truth)
        if len(rows) < 2:
            raise InputError("held_out", "at least two queries", f"{len(rows)}")
        gallery = Gallery(points.directions, classes, np.arange(len(points)), len(points), points.below)
        new_classes: Any = unseen
        if unseen is not None and not isinstance(unseen, Ranks):
            labels, of = coded(labels, unseen[1])
            distinct = unseen[0].distinct(of)
            new_classes = unseen[0][distinct], of[distinct]
        no_rule: Any = None
        new = cls(rates, labels, gallery, held[rows], truth[rows], None, math.inf, new_classes, no_rule, posterior)
        return new._certified(index)

    def added(self, points: Embedded, names: Names, index: Index | None) -> RetrieverState:
        """Return the state with more points, which get the next identifiers."""
        now, (labels, classes) = self.gallery, coded(self.labels, names)
        following = now.next_identifier + len(points)
        gallery = Gallery(
            torch.cat([now.directions, points.directions]),
            torch.cat([now.classes, classes]),
            np.concatenate([now.identifiers, np.arange(now.next_identifier, following)]),
            following,
            joined([now.below, points.below]),
        )
        return self._certified(index, labels=labels, gallery=gallery)

    def removed(self, identifiers: Any, index: Index | None) -> RetrieverState:
        """Return the state without the points with these identifiers, whole numbers."""
        now, gone = self.gallery, np.asarray(identifiers.cpu() if isinstance(identifiers, Tensor) else identifiers)
        if gone.size and gone.dtype.kind not in "iu":
            hint = "numpy.flatnonzero(mask) numbers the points of a mask, as long as none was removed."
            raise InputTypeError("identifiers", "whole numbers", f"{gone.dtype}", hint)
        missing = np.setdiff1d(gone, now.identifiers)
        if len(missing):
            raise InputError("identifiers", "those of points in the gallery", f"{missing[:NAMED].tolist()}")
        keep = ~np.isin(now.identifiers, gone)
        if not keep.any():
            raise InputError("identifiers", "some of the points", "all", "Fit again, with another gallery.")
        rows = torch.from_numpy(keep)
        at = rows.to(now.directions.device)
        below = None if now.below is None else now.below[at]
        gallery = Gallery(now.directions[at], now.classes[rows], now.identifiers[keep], now.next_identifier, below)
        return self._certified(index, gallery=gallery)

    def learned(
        self, queries: Embedded, names: Names, asked: Literal["random", "answered"], index: Index | None
    ) -> RetrieverState:
        """Return the state that knows more queries with labels, chosen as :meth:`.Retriever.learn` says."""
        validate.choice("asked", asked, ("random", "answered"))
        labels, truth = coded(self.labels, names)
        if asked == "random":
            held, truth = Embedded.cat([self.held, queries]), torch.cat([self.truth, truth])
            rows = held.distinct(truth)
            return self._certified(index, labels=labels, held=held[rows], truth=truth[rows])
        kept = np.flatnonzero(self.rule.decision(self.searched(queries, index)[0]) == "answer")
        if not len(kept):
            return self
        queries, truth = queries[kept], truth[kept]
        if self.feedback is not None:
            queries, truth = Embedded.cat([self.feedback[0], queries]), torch.cat([self.feedback[1], truth])
        ceiling = min(self.ceiling, self.rule.limit)
        return self._certified(index, labels=labels, feedback=(queries, truth), ceiling=ceiling)

    def answers(self, queries: Embedded, index: Index | None) -> Answers:
        """Answer queries."""
        found, match = self.searched(queries, index)
        return Answers(
            self.rule.decision(found),
            as_array([self.labels[code] for code in self.gallery.classes[match].tolist()]),
            self.gallery.identifiers[match],
            np.exp(-np.logaddexp(0, self.rule.right(found.evidence))),
            self.rule.p_value(found.novelty),
        )

    def searched(
        self, queries: Embedded, index: Index | None, without: Tensor | None = None
    ) -> tuple[Searched, NDArray[np.int64]]:
        """Search, with one class a query taken out of the gallery (:func:`.evidence`), and return the matches too."""
        now = self.gallery
        search = None if index is None else partial(nearest, index, now.directions, now.identifiers)
        columns, match = evidence(queries, now.directions, now.classes, without, search)
        novelty = np.exp(columns[:, 1]) if self.posterior is None else queries.novelty
        right, of = np.full(len(match), False), np.full(len(match), -1)
        if now.below is None or queries.below is None or self.rates.false_matches is None:
            return Searched(columns, novelty, right, of), match
        # The index of the user holds no outputs below the head: these are searched one by one.
        below, nearest_below = evidence(Embedded.alone(queries.below), now.below, now.classes, without)
        same = (now.classes[nearest_below] == now.classes[match]).numpy()
        return Searched(columns, novelty, right, of, below, same), match

    def compared(self, queries: Embedded, truth: Tensor, index: Index | None) -> tuple[Searched, Searched]:
        """Search with labelled queries in the gallery, and in the gallery without their class."""
        found, match = self.searched(queries, index)
        right = (self.gallery.classes[match] == truth).numpy()
        absent = self.searched(queries, index, truth)[0]
        # A query without its class is as novel as with it.
        of = truth.numpy()
        return replace(found, right=right, classes=of), replace(absent, novelty=found.novelty, classes=of)

    @property
    def uncovered(self) -> list[Hashable]:
        """Labels of the gallery without a held-out query."""
        covered = set(self.truth.tolist())
        return [self.labels[code] for code in self.gallery.classes.unique().tolist() if code not in covered]

    def to(self, device: torch.device) -> RetrieverState:
        """Return the state with all directions on a device."""
        points, held, feedback = self.gallery, self.held.to(device), self.feedback
        below = None if points.below is None else points.below.to(device)
        gallery = points._replace(directions=points.directions.to(device), below=below)
        fed = None if feedback is None else (feedback[0].to(device), feedback[1])
        unseen = self.unseen
        if unseen is not None and not isinstance(unseen, Ranks):
            unseen = unseen[0].to(device), unseen[1]
        return replace(self, gallery=gallery, held=held, feedback=fed, unseen=unseen)

    def _certified(self, index: Index | None, **parts: Any) -> RetrieverState:
        """Return the state with other parts, and with the limits that follow from them."""
        # With other points or held-out queries comes another score, for which the earlier ceiling means nothing.
        new = replace(self, **{"ceiling": math.inf, **parts})
        feedback = None if new.feedback is None else new.compared(*new.feedback, index)[0]
        held, absent = new.compared(new.held, new.truth, index)
        unseen: Any = new.unseen
        if unseen is not None and not isinstance(unseen, Ranks):
            # Their class is taken out if it has been added since.
            queries, truth = unseen
            unseen = new.compared(queries, truth, index)[1]
        return replace(new, rule=certified(new.rates, held, absent, feedback, new.ceiling, unseen))


def coded(labels: tuple[Hashable, ...], names: Names) -> tuple[tuple[Hashable, ...], Tensor]:
    """Return labels with the new ones among N names, and the number of each name, int64, shape (N,)."""
    known = {name: code for code, name in enumerate(labels)}
    codes = torch.tensor([known.setdefault(name, len(known)) for name in names], dtype=torch.int64, device="cpu")
    return tuple(known), codes

"""Which pairs of points are positive, which negative, and how often each is listed.

A relation is symmetric: it speaks of unordered pairs ``{i, j}``, ``i != j``. A point paired with itself has distance
zero whatever the encoder does; such pairs are left out of every count. This file knows nothing of embeddings, margins
or weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from contrastive_curvature.arguments import check_dense
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = [
    "BLOCK_ELEMENTS",
    "CallableRelation",
    "LabelRelation",
    "MaskRelation",
    "Relation",
    "RelationFunction",
    "TargetRelation",
    "check_labels",
    "make_target_relation",
]

RelationFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

BLOCK_ELEMENTS = 2**22
"""Size that a streamed block of pairs may have: large enough to hide Python, small enough for any machine."""


class Relation(ABC):
    """A symmetric relation on ``n`` points.

    Attributes:
        n: Number of points.
        device: Where the relation lives.
    """

    n: int
    device: torch.device

    @abstractmethod
    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """How often each pair of points ``start..stop`` with every point is listed.

        Args:
            start: First point.
            stop: One past the last point.

        Returns:
            Positive and negative multiplicities, each (stop - start, n) of an integer or boolean type, zero where a
            point meets itself.
        """

    def row_blocks(self, width: int = 1) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Stream all rows in blocks of bounded size, where every pair takes ``width`` numbers."""
        step = max(1, BLOCK_ELEMENTS // max(1, self.n * width))
        for start in range(0, self.n, step):
            stop = min(start + step, self.n)
            yield slice(start, stop), *self.rows(start, stop)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Number of positive and of negative listings at every point, each (n,) int64."""
        positive = torch.zeros(self.n, dtype=torch.int64, device=self.device)
        negative = torch.zeros_like(positive)
        for rows, pos, neg in self.row_blocks():
            positive[rows] = pos.sum(1)
            negative[rows] = neg.sum(1)
        return positive, negative


class TargetRelation(Relation):
    """A relation that follows from a target per point, so that points from outside can be held against it.

    Attributes:
        targets: One entry a point, shape (n, ...).
    """

    targets: Tensor

    @abstractmethod
    def relate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Relate any points to any others; a point that occurs on both sides meets itself.

        Args:
            a: Targets of A points, shape (A, ...).
            b: Targets of B points, shape (B, ...).

        Returns:
            Boolean positives and negatives, each (A, B).
        """

    @abstractmethod
    def self_relation(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Relate every given point to itself: boolean positives and negatives, each (B,)."""

    @abstractmethod
    def of(self, targets: Tensor) -> TargetRelation:
        """The same relation between other points, by their targets, shape (B, ...)."""

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.rows`."""
        positive, negative = self.relate(self.targets[start:stop], self.targets)
        here = torch.arange(start, stop, device=self.device)
        positive[here - start, here] = False
        negative[here - start, here] = False
        return positive, negative


class LabelRelation(TargetRelation):
    """Positive: the same class label. Negative: another label (paper, Eq. 14-15).

    Args:
        labels: Integer class labels, shape (n,).
    """

    def __init__(self, labels: Tensor) -> None:
        self.targets = labels
        self.n = labels.shape[0]
        self.device = labels.device

    def relate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`TargetRelation.relate`."""
        same = a.unsqueeze(1) == b.unsqueeze(0)
        return same, ~same

    def self_relation(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`TargetRelation.self_relation`."""
        same = torch.ones(targets.shape[0], dtype=torch.bool, device=self.device)
        return same, ~same

    def of(self, targets: Tensor) -> LabelRelation:
        """See :meth:`TargetRelation.of`."""
        return LabelRelation(targets)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Closed form: class sizes."""
        _, inverse, sizes = self.targets.unique(return_inverse=True, return_counts=True)
        own = sizes[inverse]
        return own - 1, self.n - own


class CallableRelation(TargetRelation):
    """A relation computed from targets, such as positions in metres for place recognition.

    Args:
        targets: One entry a point, shape (n, ...).
        function: ``function(a, b)`` with targets (A, ...) and (B, ...) returns boolean positives and negatives, each
            (A, B); it must be symmetric.

    Raises:
        InputError: What the function returns has a wrong type or shape, overlaps or is not symmetric; checked on the
            first block and whenever a block is made.
    """

    def __init__(self, targets: Tensor, function: RelationFunction) -> None:
        self.targets = targets
        self.function = function
        self.n = targets.shape[0]
        self.device = targets.device
        probe = targets[: min(self.n, 256)]
        for name, mask in zip(("positives", "negatives"), self.relate(probe, probe), strict=True):
            if not torch.equal(mask, mask.T):
                raise InputError(expected("pairs", "a symmetric relation", f"a callable with asymmetric {name}"))

    def of(self, targets: Tensor) -> CallableRelation:
        """See :meth:`TargetRelation.of`."""
        return CallableRelation(targets, self.function)

    def self_relation(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`TargetRelation.self_relation`."""
        positive, negative = self.relate(targets, targets)
        return positive.diagonal(), negative.diagonal()

    def relate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`TargetRelation.relate`."""
        shape = (a.shape[0], b.shape[0])
        try:
            answer = self.function(a, b)
        except TypeError as error:
            came = f"one that raised TypeError ({error})"
            raise InputTypeError(expected("pairs", "a callable (targets_a, targets_b)", came)) from error
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise InputTypeError(
                expected("pairs", "a callable that returns (positives, negatives)", f"a {type(answer).__name__}")
            )
        for name, mask in zip(("positives", "negatives"), answer, strict=True):
            _check_mask(mask, shape, f"pairs (callable, {name})")
        _check_disjoint(*answer)
        return answer[0].clone(), answer[1].clone()


class MaskRelation(Relation):
    """A relation given as two boolean matrices; the diagonal is ignored.

    Args:
        positive: Shape (n, n), symmetric.
        negative: Shape (n, n), symmetric, disjoint from ``positive``.
        n: Number of points.

    Raises:
        InputError: Wrong shape, not symmetric, or a pair is both positive and negative.
    """

    def __init__(self, positive: Tensor, negative: Tensor, n: int) -> None:
        off_diagonal = ~torch.eye(n, dtype=torch.bool, device=positive.device)
        for name, mask in (("positive", positive), ("negative", negative)):
            _check_mask(mask, (n, n), f"pairs ({name} mask)")
            if not torch.equal(mask & off_diagonal, mask.T & off_diagonal):
                raise InputError(
                    expected(
                        f"pairs ({name} mask)",
                        "a symmetric mask, since a pair has no order",
                        "an asymmetric one",
                        "Use mask | mask.T, or index tuples to list pairs one by one.",
                    )
                )
        self._positive = positive & off_diagonal
        self._negative = negative & off_diagonal
        _check_disjoint(self._positive, self._negative)
        self.n = n
        self.device = positive.device

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.rows`."""
        return self._positive[start:stop], self._negative[start:stop]


def make_target_relation(
    targets: object, n: int, device: torch.device, function: RelationFunction | None = None
) -> TargetRelation:
    """Relate points by their targets.

    Args:
        targets: Class labels, shape (n,), or what ``function`` takes, shape (n, ...).
        n: Number of points.
        device: Where the relation lives.
        function: ``None`` for class labels, or a callable on targets that returns two boolean masks.

    Returns:
        The relation.

    Raises:
        InputTypeError: The targets are no tensor of the kind that is wanted, or the function is not callable.
        InputError: There is not one target a point, or the function's answer is malformed.
    """
    if function is None:
        return LabelRelation(check_labels(targets, n).to(device))
    if not callable(function):
        wanted = "a callable (targets_a, targets_b) -> (positives, negatives)"
        raise InputTypeError(expected("relation", wanted, f"a {type(function).__name__}"))
    if not isinstance(targets, Tensor) or targets.ndim == 0 or targets.shape[0] != n:
        came = f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise InputError(expected("labels", f"one target for each of the {n} embeddings", came))
    return CallableRelation(targets.to(device), function)


def check_labels(labels: object, n: int | None = None) -> Tensor:
    """Check class labels.

    Args:
        labels: Integer tensor of shape (N,).
        n: Number of embeddings that they must match, or ``None``.

    Returns:
        The labels.

    Raises:
        InputTypeError: Not an integer tensor.
        InputError: Not of shape (N,), or another N than the embeddings'.
    """
    if not isinstance(labels, Tensor):
        raise InputTypeError(expected("labels", "an integer tensor of shape (N,)", f"a {type(labels).__name__}"))
    if labels.is_floating_point() or labels.is_complex():
        raise InputTypeError(
            expected(
                "labels", "integer class labels", f"dtype {labels.dtype}", "Call .long() if they are whole numbers."
            )
        )
    check_dense("labels", labels)
    if labels.ndim != 1:
        raise InputError(expected("labels", "shape (N,)", f"shape {tuple(labels.shape)}"))
    if n is not None and labels.shape[0] != n:
        raise InputError(expected("labels", f"one label for each of the {n} embeddings", f"{labels.shape[0]} labels"))
    return labels.long()


def _check_mask(mask: object, shape: tuple[int, int], argument: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.layout != torch.strided:
        came = f"dtype {mask.dtype}, {mask.layout}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise InputTypeError(expected(argument, f"a boolean tensor of shape {shape}", came))
    if tuple(mask.shape) != shape:
        raise InputError(expected(argument, f"shape {shape}", f"shape {tuple(mask.shape)}"))


def _check_disjoint(positive: Tensor, negative: Tensor) -> None:
    both = int((positive & negative).sum())
    if both:
        raise InputError(
            expected("pairs", "each pair positive or negative or neither", f"{both} entries that are both")
        )

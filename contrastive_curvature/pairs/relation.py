"""Relations: how often each pair of points is listed as positive and as negative.

A relation is symmetric: its pairs are unordered, ``{i, j}``, ``i != j``. A point paired with itself has distance zero
for every encoder, so such pairs are never counted. Embeddings, margins and weights are not used here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError

RelationFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

BLOCK_ELEMENTS = 2**20
"""Largest number of entries in one block of pairs: large enough that Python's overhead is small, small enough for a
cache. With four times as many, a product with a Hessian takes 1.7 times as long."""


def chunks(n: int, step: int) -> Iterator[slice]:
    """Cut n rows into slices of ``step`` rows; a step below 1 counts as 1."""
    for start in range(0, n, max(1, step)):
        yield slice(start, min(start + max(1, step), n))


def row_ranges(rows: int, width: int, entries: int | None = None) -> Iterator[slice]:
    """Cut ``rows`` rows of ``width`` entries into ranges with a bounded number of entries each."""
    return chunks(rows, (entries or BLOCK_ELEMENTS) // max(1, width))


class Relation(ABC):
    """A symmetric relation on ``n`` points.

    Attributes:
        n: Number of points.
        device: Device of the relation's tensors.
    """

    n: int
    device: torch.device

    @abstractmethod
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Count how often each pair is listed, for points ``start..stop`` against the points ``columns``.

        Args:
            start: First point.
            stop: One past the last point.
            columns: The other points (C of them), a slice of step one; by default all.

        Returns:
            Positive and negative multiplicities, each (stop - start, C) of an integer or boolean type; zero for a point
            paired with itself.
        """

    def row_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Iterate over all rows, ``(rows, positive, negative)``, in blocks of bounded size."""
        for rows in row_ranges(self.n, self.n):
            yield rows, *self.rows(rows.start, rows.stop)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Count the positive and the negative pairs listed for every point, each (n,) int64."""
        positive = torch.zeros(self.n, dtype=torch.int64, device=self.device)
        negative = torch.zeros_like(positive)
        for rows, pos, neg in self.row_blocks():
            positive[rows] = pos.sum(1)
            negative[rows] = neg.sum(1)
        return positive, negative


class TargetRelation(Relation):
    """A relation computed from one target per point, so that it also relates points outside the data set.

    Attributes:
        targets: One entry per point, shape (n, ...).
    """

    targets: Tensor

    @abstractmethod
    def relate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Relate A points to B points; a point on both sides is also related to itself.

        Args:
            a: Targets of A points, shape (A, ...).
            b: Targets of B points, shape (B, ...).

        Returns:
            Boolean positives and negatives, each (A, B).
        """

    def counts_of(self, targets: Tensor) -> Tensor:
        """Count the positives and negatives of B of the n points, from their targets; shape (2, B)."""
        counts = [
            torch.stack([mask.sum(1) for mask in self.relate(targets[rows], self.targets)])
            for rows in row_ranges(len(targets), self.n)
        ]
        itself = torch.stack([mask.diagonal() for mask in self.relate(targets, targets)])
        return torch.cat(counts, dim=1) - itself.long()

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        positive, negative = self.relate(self.targets[start:stop], self.targets[columns])
        first, last, _ = columns.indices(self.n)
        itself = torch.arange(max(start, first), max(start, first, min(stop, last)), device=self.device)
        positive[itself - start, itself - first] = False
        negative[itself - start, itself - first] = False
        return positive, negative


class LabelRelation(TargetRelation):
    """Pairs of the same class label are positive, all others negative (paper, Eq. 14-15).

    Args:
        labels: Integer class labels, shape (n,).
    """

    def __init__(self, labels: Tensor) -> None:
        self.targets = labels
        self.n, self.device = labels.shape[0], labels.device

    def relate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether labels (A,) and (B,) are equal, and whether they differ, each (A, B)."""
        same = a.unsqueeze(1) == b.unsqueeze(0)
        return same, ~same

    def counts(self) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.counts`; computed from the sizes of the classes."""
        _, inverse, sizes = self.targets.unique(return_inverse=True, return_counts=True)
        own = sizes[inverse]
        return own - 1, self.n - own


class CallableRelation(TargetRelation):
    """A relation computed from targets, such as positions in metres for place recognition.

    Args:
        targets: One entry per point, shape (n, ...).
        function: ``function(a, b)`` with targets (A, ...) and (B, ...) returns boolean positives and negatives, each
            (A, B); it must be symmetric.

    Raises:
        InputError: The function returns masks of a wrong type or shape, masks that overlap, or masks that are not
            symmetric. Symmetry is checked for the first points only, everything else at every call.
    """

    def __init__(self, targets: Tensor, function: RelationFunction) -> None:
        self.targets, self.function = targets, function
        self.n, self.device = targets.shape[0], targets.device
        probe = targets[: min(self.n, 256)]
        for name, mask in zip(("positives", "negatives"), self.relate(probe, probe), strict=True):
            if not torch.equal(mask, mask.T):
                raise InputError("pairs", "a symmetric relation", f"a callable with asymmetric {name}")

    def relate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Call the function on targets (A, ...) and (B, ...), and check its two masks, each (A, B)."""
        masks = self.function(a, b)
        if not (isinstance(masks, tuple) and len(masks) == 2):
            wanted = "a callable that returns (positives, negatives)"
            raise InputTypeError("pairs", wanted, f"a {type(masks).__name__}")
        for name, mask in zip(("positives", "negatives"), masks, strict=True):
            _check_mask(mask, (len(a), len(b)), f"pairs (callable, {name})")
        _check_disjoint(*masks)
        return masks[0].clone(), masks[1].clone()


class HeldRelation(Relation):
    """A relation stored as two matrices with a zero diagonal: how often each pair of a batch is listed.

    Args:
        positive: Shape (n, n).
        negative: Shape (n, n).
    """

    def __init__(self, positive: Tensor, negative: Tensor) -> None:
        self.n, self.device = len(positive), positive.device
        self._positive, self._negative = positive, negative

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        return self._positive[start:stop, columns], self._negative[start:stop, columns]


class MaskRelation(HeldRelation):
    """A relation from two boolean matrices; the diagonal is ignored.

    Args:
        positive: Shape (n, n), symmetric.
        negative: Shape (n, n), symmetric, disjoint from ``positive``.
        n: Number of points.

    Raises:
        InputError: A shape is wrong, a mask is not symmetric, or a pair is both positive and negative.
    """

    def __init__(self, positive: Tensor, negative: Tensor, n: int) -> None:
        off_diagonal = ~torch.eye(n, dtype=torch.bool, device=positive.device)
        for name, mask in (("positive", positive), ("negative", negative)):
            _check_mask(mask, (n, n), f"pairs ({name} mask)")
            if not torch.equal(mask & off_diagonal, mask.T & off_diagonal):
                wanted, hint = "a symmetric mask, since a pair has no order", "Use mask | mask.T, or index tuples."
                raise InputError(f"pairs ({name} mask)", wanted, "an asymmetric one", hint)
        super().__init__(positive & off_diagonal, negative & off_diagonal)
        _check_disjoint(self._positive, self._negative)


def make_target_relation(
    targets: object, n: int, device: torch.device, function: RelationFunction | None = None
) -> TargetRelation:
    """Relate points by their targets.

    Args:
        targets: Class labels, shape (n,), or targets for ``function``, shape (n, ...).
        n: Number of points.
        device: Device of the relation's tensors.
        function: ``None`` for class labels, or a callable on targets that returns two boolean masks.

    Returns:
        The relation.

    Raises:
        InputTypeError: The targets have a wrong type, or the function is not callable.
        InputError: The number of targets is not ``n``, or the masks of the function are wrong.
    """
    if function is None:
        return LabelRelation(check_labels(targets, n).to(device))
    if not callable(function):
        wanted = "a callable (targets_a, targets_b) -> (positives, negatives)"
        raise InputTypeError("relation", wanted, f"a {type(function).__name__}")
    if not isinstance(targets, Tensor) or targets.ndim == 0 or targets.shape[0] != n:
        got = f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise InputError("labels", f"one target for each of the {n} embeddings", got)
    return CallableRelation(targets.to(device), function)


def check_labels(labels: object, n: int | None = None) -> Tensor:
    """Check class labels, integers of shape (N,) with N = ``n`` if passed, and return them as int64."""
    if not isinstance(labels, Tensor):
        raise InputTypeError("labels", "an integer tensor of shape (N,)", f"a {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex():
        hint = "Call .long() if they are whole numbers."
        raise InputTypeError("labels", "integer class labels", f"dtype {labels.dtype}", hint)
    validate.dense("labels", labels)
    if labels.ndim != 1:
        raise InputError("labels", "shape (N,)", f"shape {tuple(labels.shape)}")
    if n is not None and labels.shape[0] != n:
        raise InputError("labels", f"one label for each of the {n} embeddings", f"{labels.shape[0]} labels")
    return labels.long()


def _check_mask(mask: object, shape: tuple[int, int], argument: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.layout != torch.strided:
        got = f"dtype {mask.dtype}, {mask.layout}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise InputTypeError(argument, f"a boolean tensor of shape {shape}", got)
    if tuple(mask.shape) != shape:
        raise InputError(argument, f"shape {shape}", f"shape {tuple(mask.shape)}")


def _check_disjoint(positive: Tensor, negative: Tensor) -> None:
    both = int((positive & negative).sum())
    if both:
        wanted = "each pair positive or negative or neither"
        raise InputError("pairs", wanted, f"{both} entries that are both")

"""What the output Hessian needs of a loss: its derivatives in the cosines of N points, never held whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross_roots import CrossRoots
from contrastive_curvature.hessian.moments import Moments

__all__ = ["CosineDerivatives", "DatasetDerivatives", "NodeSums", "Totals"]

_CHUNK_ROWS = 2**16
"""Points that are held in float64 at once."""


@dataclass(frozen=True)
class Totals:
    """Sums over points from which a loss knows its value; those of batches add up.

    Args:
        degree: ``sum_i d_i``, float64.
        along: ``sum_i u_i . s_i``, float64.
        value: The loss itself, float64; zero for losses that know it from the two sums above.
    """

    degree: Tensor
    along: Tensor
    value: Tensor

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.degree + other.degree, self.along + other.along, self.value + other.value)


@dataclass(frozen=True)
class NodeSums:
    """Sums over the neighbours of every point, the point itself left out.

    Args:
        degree: ``d_i = sum_j y_ij``, shape (N,).
        neighbors: ``s_i = sum_j y_ij u_j``, shape (N, D).
        moments: ``M_i = sum_j c_ij u_j u_j^T`` and what couples the candidates of a point, see
            :mod:`contrastive_curvature.hessian.moments`; ``None`` where the second derivatives are zero.
        value: Half the loss of the pairs of these points, float64, see :class:`Totals`.
        counted: What these points add to the value of the loss, where that does not follow from the other sums.
    """

    degree: Tensor
    neighbors: Tensor
    moments: Moments | None
    value: Tensor
    counted: Totals | None = None

    def totals(self, u: Tensor) -> Totals:
        """What these points add to the value of the loss.

        Args:
            u: Their unit embeddings, shape (N, D).
        """
        if self.counted is not None:
            return self.counted
        # In float64 and in chunks: the loss is the small difference of the two sums.
        pairs = zip(u.split(_CHUNK_ROWS), self.neighbors.split(_CHUNK_ROWS), strict=True)
        zero = self.neighbors.new_zeros(()).double()
        along = sum(((a.double() * b.double()).sum() for a, b in pairs), start=zero)
        return Totals(self.degree.double().sum(), along, self.value)


class CosineDerivatives(ABC):
    """Derivatives of a loss in the cosines ``s_ij = u_i . u_j`` of N points.

    ``y_ij = -dL/ds_ij`` is the weight of the unordered pair {i, j}: positive where the pair attracts, negative where it
    repels. ``c_ij = d2L/ds_ij^2``. Both are symmetric with a zero diagonal.

    Attributes:
        n: Number N of points.
        u: Their unit embeddings, shape (N, D).
        anchors: Number of points whose comparisons the loss sums up; for a loss of pairs all points.
        skipped: Number of points that have nothing to be compared with, and are left out.
    """

    n: int
    u: Tensor
    skipped: int = 0

    @property
    def anchors(self) -> int:
        """See the class."""
        return self.n

    @abstractmethod
    def node_sums(self) -> NodeSums:
        """Sums over the neighbours of every point."""

    @abstractmethod
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Rows ``start..stop`` of ``y`` and of ``c``, each (stop - start, C); ``None`` where ``c`` is zero.

        Args:
            start: First row.
            stop: One past the last row.
            columns: Some of the columns (C of them), a slice of step one; by default all.
        """

    @abstractmethod
    def row_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Stream all rows in blocks of bounded size: ``(rows, y, c)``."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """``sum_j y_ij x_j`` for ``x`` of shape (N, C)."""

    @abstractmethod
    def second_matmul(self, t: Tensor) -> Tensor | None:
        """What the second derivatives add between a point and all others, before the projection on its tangent space.

        Args:
            t: Changes of the unit embeddings, tangent, shape (N, D, K).

        Returns:
            ``sum_j c_ij (u_i . t_jk) u_j`` and what couples the candidates of a point, shape (N, D, K); ``None`` where
            the second derivatives are zero.
        """

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """Squares that couple the candidates of a point, between some of the points and others.

        ``None`` for a loss of single pairs.
        """
        return None

    @abstractmethod
    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """Value of the loss, without a graph, and its non-negative version.

        Args:
            totals: Of all points, where the caller has them already.
        """

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """``y`` and ``c`` as matrices (N, N); for small N."""
        return self.rows(0, self.n) if self.n else (torch.zeros_like(self.u[:, :0]), None)


class DatasetDerivatives(CosineDerivatives):
    """The same where every point has a target by which it is recognised when it arrives again, in any order."""

    @abstractmethod
    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """Sums over the neighbours of points of this set.

        Args:
            u: Unit embeddings of B of the points, shape (B, D).
            targets: Their targets, shape (B, ...).
        """

    def estimates_for(self, u: Tensor, targets: Tensor) -> list[NodeSums]:
        """Independent estimates of :meth:`sums_for`, two of them where it is itself one, from halves of its sample.

        Args:
            u: See there.
            targets: See there.
        """
        del u, targets
        return []

    @abstractmethod
    def between(
        self, u_a: Tensor, targets_a: Tensor, u_b: Tensor, targets_b: Tensor, itself: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """``y`` and ``c``, each (A, B), between points of this set.

        Args:
            u_a: Unit embeddings, shape (A, D).
            targets_a: Their targets.
            u_b: Unit embeddings, shape (B, D).
            targets_b: Their targets.
            itself: Which pairs are of a point with itself, and so no pairs; boolean, shape (A, B).
        """

    @abstractmethod
    def places(self, u: Tensor, targets: Tensor) -> Tensor:
        """Which points of this set some are: of their target, the closest. Equal ones are as good as each other.

        Args:
            u: Unit embeddings, shape (B, D).
            targets: Their targets, shape (B, ...).

        Returns:
            Places among the N points, int64, shape (B,).
        """

    @abstractmethod
    def among(self, u: Tensor, targets: Tensor) -> CosineDerivatives:
        """Derivatives of some points of this set among themselves, which stand for the whole set.

        Args:
            u: Unit embeddings of B of the points, shape (B, D).
            targets: Their targets, shape (B, ...).
        """

    def class_weights(self) -> tuple[Tensor, Tensor] | None:
        """The class labels, shape (C,), and ``y`` between any two classes, shape (C, C), or (C,) if it is diagonal.

        ``None`` where the weight of a pair depends on more than the two classes.
        """
        return None

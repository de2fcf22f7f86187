"""Derivatives of a loss in the cosines of N points, for the output Hessian; the N x N matrices are never stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import waiting
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.hessian.cross import CrossRoots, RootSide
from contrastive_curvature.hessian.moments import Moments
from contrastive_curvature.pairs.relation import row_ranges

_CHUNK_ROWS = 2**16
"""Points that are held in float64 at once."""


@dataclass(frozen=True)
class Totals:
    """Sums over points that yield the value of a loss; the sums of batches add up.

    Args:
        degree: ``sum_i d_i``, float64.
        along: ``sum_i u_i . s_i`` for ``u`` of length one, float64.
        value: The loss itself, float64; zero for losses that follow from the two sums above.
    """

    degree: Tensor
    along: Tensor
    value: Tensor

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.degree + other.degree, self.along + other.along, self.value + other.value)


@dataclass(frozen=True)
class NodeSums:
    """Sums over the neighbours of every point, without the point itself.

    Args:
        degree: ``d_i = sum_j y_ij``, shape (N,).
        neighbors: ``s_i = sum_j y_ij u_j``, shape (N, D).
        moments: ``M_i = sum_j c_ij u_j u_j^T`` and the coupling of a point's candidates, see
            :mod:`contrastive_curvature.hessian.moments`; ``None`` where the second derivatives are zero.
        value: Half the loss of the pairs of these points, float64, see :class:`Totals`.
        counted: Part of these points in the loss's value, where it does not follow from the other sums.
    """

    degree: Tensor
    neighbors: Tensor
    moments: Moments | None
    value: Tensor
    counted: Totals | None = None

    def totals(self, u: Tensor) -> Totals:
        """Return the part of these points, with unit embeddings (N, D), in the value of the loss."""
        if self.counted is not None:
            return self.counted
        # In float64 and in chunks: the loss is the small difference of two sums. For close points the difference is
        # smaller than the rounding error in the length of u, so this error is removed.
        degree = self.degree.double()
        along = degree.sum()
        parts = (part.split(_CHUNK_ROWS) for part in (u, self.neighbors, degree))
        for a, b, d in zip(*parts, strict=True):
            wide = a.double()
            along = along + (wide * (b.double() - d.unsqueeze(1) * wide)).sum()
        return Totals(degree.sum(), along, self.value)

    def checked(self, loss: str, hint: str = "") -> NodeSums:
        """Return these sums if they are finite; the error names the loss and the points."""
        finite = self.degree.isfinite() & self.neighbors.isfinite().all(1)
        if self.moments is not None:
            finite &= self.moments.bound().isfinite()
        wanted = f"finite derivatives in {self.neighbors.dtype}"

        def error() -> UnrepresentableError:
            got = f"NaN or infinity at the points {(~finite).nonzero().flatten()[:5].tolist()}"
            return UnrepresentableError(loss, wanted, got, hint)

        waiting.require(finite.all(), error)
        return self


class CosineDerivatives(ABC):
    """Derivatives of a loss in the cosines ``s_ij = u_i . u_j`` of N points.

    ``y_ij = -dL/ds_ij`` is the weight of the unordered pair {i, j}: positive where the pair attracts, negative where it
    repels. ``c_ij = d2L/ds_ij^2``. Both are symmetric with a zero diagonal.

    Attributes:
        n: Number N of points.
        u: Unit embeddings of the points, shape (N, D).
        anchors: Number of points whose comparisons the loss sums; all points for a loss of pairs.
        skipped: Number of points that are left out because they have nothing to be compared with.
        couples: Whether points are compared with each other, so that there are cross terms.
    """

    couples: ClassVar[bool] = True

    n: int
    u: Tensor
    anchors: int | Tensor
    skipped: int | Tensor = 0

    @abstractmethod
    def node_sums(self) -> NodeSums:
        """Return the sums over the neighbours of every point."""

    @abstractmethod
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Return rows ``start..stop`` of ``y`` and of ``c``, each (stop - start, C); ``None`` for a zero ``c``.

        ``columns`` is a slice of step one.
        """

    def row_blocks(self, width: int = 1) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Stream all rows, ``(rows, y, c)``, in blocks of pairs for which the caller stores ``width`` numbers each."""
        for rows in row_ranges(self.n, self.n * width):
            yield rows, *self.rows(rows.start, rows.stop)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Return ``y`` and ``c`` as matrices (N, N); for small N."""
        return self.rows(0, self.n)

    def matmul(self, t: Tensor) -> Tensor:
        """Return how each point's gradient changes if all other points move, before the tangent projection.

        Args:
            t: Changes of the unit embeddings, tangent, shape (N, D, K).

        Returns:
            ``sum_j -y_ij t_jk + c_ij (u_i . t_jk) u_j`` and the coupling of a point's candidates, shape (N, D, K).
        """
        out = torch.zeros_like(t)
        for rows, y, c in self.row_blocks():
            out[rows] -= (y @ t.flatten(1)).view_as(t[rows])
            if c is not None:
                for k in range(t.shape[2]):
                    out[rows, :, k] += (c * (self.u[rows] @ t[..., k].T)) @ self.u
        return out

    def squares(self, points: slice) -> tuple[Tensor, RootSide] | None:
        """Return the signs (A,) of the squares that couple a point's candidates, and their vectors at ``points``.

        ``None`` for a loss of single pairs.
        """
        return None

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """Return :meth:`squares` between the points ``rows`` and ``columns``, slices of step one."""
        ends = [slice(*chosen.indices(self.n)[:2]) for chosen in (rows, columns)]
        left, right = (self.squares(end) for end in ends)
        if left is None or right is None:
            return None
        low, high = max(end.start for end in ends), min(end.stop for end in ends)
        same = torch.arange(low, max(low, high), device=self.u.device)
        return CrossRoots(left[0], left[1], right[1], same - ends[0].start, same - ends[1].start)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """Return the value of the loss, without a graph, and its non-negative version.

        Args:
            totals: Totals of all points, if the caller already has them.
        """
        value = (totals or self.node_sums().totals(self.u)).value.to(self.u.dtype)
        return value, value


class PartOfDerivatives(CosineDerivatives):
    """Derivatives of R of N points that move; the others remain candidates and do not move.

    So ``OutputHessian(z[points], PartOfDerivatives(whole, points, sums), distance,
    pd_fix)`` is the block of those points in ``OutputHessian(z, whole, distance, pd_fix)``, for the outputs of one of
    two encoders.

    Args:
        whole: Derivatives of all N points, which also determine ``anchors``, ``skipped`` and the loss's value.
        points: The R points that move, a slice of step one.
        sums: ``whole.node_sums()``.
    """

    def __init__(self, whole: CosineDerivatives, points: slice, sums: NodeSums) -> None:
        self.whole = whole
        self._start, self._stop, _ = points.indices(whole.n)
        self._sums = sums
        self.n = self._stop - self._start
        self.u = whole.u[points]
        self.anchors, self.skipped = whole.anchors, whole.skipped

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`; the neighbours are among all N points."""
        sums, rows = self._sums, slice(self._start, self._stop)
        moments = None if sums.moments is None else sums.moments[rows]
        return NodeSums(sums.degree[rows], sums.neighbors[rows], moments, sums.value)

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        return self.whole.rows(start + self._start, stop + self._start, self._placed(columns))

    def matmul(self, t: Tensor) -> Tensor:
        """See :meth:`CosineDerivatives.matmul`; the other points do not move."""
        padded = t.new_zeros(self.whole.n, *t.shape[1:])
        padded[self._start : self._stop] = t
        return self.whole.matmul(padded)[self._start : self._stop]

    @override
    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        return self.whole.roots(self._placed(rows), self._placed(columns))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """Return the value and the cost of all N points."""
        return self.whole.loss_and_cost()

    def _placed(self, part: slice) -> slice:
        """Convert a range of these points to a range of all points."""
        start, stop, _ = part.indices(self.n)
        return slice(start + self._start, stop + self._start)

"""A diagonal block of an output Hessian over some of its points: what those points know of each other.

The points are differentiated where the others stand still, as the outputs of one of two encoders are. So the others are
still candidates, and the blocks between the points and the others are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross_roots import CrossRoots
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS

__all__ = ["PartOfDerivatives"]


class PartOfDerivatives(CosineDerivatives):
    """Derivatives in the cosines of N points, of which R are differentiated.

    ``OutputHessian(z[points], PartOfDerivatives(whole, points), distance, pd_fix)`` is the block of those points in
    ``OutputHessian(z, whole, distance, pd_fix)``.

    Args:
        whole: Of all N points.
        points: Some of them, a slice of step one.
        sums: ``whole.node_sums()``, where the caller has it already.

    Attributes:
        anchors: Of all N points, like the following and :meth:`loss_and_cost`.
        skipped: See :class:`~contrastive_curvature.hessian.derivatives.CosineDerivatives`.
    """

    def __init__(self, whole: CosineDerivatives, points: slice, sums: NodeSums | None = None) -> None:
        self.whole = whole
        self._start, self._stop, _ = points.indices(whole.n)
        self._sums = sums
        self.n = self._stop - self._start
        self.u = whole.u[points]
        self.skipped = whole.skipped

    @property
    def anchors(self) -> int:
        """See the class."""
        return self.whole.anchors

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`; the neighbours are among all N points."""
        sums = self.whole.node_sums() if self._sums is None else self._sums
        mine = slice(self._start, self._stop)
        moments = None if sums.moments is None else sums.moments[mine]
        return NodeSums(sums.degree[mine], sums.neighbors[mine], moments, sums.value)

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`."""
        return self.whole.rows(start + self._start, stop + self._start, self._placed(columns))

    def row_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """See :meth:`CosineDerivatives.row_blocks`."""
        step = max(1, BLOCK_ELEMENTS // max(1, self.n))
        for start in range(0, self.n, step):
            stop = min(start + step, self.n)
            yield slice(start, stop), *self.rows(start, stop)

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`CosineDerivatives.matmul`."""
        blocks = [y @ x for _, y, _ in self.row_blocks()]
        return torch.cat(blocks) if blocks else torch.zeros_like(x)

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """See :meth:`CosineDerivatives.second_matmul`; the other points stand still."""
        padded = t.new_zeros(self.whole.n, *t.shape[1:])
        padded[self._start : self._stop] = t
        out = self.whole.second_matmul(padded)
        return None if out is None else out[self._start : self._stop]

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """See :meth:`CosineDerivatives.roots`."""
        return self.whole.roots(self._placed(rows), self._placed(columns))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`: those of all N points."""
        return self.whole.loss_and_cost(totals)

    def _placed(self, part: slice) -> slice:
        """A range of these points, among all."""
        start, stop, _ = part.indices(self.n)
        return slice(start + self._start, stop + self._start)

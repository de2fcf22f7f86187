"""What a sample of the negatives does not give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.cross_roots import CrossRoots
from contrastive_curvature.hessian.derivatives import CosineDerivatives, DatasetDerivatives

__all__ = ["UncoupledDerivatives", "refuse_sampled"]


class UncoupledDerivatives(DatasetDerivatives):
    """Derivatives of a data set that give the blocks of single points only; the rest is refused."""

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Refused, as is all that couples two points."""
        _refuse_pairs()

    def row_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def matmul(self, x: Tensor) -> Tensor:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def between(
        self, u_a: Tensor, targets_a: Tensor, u_b: Tensor, targets_b: Tensor, itself: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def places(self, u: Tensor, targets: Tensor) -> Tensor:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def among(self, u: Tensor, targets: Tensor) -> CosineDerivatives:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()


def refuse_sampled(why: str) -> NoReturn:
    """Refuse to sample negatives.

    Args:
        why: What stands against it, a clause.

    Raises:
        UnsupportedError: Always; the message says what to use instead.
    """
    msg = (
        f"negative_samples: {why}. Use pd_fix='psd_parts', 'psd', 'fixed' or 'ggn_fixed' with a loss whose statistics "
        "are few, or negative_samples=None, which takes all negatives."
    )
    raise UnsupportedError(msg)


def _refuse_pairs() -> NoReturn:
    refuse_sampled("blocks between two points are asked for, which a sample of the negatives does not give")

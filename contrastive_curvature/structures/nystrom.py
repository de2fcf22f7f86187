"""The leading eigenvectors of a positive semidefinite matrix from its sketch, with an isotropic rest.

This is the single-pass Nystrom approximation (Tropp, Yurtsever, Udell and Cevher, 2017, "Fixed-rank approximation of a
positive semidefinite matrix from streaming data", algorithm 3) with the stabilising shift, in float64. The rest of the
trace is spread evenly over the orthogonal complement, the maximum-likelihood estimate of probabilistic principal
component analysis (Tipping and Bishop, 1999).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.network.last_layer import EXACT_WIDTH, MOST_RANK, sketch_matrix
from contrastive_curvature.structures.finite import eigenpairs

LEFT_OVER = 0.01
"""What the chosen rank may leave to the rest, as a fraction of what the first eigenvector leaves of the trace."""

_ATTEMPTS = 8


class LowRankMoment(NamedTuple):
    """``Q diag(l) Q^T + rho (I - Q Q^T)``.

    Attributes:
        vectors: ``Q``, orthonormal columns, shape (F, R), of the dtype of the sketch.
        values: ``l``, not negative, in descending order, shape (R,), float64.
        rest: ``rho``, not negative, shape (), float64; zero at full rank.
    """

    vectors: Tensor
    values: Tensor
    rest: Tensor

    def dense(self) -> Tensor:
        """Return the matrix, shape (F, F)."""
        q, rest = self.vectors, self.rest.to(self.vectors)
        return (q * (self.values.to(q) - rest)) @ q.T + rest * torch.eye(len(q), dtype=q.dtype, device=q.device)


def choose_rank(values: Tensor, trace: Tensor) -> int:
    """Return the smallest rank whose rest is at most LEFT_OVER of the trace without the first eigenvalue.

    The rank is at most MOST_RANK. The first eigenvalue does not count, because the mean of the features, or one large
    feature, may contribute almost the whole trace and hide the other eigenvalues.
    """
    left = trace - values[:MOST_RANK].cumsum(0)
    return min(len(left), 1 + int((left > LEFT_OVER * left[0]).sum()))


def low_rank_moment(sketch: Tensor, trace: Tensor, rank: int | None) -> LowRankMoment:
    """Recover a matrix from its sketch (:func:`.sketch_moment`)."""
    width, size = sketch.shape
    total = trace.double().squeeze()
    basis, turn, values = _whole(sketch) if size == width else _nystrom(sketch)
    values = values.clamp(min=0)
    if rank is None:
        rank = width if width <= EXACT_WIDTH else choose_rank(values, total)
    rank = min(rank, width)
    values = values[:rank]
    # Only the kept columns are computed.
    vectors = basis[:, :rank] if turn is None else basis @ turn[:, :rank]
    rest = (total - values.sum()).clamp(min=0) / max(1, width - rank) if rank < width else torch.zeros_like(total)
    return LowRankMoment(vectors.to(sketch.dtype).contiguous(), values, rest)


def _whole(matrix: Tensor) -> tuple[Tensor, None, Tensor]:
    """Return eigenvectors (F, F) and eigenvalues (F,) in descending order, in the form of :func:`_nystrom`."""
    values, vectors = eigenpairs(matrix.double())
    return vectors.flip(1), None, values.flip(0)


def _nystrom(sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Nystrom approximation: eigenvectors ``basis @ turn`` (F, S), eigenvalues (S,), descending."""
    if not bool(sketch.isfinite().all()):
        raise InputError("curvature", "finite numbers", "NaN or infinity")
    width, size = sketch.shape
    # The test matrix with the same rounding as in the sketch.
    omega = sketch_matrix(width, size, sketch.dtype, sketch.device).double()
    wide = sketch.double()
    scale = wide.norm()
    wide = wide / scale if bool(scale > 0) else wide
    shift = width**0.5 * torch.finfo(sketch.dtype).eps
    for _ in range(_ATTEMPTS):
        moved = wide + shift * omega
        core = omega.T @ moved
        factor, failed = torch.linalg.cholesky_ex((core + core.T) / 2, upper=True)
        if not int(failed):
            basis, turn, values = (_by_qr if sketch.dtype == torch.float64 else _by_gram)(moved, factor)
            return basis, turn, scale * (values - shift).clamp(min=0)
        shift *= 10
    got = f"a sketch of shape {tuple(sketch.shape)} that is not that of a positive semidefinite matrix"
    hint = "Scale the inputs, or use hessian_structure='diag', which needs no eigenvalues."
    raise InputError("curvature", "a matrix whose eigenvalues can be computed", got, hint)


def _by_qr(moved: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return left singular vectors ``basis @ turn`` and squared singular values of ``moved factor^-1``, descending."""
    half = torch.linalg.solve_triangular(factor, moved, upper=True, left=False)
    basis, small = torch.linalg.qr(half)
    turn, sigma, _ = torch.linalg.svd(small)
    return basis, turn, sigma.square()


def _by_gram(moved: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as :func:`_by_qr`, but only with matrix products, several times faster.

    It squares a condition number. This is harmless for sketches in float32: their shift, at least 1e-5, is a lower
    bound of the squared singular values, and the precision of float64 is 1e-16.
    """
    inner = torch.linalg.solve_triangular(factor.T, moved.T @ moved, upper=False)
    inner = torch.linalg.solve_triangular(factor, inner, upper=True, left=False)
    values, vectors = (part.flip(-1) for part in eigenpairs((inner + inner.T) / 2))
    # A guard against rounding; in exact arithmetic the smallest values are at least the shift.
    values = values.clamp(min=torch.finfo(values.dtype).eps * float(values[0]))
    return moved, torch.linalg.solve_triangular(factor, vectors, upper=True) / values.sqrt(), values

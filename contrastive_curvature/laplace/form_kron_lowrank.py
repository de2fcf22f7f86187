"""The form of a curvature whose input factor is a sketch: ``[[G, A Omega, trace], [G of the bias]]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.fit.finite import eigenpairs
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.fit.nystrom import low_rank_moment
from contrastive_curvature.laplace import effective
from contrastive_curvature.laplace.forms import CurvatureForm, merge_factors, warn_of_nothing
from contrastive_curvature.laplace.kron_lowrank_precision import KronLowRank
from contrastive_curvature.laplace.state_curvature import check_sketch
from contrastive_curvature.network.pullback import KronFactors
from contrastive_curvature.network.sketch import sketch_size

__all__ = ["KronLowRankForm"]


class KronLowRankForm(CurvatureForm):
    """Kronecker factors with a sketched input factor: they add part by part, and are decomposed afterwards."""

    def absorb(self, la: Any, result: DatasetCurvature, earlier: int) -> None:
        """See :meth:`CurvatureForm.absorb`."""
        factors = merge_factors(la.H_raw, earlier, result)
        decomposed = _decompose(factors, la.backend.options.rank)
        warn_of_nothing(decomposed.values)
        la.H_raw, la.H = factors, decomposed

    def diagonal(self, la: Any) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        curvature: KronLowRank = la.H
        return curvature.diag()

    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        curvature: KronLowRank = la.H
        _, values, rest = curvature.inputs
        of_weight, of_bias = prior.expand(2)
        spare = curvature.inputs.vectors.shape[0] - curvature.rank
        out = effective.of_eigenvalues([(torch.outer(curvature.values, values), of_weight)])
        out += spare * effective.of_eigenvalues([(curvature.values * rest, of_weight)])
        return out if curvature.bias is None else out + effective.of_eigenvalues([(curvature.bias[1], of_bias)])

    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """See :meth:`CurvatureForm.check`."""
        parameters = la._posterior_parameters()
        check_sketch(state, like, parameters, sketch_size(parameters[0].shape[1], la.backend.options.rank))

    def load(self, la: Any, state: Mapping[str, Any]) -> None:
        """See :meth:`CurvatureForm.load`."""
        factors = [list(group) for group in state["H_raw"]]
        la.H_raw, la.H = factors, _decompose(factors, la.backend.options.rank)


def _decompose(factors: KronFactors, rank: int | None) -> KronLowRank:
    """The clamped curvature.

    Args:
        factors: ``[G, sketch, trace]`` of the weight, and ``[G]`` of a bias.
        rank: Number of eigenvectors of the input factor, or ``None``.

    Raises:
        InputError: A factor is not finite, or cannot be decomposed.
    """
    (g, sketch, trace), *rest = factors
    values, vectors = _eigenpairs(g)
    bias = None
    if rest:
        of_bias = _eigenpairs(rest[0][0])
        bias = of_bias[1], of_bias[0]
    return KronLowRank(vectors, values, low_rank_moment(sketch, trace, rank), bias)


def _eigenpairs(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in float64, negative ones set to zero, and eigenvectors in the dtype of the factor."""
    values, vectors = eigenpairs(factor.double())
    return values.clamp(min=0), vectors.to(factor.dtype)

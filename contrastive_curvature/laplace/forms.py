"""The forms of a posterior's curvature: how two of one form add, what clamping leaves, and what is saved.

A posterior keeps the clamped curvature as ``H``, and the sum over the data that it was made from as ``H_raw``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from laplace.utils.matrix import KronDecomposed
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.finite import clamp_curvature, eigenpairs
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.fit.nystrom import low_rank_moment
from contrastive_curvature.laplace.kron_lowrank_precision import KronLowRank
from contrastive_curvature.laplace.prior import of_dense, of_eigenpairs, of_eigenvalues
from contrastive_curvature.network.pullback import KronFactors
from contrastive_curvature.network.sketch import sketch_size

Shapes = Any
"""Shapes of the tensors of a saved curvature, in its lists or by name; ``None`` for a length that may be any."""


class CurvatureForm:
    """A tensor that is added entry by entry; the base of all forms."""

    def merged(self, before: Any, earlier: int, result: DatasetCurvature) -> Any:
        """Return the sum of a curvature of ``earlier`` points and a new one, both unclamped."""
        return before + result.curvature

    def clamped(self, raw: Any) -> Any:
        """Return the positive semidefinite part.

        Raises:
            InputError: The curvature cannot be decomposed.
        """
        return clamp_curvature(raw)

    def diagonal(self, clamped: Any) -> Tensor:
        """Return the diagonal of the clamped curvature, without the likelihood factor, shape (P,)."""
        raise NotImplementedError

    def effective_parameters(self, clamped: Any, prior: Tensor, sizes: list[int]) -> float:
        """Return the effective number of parameters.

        Args:
            clamped: The curvature.
            prior: Prior precision at the temperature 1: one number, one a parameter tensor, or one a parameter.
            sizes: Numbers of entries of the parameter tensors.

        Raises:
            InputError: The precision is not positive definite, by rounding.
        """
        raise NotImplementedError

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """Return the shapes of a saved ``H`` and ``H_raw`` of parameters."""
        raise NotImplementedError

    def loaded(self, state: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return ``H_raw`` and ``H`` from what was saved."""
        return state["H_raw"], state["H"]


def _of_each(prior: Tensor, sizes: list[int]) -> Tensor:
    """Return a prior precision for each weight, shape (P,)."""
    if prior.numel() == len(sizes):
        return prior.reshape(-1).repeat_interleave(torch.tensor(sizes, device=prior.device))
    return prior.reshape(-1).expand(sum(sizes))


class DiagonalForm(CurvatureForm):
    """The diagonal, shape (P,)."""

    def diagonal(self, clamped: Tensor) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        return clamped

    def effective_parameters(self, clamped: Tensor, prior: Tensor, sizes: list[int]) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        return of_eigenvalues([(clamped, _of_each(prior, sizes))])

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """See :meth:`CurvatureForm.shapes`."""
        return (n_weights,), (n_weights,)


class DenseForm(CurvatureForm):
    """The matrix, shape (P, P)."""

    def diagonal(self, clamped: Tensor) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        return clamped.diagonal()

    def effective_parameters(self, clamped: Tensor, prior: Tensor, sizes: list[int]) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        return of_dense(clamped, _of_each(prior, sizes))

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """See :meth:`CurvatureForm.shapes`."""
        return (n_weights, n_weights), (n_weights, n_weights)


def decompose_factors(factors: KronFactors, damping: bool = False) -> KronDecomposed:
    """Decompose Kronecker factors, negative eigenvalues set to zero; laplace-torch's own ends the process on failure.

    Args:
        factors: ``[G, A]`` for every matrix, ``[block]`` for every vector.
        damping: As in laplace-torch.

    Raises:
        InputError: A factor is not finite, or its eigenvalues cannot be computed.
    """
    pairs = [[eigenpairs(factor) for factor in group] for group in factors]
    values = [[value.clamp(min=0) for value, _ in group] for group in pairs]
    vectors: list[list[Tensor]] = [[vector for _, vector in group] for group in pairs]
    return KronDecomposed(vectors, values, damping=damping)


class _FactorForm(CurvatureForm):
    """Kronecker factors: a group for each parameter, whose first factor is the curvature's and adds."""

    def merged(self, before: KronFactors, earlier: int, result: DatasetCurvature) -> KronFactors:
        """See :meth:`CurvatureForm.merged`."""
        # What follows the first factor of a group belongs to a mean over points.
        weight = result.n / (earlier + result.n)
        return [
            [a[0] + b[0], *(torch.lerp(old, new, weight) for old, new in zip(a[1:], b[1:], strict=True))]
            for a, b in zip(before, result.curvature, strict=True)
        ]

    def loaded(self, state: Mapping[str, Any]) -> tuple[KronFactors, Any]:
        """See :meth:`CurvatureForm.loaded`."""
        raw = [list(group) for group in state["H_raw"]]
        return raw, self.clamped(raw)


@dataclass(frozen=True)
class KroneckerForm(_FactorForm):
    """Kronecker factors that are clamped in their eigenbases.

    Attributes:
        damping: As in laplace-torch.
    """

    damping: bool

    def clamped(self, raw: KronFactors) -> KronDecomposed:
        """See :meth:`CurvatureForm.clamped`."""
        return decompose_factors(raw, self.damping)

    def diagonal(self, clamped: KronDecomposed) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        parts = []
        for group in zip(clamped.eigenvectors, clamped.eigenvalues, strict=True):
            of_factors = [(vectors.square() * values).sum(1) for vectors, values in zip(*group, strict=True)]
            parts.append(of_factors[0] if len(of_factors) == 1 else torch.outer(*of_factors).flatten())
        return torch.cat(parts)

    def effective_parameters(self, clamped: KronDecomposed, prior: Tensor, sizes: list[int]) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        groups = [values[0] if len(values) == 1 else torch.outer(*values) for values in clamped.eigenvalues]
        return of_eigenvalues(list(zip(groups, prior.expand(len(groups)), strict=True)))

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """See :meth:`CurvatureForm.shapes`."""
        groups = state["H"]
        if len(groups) != len(parameters):
            raise InputError(expected("state_dict['H']", f"factors of {len(parameters)} parameters", len(groups)))
        out = [[(n, n) for n in _factor_sizes(p, group)] for p, group in zip(parameters, groups, strict=True)]
        return out, out


def _factor_sizes(p: Tensor, group: Sequence[Any]) -> tuple[int, ...]:
    """Return the rows of the factors of a parameter: those of a layer, or any two with as many products as entries."""
    if len(group) == 1:
        return (p.numel(),)
    rows = len(group[0])
    return (rows, p.numel() // rows) if rows and p.numel() % rows == 0 else (len(p), p[0].numel())


@dataclass(frozen=True)
class KronLowRankForm(_FactorForm):
    """Kronecker factors with a sketched input factor, ``[[G, A Omega, trace], [G of the bias]]``.

    Attributes:
        rank: Number of eigenvectors of the input factor; ``None`` chooses it.
    """

    rank: int | None

    def clamped(self, raw: KronFactors) -> KronLowRank:
        """See :meth:`CurvatureForm.clamped`."""
        (g, sketch, trace), *rest = raw
        values, vectors = _clamped_eigenpairs(g)
        moment, bias = low_rank_moment(sketch, trace, self.rank), None
        if rest:
            of_bias, directions = _clamped_eigenpairs(rest[0][0])
            bias = directions, of_bias
        return KronLowRank(vectors, values, moment, bias)

    def diagonal(self, clamped: KronLowRank) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        return clamped.diag()

    def effective_parameters(self, clamped: KronLowRank, prior: Tensor, sizes: list[int]) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        _, values, rest = clamped.inputs
        of_weight, of_bias = prior.expand(2)
        spare = clamped.inputs.vectors.shape[0] - clamped.rank
        out = of_eigenvalues([(torch.outer(clamped.values, values), of_weight)])
        out += spare * of_eigenvalues([(clamped.values * rest, of_weight)])
        return out if clamped.bias is None else out + of_eigenvalues([(clamped.bias[1], of_bias)])

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """See :meth:`CurvatureForm.shapes`."""
        dim, width = parameters[0].shape
        out = [[(dim, dim), (width, sketch_size(width, self.rank)), (1,)], [(dim, dim)]][: len(parameters)]
        return out, out


def _clamped_eigenpairs(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in float64, negative ones set to zero, and eigenvectors in the dtype of the factor."""
    values, vectors = eigenpairs(factor.double())
    return values.clamp(min=0), vectors.to(factor.dtype)


class EigenpairForm(CurvatureForm):
    """Leading eigenvectors (P, R) and positive eigenvalues (R,); two of them do not add, and nothing raw is kept."""

    def clamped(self, raw: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """See :meth:`CurvatureForm.clamped`."""
        return raw

    def diagonal(self, clamped: tuple[Tensor, Tensor]) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        vectors, values = clamped
        return vectors.square() @ values

    def effective_parameters(self, clamped: tuple[Tensor, Tensor], prior: Tensor, sizes: list[int]) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        return of_eigenpairs(*clamped, _of_each(prior, sizes))

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """See :meth:`CurvatureForm.shapes`."""
        return [(n_weights, None), (None,)], None


@dataclass(frozen=True)
class KernelForm(CurvatureForm):
    """Some points, a root of their output Hessian, and the eigenpairs of ``A A^T``; two of them do not add.

    Attributes:
        n_params: Number of weights.
        n_subset: Number of points.
    """

    n_params: int
    n_subset: int

    def clamped(self, raw: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`CurvatureForm.clamped`."""
        return raw

    def diagonal(self, clamped: dict[str, Any]) -> Tensor:
        """Return the mean of the diagonal, shape (1,): the one prior precision needs no more."""
        return (clamped["values"].sum() / self.n_params).reshape(1)

    def effective_parameters(self, clamped: dict[str, Any], prior: Tensor, sizes: list[int]) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        # A^T A has the same eigenvalues, and zeros.
        return of_eigenvalues([(clamped["values"], prior)])

    def shapes(self, parameters: Sequence[Tensor], n_weights: int, state: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
        """See :meth:`CurvatureForm.shapes`."""
        dim, coupled = state["n_outputs"], state["H"]["coupled"]
        columns = len(state["H"]["values"])
        factor = (self.n_subset, dim, columns) if coupled else (self.n_subset, dim, dim)
        return {"factor": factor, "values": (columns,), "vectors": (columns, columns)}, None

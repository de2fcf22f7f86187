"""The forms of a posterior's curvature: how two of one form add, the diagonal, and what a saved one must be."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from laplace.utils import Kron
from torch import Tensor

from contrastive_curvature.fit.finite import clamp_curvature, clamp_factors
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.laplace import effective
from contrastive_curvature.laplace.decompose import decompose_factors
from contrastive_curvature.laplace.kernel import kernel_product
from contrastive_curvature.laplace.prediction import to_device
from contrastive_curvature.laplace.prior import NOTHING_POSITIVE
from contrastive_curvature.laplace.state_curvature import (
    check_dense,
    check_diagonal,
    check_eigenbasis,
    check_eigenpairs,
    check_factors,
    check_kernel,
)
from contrastive_curvature.laplace.state_values import check_takes, has_norms
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.pullback import KronFactors

__all__ = [
    "CurvatureForm",
    "DenseForm",
    "DiagonalForm",
    "EigenpairForm",
    "KernelForm",
    "KroneckerForm",
    "merge_factors",
    "warn_of_nothing",
]


class CurvatureForm(ABC):
    """What a Laplace class keeps as ``H``, and as the unclamped ``H_raw``."""

    @abstractmethod
    def absorb(self, la: Any, result: DatasetCurvature, earlier: int) -> None:
        """Set ``H_raw`` and the clamped ``H``.

        Args:
            la: The posterior.
            result: Unclamped curvature of ``result.n`` points.
            earlier: Number of points of ``la.H_raw``, to which the curvature is added; zero to replace it.

        Raises:
            InputError: The curvature cannot be decomposed. The posterior is as it was.
        """

    @abstractmethod
    def diagonal(self, la: Any) -> Tensor:
        """Diagonal of the clamped curvature, without the likelihood factor, shape (P,)."""

    @abstractmethod
    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """Effective number of parameters; see :mod:`contrastive_curvature.laplace.effective`.

        Args:
            la: The posterior.
            prior: Prior precision at the temperature 1: one number, one a parameter tensor, or one a parameter.

        Raises:
            InputError: The precision is not positive definite, by rounding.
        """

    @abstractmethod
    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """Check ``H`` and ``H_raw`` of a saved posterior.

        Args:
            la: The posterior that the state is loaded into.
            state: What the user passed.
            like: A parameter of the encoder, for dtype and device.

        Raises:
            InputError: Something in them is malformed.
        """

    def load(self, la: Any, state: Mapping[str, Any]) -> None:
        """Set ``H_raw`` and ``H`` from a state that :meth:`check` has accepted."""
        la.H_raw, la.H = state["H_raw"], state["H"]


def _of_each(la: Any, prior: Tensor) -> Tensor:
    """A prior precision for each weight, shape (P,)."""
    sizes = la._parameter_sizes()
    if prior.numel() == len(sizes):
        return prior.reshape(-1).repeat_interleave(torch.tensor(sizes, device=prior.device))
    return prior.reshape(-1).expand(sum(sizes))


class _Summed(CurvatureForm):
    """A tensor that is added entry by entry."""

    def absorb(self, la: Any, result: DatasetCurvature, earlier: int) -> None:
        """See :meth:`CurvatureForm.absorb`."""
        raw = la.H_raw + result.curvature if earlier else result.curvature
        clamped = clamp_curvature(raw)
        warn_of_nothing(clamped)
        la.H_raw, la.H = raw, clamped
        self.look(la, result)

    def look(self, la: Any, result: DatasetCurvature) -> None:
        """Warn of what is to be said of the new curvature; nothing here."""


def warn_of_nothing(clamped: Tensor) -> None:
    """Warn the caller of ``fit`` where nothing is left of a clamped curvature."""
    if bool((clamped == 0).all()):
        msg = f"The clamped curvature is zero everywhere: the posterior is the prior. {NOTHING_POSITIVE}"
        warnings.warn(msg, UserWarning, stacklevel=5)


class DiagonalForm(_Summed):
    """The diagonal, shape (P,)."""

    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        return effective.of_eigenvalues([(la.H, _of_each(la, prior))])

    def diagonal(self, la: Any) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        return la.H

    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """See :meth:`CurvatureForm.check`."""
        check_diagonal(state, like, la._n_weights())


class DenseForm(_Summed):
    """The matrix, shape (P, P)."""

    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        return effective.of_dense(la.H, _of_each(la, prior))

    def diagonal(self, la: Any) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        return la.H.diagonal()

    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """See :meth:`CurvatureForm.check`."""
        check_dense(state, like, la._n_weights())


def merge_factors(before: KronFactors, earlier: int, result: DatasetCurvature) -> KronFactors:
    """Kronecker factors of two data sets together.

    Args:
        before: Those of the first, not looked at where ``earlier`` is zero.
        earlier: Its number of points.
        result: The second.

    Returns:
        Curvature factors are summed; all that follows in a group belongs to a mean over points.
    """
    if not earlier:
        factors: KronFactors = result.curvature
        return factors
    weight = result.n / (earlier + result.n)
    return [
        [a[0] + b[0], *(torch.lerp(old, new, weight) for old, new in zip(a[1:], b[1:], strict=True))]
        for a, b in zip(before, result.curvature, strict=True)
    ]


class KroneckerForm(CurvatureForm):
    """Kronecker factors: they add factor by factor, and are clamped in their eigenbases."""

    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        groups = [values[0] if len(values) == 1 else torch.outer(*values) for values in la.H.eigenvalues]
        return effective.of_eigenvalues(list(zip(groups, prior.expand(len(groups)), strict=True)))

    def absorb(self, la: Any, result: DatasetCurvature, earlier: int) -> None:
        """See :meth:`CurvatureForm.absorb`."""
        factors = merge_factors(la.H_raw, earlier, result)
        decomposed = decompose_factors(factors, la.damping)
        # Of each group the first factor is the curvature's; those of inputs are not zero.
        warn_of_nothing(torch.cat([group[0] for group in decomposed.eigenvalues]))
        la.H_raw, la.H_facs, la.H = factors, Kron(factors), decomposed

    def diagonal(self, la: Any) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        return Kron(clamp_factors(la.H_raw)).diag()

    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """See :meth:`CurvatureForm.check`."""
        check_factors(state, like, la._posterior_parameters())

    def load(self, la: Any, state: Mapping[str, Any]) -> None:
        """See :meth:`CurvatureForm.load`."""
        factors = [list(group) for group in state["H"]]
        la.H_raw, la.H_facs, la.H = state["H_raw"], Kron(factors), decompose_factors(factors, la.damping)


class _Replaced(CurvatureForm):
    """A curvature that is computed whole: two of them do not add, and nothing unclamped is kept."""

    def absorb(self, la: Any, result: DatasetCurvature, earlier: int) -> None:
        """See :meth:`CurvatureForm.absorb`; there is no earlier one."""
        la.H_raw, la.H = None, result.curvature


class EigenpairForm(_Replaced):
    """Leading eigenvectors (P, R) and positive eigenvalues (R,)."""

    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """See :meth:`CurvatureForm.effective_parameters`."""
        vectors, values = la.H
        return effective.of_eigenpairs(vectors, values, _of_each(la, prior))

    def diagonal(self, la: Any) -> Tensor:
        """See :meth:`CurvatureForm.diagonal`."""
        vectors, values = la.H
        return vectors.square() @ values

    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """See :meth:`CurvatureForm.check`."""
        check_eigenpairs(state, like, la._n_weights())

    def load(self, la: Any, state: Mapping[str, Any]) -> None:
        """See :meth:`CurvatureForm.load`."""
        la.H_raw, la.H = None, tuple(state["H"])


class KernelForm(_Replaced):
    """Some points, a root of their output Hessian, and the eigenpairs of ``A A^T``."""

    def effective_parameters(self, la: Any, prior: Tensor) -> float:
        """See :meth:`CurvatureForm.effective_parameters`; ``A^T A`` has the same eigenvalues, and zeros."""
        return effective.of_eigenvalues([(la.H["values"], prior)])

    def diagonal(self, la: Any) -> Tensor:
        """The mean of the diagonal, shape (1,): the one prior precision needs no more."""
        return (la.H["values"].sum() / la.n_params).reshape(1)

    def check(self, la: Any, state: Mapping[str, Any], like: Tensor) -> None:
        """See :meth:`CurvatureForm.check`."""
        check_kernel(state, like, la.n_subset)
        parts = state["H"]
        with evaluation_mode(la.model), torch.no_grad():
            check_takes("H", parts["inputs"], state["n_outputs"], la.model, lambda x: to_device(la, x))
            if has_norms(la.model, state.get("encoder_norms")):
                # The object has no curvature of its own yet that could be asked; a refusal puts back what it had.
                la.H = parts
                check_eigenbasis(parts, lambda vector: kernel_product(la, vector))

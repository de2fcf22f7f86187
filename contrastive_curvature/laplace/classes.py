"""The contrastive Laplace classes: one for every combination of weights and structure that laplace-torch offers.

Each has a ``_key`` of its own. laplace-torch looks classes up by ``(subset_of_weights, hessian_structure)`` among all
subclasses; an inherited key would replace the host's class for every user of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, LowRankLaplace
from laplace.lllaplace import DiagLLLaplace, FullLLLaplace, KronLLLaplace
from laplace.subnetlaplace import DiagSubnetLaplace, FullSubnetLaplace
from laplace.utils import Kron
from torch import Tensor, nn

from contrastive_curvature.arguments import check_flag
from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.ggn.kron import clamp_factors
from contrastive_curvature.laplace.base import CONTRASTIVE, ContrastiveLaplace
from contrastive_curvature.laplace.checks import check_indices
from contrastive_curvature.laplace.covariance import (
    dense_last_layer_covariance,
    diag_last_layer_variance,
    kron_last_layer_covariance,
)
from contrastive_curvature.laplace.decompose import decompose_factors
from contrastive_curvature.laplace.dense import DensePosterior
from contrastive_curvature.laplace.last_layer import LastLayerLaplace
from contrastive_curvature.laplace.options import arguments_by_name
from contrastive_curvature.laplace.state_curvature import (
    check_dense,
    check_diagonal,
    check_eigenpairs,
    check_factors,
)
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.loader import check_model
from contrastive_curvature.options import Structure

__all__ = [
    "ContrastiveDiagLLLaplace",
    "ContrastiveDiagLaplace",
    "ContrastiveDiagSubnetLaplace",
    "ContrastiveFullLLLaplace",
    "ContrastiveFullLaplace",
    "ContrastiveFullSubnetLaplace",
    "ContrastiveKronLLLaplace",
    "ContrastiveKronLaplace",
    "ContrastiveLowRankLaplace",
    "LastLayerLaplace",
]


class ContrastiveDiagLaplace(ContrastiveLaplace, DiagLaplace):
    """All parameters, diagonal precision; exact diagonal of the generalised Gauss-Newton."""

    _key = ("all", "diag", CONTRASTIVE)
    structure = Structure.DIAG

    def _curvature_diagonal(self) -> Tensor:
        return self.H

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_diagonal(state, like, self.n_params)


class ContrastiveFullLaplace(ContrastiveLaplace, DensePosterior, FullLaplace):
    """All parameters, dense precision; exact generalised Gauss-Newton."""

    _key = ("all", "full", CONTRASTIVE)
    structure = Structure.FULL

    def _curvature_diagonal(self) -> Tensor:
        return self.H.diagonal()

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_dense(state, like, self.n_params)


class _KroneckerFactored(ContrastiveLaplace):
    """Curvature as Kronecker factors: they add up factor by factor, and are clamped in their eigenbases."""

    structure = Structure.KRON
    prior_structures = ("scalar", "layerwise")

    def _absorb(self, result: DatasetCurvature, earlier: int) -> None:
        factors = result.curvature
        if earlier:
            # Input factors are means over the data: old and new ones weigh by their numbers of points.
            share = result.n / (earlier + result.n)
            factors = [
                [a[0] + b[0], *(torch.lerp(old, new, share) for old, new in zip(a[1:], b[1:], strict=True))]
                for a, b in zip(self.H_raw, factors, strict=True)
            ]
        decomposed = decompose_factors(factors, self.damping)
        self.H_raw, self.H_facs, self.H = factors, Kron(factors), decomposed

    def _curvature_diagonal(self) -> Tensor:
        return Kron(clamp_factors(self.H_raw)).diag()

    def _factored(self) -> list[Tensor]:
        """The parameters that have factors, in their order."""
        return self.params

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_factors(state, like, self._factored())

    def _take_curvature(self, state: Mapping[str, Any]) -> None:
        factors = [list(group) for group in state["H"]]
        self.H_facs, self.H = Kron(factors), decompose_factors(factors, self.damping)


class ContrastiveKronLaplace(_KroneckerFactored, KronLaplace):
    """All parameters, Kronecker-factored precision (K-FAC); ``fixed`` and ``psd`` only."""

    _key = ("all", "kron", CONTRASTIVE)


class _LowRankHost(LowRankLaplace):
    """The host's low-rank algebra without its constructor, which asks for the package of a backend that is not used."""

    _key: tuple[str, ...] = ("all", "lowrank", CONTRASTIVE, "host")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(LowRankLaplace, self).__init__(*args, **kwargs)


class ContrastiveLowRankLaplace(ContrastiveLaplace, _LowRankHost):
    """All parameters, the leading eigenpairs of the generalised Gauss-Newton; every fix.

    ``backend_kwargs=dict(rank=...)`` says how many.
    """

    _key = ("all", "lowrank", CONTRASTIVE)
    structure = None  # type: ignore[assignment]
    takes_rank = True

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit; the loader must not shuffle, because Lanczos multiplies with the curvature many times.

        Raises:
            InputError: No data, one point, no positive pair, a shuffling loader, or no positive eigenvalue.
            UnsupportedError: ``override=False``: eigenpairs of two data sets do not add up.
        """
        check_flag("override", override)
        if not override:
            msg = "override=False: eigenpairs of two data sets do not add up. Use hessian_structure='diag' or 'kron'."
            raise UnsupportedError(msg)
        self._begin(train_loader)
        result = self.backend.fit_lowrank(train_loader, progress_bar)
        vectors, values = result.curvature
        if not values.numel():
            hint = "All negatives may lie inside the margin; use pd_fix='psd' or 'positive'."
            raise InputError(expected("train_loader", "data with a positive eigenvalue of the curvature", "none", hint))
        self.H = (vectors, values)
        self._remember(result.loss, float(result.cost), result.n)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` for weights (P,)."""
        self._check_value(value)
        (vectors, values), prior = self.posterior_precision
        delta = value - self.mean
        return (values * (vectors.T @ delta).square()).sum() + (prior * delta.square()).sum()

    def _curvature_diagonal(self) -> Tensor:
        vectors, values = self.H
        return vectors.square() @ values

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_eigenpairs(state, like, self.n_params)

    def _take_curvature(self, state: Mapping[str, Any]) -> None:
        self.H = tuple(state["H"])


class _Subnetwork(ContrastiveLaplace):
    """Chosen parameters; the host knows one prior precision for all of them, and one mean.

    Raises:
        InputError: ``subnetwork_indices`` are missing, no whole numbers, out of range or not different.
    """

    prior_structures = ("scalar",)

    def __init__(self, model: nn.Module, likelihood: str = CONTRASTIVE, *args: Any, **kwargs: Any) -> None:
        check_model(model)
        named = arguments_by_name(type(self), args, kwargs)
        n_params = sum(p.numel() for p in model.parameters() if p.requires_grad)
        named["subnetwork_indices"] = check_indices(named.get("subnetwork_indices"), n_params)
        super().__init__(model, likelihood, **named)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` for the chosen weights, shape (K,)."""
        self._check_value(value)
        delta, precision = value - self.mean_subnet, self.posterior_precision
        return delta @ (precision @ delta if precision.ndim == 2 else precision * delta)

    def _parameter_sizes(self) -> list[int]:
        return [self.n_params_subnet]

    def _n_weights(self) -> int:
        return self.n_params_subnet

    def _prior_mean_sizes(self) -> set[int]:
        return {1}


class ContrastiveDiagSubnetLaplace(_Subnetwork, DiagSubnetLaplace):
    """Chosen parameters, diagonal precision; exact."""

    _key = ("subnetwork", "diag", CONTRASTIVE)
    structure = Structure.DIAG

    def _curvature_diagonal(self) -> Tensor:
        return self.H

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_diagonal(state, like, self.n_params_subnet)


class ContrastiveFullSubnetLaplace(_Subnetwork, DensePosterior, FullSubnetLaplace):
    """Chosen parameters, dense precision; exact."""

    _key = ("subnetwork", "full", CONTRASTIVE)
    structure = Structure.FULL

    def _curvature_diagonal(self) -> Tensor:
        return self.H.diagonal()

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_dense(state, like, self.n_params_subnet)


class ContrastiveDiagLLLaplace(LastLayerLaplace, DiagLLLaplace):
    """Last linear layer, diagonal precision; curvature and prediction exact and in closed form."""

    _key = ("last_layer", "diag", CONTRASTIVE)
    structure = Structure.DIAG

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        return EmbeddingDistribution.trusted(
            z, variance=diag_last_layer_variance(phi, self.posterior_variance, z.shape[1])
        )

    def _curvature_diagonal(self) -> Tensor:
        return self.H

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_diagonal(state, like, self.n_params)


class ContrastiveKronLLLaplace(_KroneckerFactored, LastLayerLaplace, KronLLLaplace):
    """Last linear layer, Kronecker-factored precision (K-FAC); ``fixed`` and ``psd`` only."""

    _key = ("last_layer", "kron", CONTRASTIVE)

    def _factored(self) -> list[Tensor]:
        return list(self.model.last_layer.parameters())

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        covariance = kron_last_layer_covariance(phi, self.posterior_precision)
        if diagonal:
            return EmbeddingDistribution.trusted(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution.trusted(z, covariance=covariance)


class ContrastiveFullLLLaplace(LastLayerLaplace, DensePosterior, FullLLLaplace):
    """Last linear layer, dense precision; curvature and prediction exact and in closed form."""

    _key = ("last_layer", "full", CONTRASTIVE)
    structure = Structure.FULL

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        covariance = dense_last_layer_covariance(phi.double(), self.wide_covariance(), z.shape[1]).to(z.dtype)
        if diagonal:
            return EmbeddingDistribution.trusted(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution.trusted(z, covariance=covariance)

    def _curvature_diagonal(self) -> Tensor:
        return self.H.diagonal()

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_dense(state, like, self.n_params)

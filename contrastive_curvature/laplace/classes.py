"""The contrastive Laplace classes: one for every combination of weights and structure that laplace-torch offers.

Each has a ``_key`` of its own. laplace-torch looks classes up by ``(subset_of_weights, hessian_structure)`` among all
subclasses; an inherited key would replace the host's class for every user of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, LowRankLaplace
from laplace.lllaplace import DiagLLLaplace, FullLLLaplace, KronLLLaplace
from laplace.subnetlaplace import DiagSubnetLaplace, FullSubnetLaplace
from laplace.utils import Kron
from torch import Tensor, nn

from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.encoder import Inputs, evaluation_mode, flatten_parameters, slice_inputs
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.ggn.kron import clamp_factors
from contrastive_curvature.laplace.base import CONTRASTIVE, ContrastiveLaplace
from contrastive_curvature.laplace.covariance import (
    dense_last_layer_covariance,
    diag_last_layer_variance,
    kron_last_layer_covariance,
)
from contrastive_curvature.laplace.features import RawFeatureExtractor
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


class ContrastiveFullLaplace(ContrastiveLaplace, FullLaplace):
    """All parameters, dense precision; exact generalised Gauss-Newton."""

    _key = ("all", "full", CONTRASTIVE)
    structure = Structure.FULL

    def _curvature_diagonal(self) -> Tensor:
        return self.H.diagonal()


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
        kron = Kron(factors)
        # The decomposition sets negative eigenvalues to zero.
        decomposed = kron.decompose(damping=self.damping)
        self.H_raw, self.H_facs, self.H = factors, kron, decomposed

    def _curvature_diagonal(self) -> Tensor:
        return Kron(clamp_factors(self.H_raw)).diag()


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

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> None:
        """Fit; the loader must not shuffle, because Lanczos multiplies with the curvature many times.

        Raises:
            InputError: No data, one point, no positive pair, a shuffling loader, or no positive eigenvalue.
            UnsupportedError: ``override=False``: eigenpairs of two data sets do not add up.
        """
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

    def _curvature_diagonal(self) -> Tensor:
        vectors, values = self.H
        return vectors.square() @ values


class _Subnetwork(ContrastiveLaplace):
    """Chosen parameters; the host knows one prior precision for all of them."""

    prior_structures = ("scalar",)

    def _parameter_sizes(self) -> list[int]:
        return [self.n_params_subnet]


class ContrastiveDiagSubnetLaplace(_Subnetwork, DiagSubnetLaplace):
    """Chosen parameters, diagonal precision; exact."""

    _key = ("subnetwork", "diag", CONTRASTIVE)
    structure = Structure.DIAG

    def _curvature_diagonal(self) -> Tensor:
        return self.H


class ContrastiveFullSubnetLaplace(_Subnetwork, FullSubnetLaplace):
    """Chosen parameters, dense precision; exact."""

    _key = ("subnetwork", "full", CONTRASTIVE)
    structure = Structure.FULL

    def _curvature_diagonal(self) -> Tensor:
        return self.H.diagonal()


class LastLayerLaplace(ContrastiveLaplace):
    """The last linear layer: closed forms for curvature, prediction and samples."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        *args: Any,
        last_layer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, likelihood, *args, **kwargs)
        self._last_layer_name = last_layer_name
        self.model = RawFeatureExtractor(self.model.model, last_layer_name, self.enable_backprop)

    def _prepare(self, probe: Inputs) -> None:
        self._know_last_layer(probe)

    def _know_last_layer(self, probe: Inputs) -> None:
        if self.model.last_layer is not None:
            return
        self.model.analyse(probe)
        self.data = slice_inputs(probe, slice(0, 2))
        self.n_params = sum(self._parameter_sizes())
        self.n_layers = len(self._parameter_sizes())
        try:
            # The host defers these checks until the layer is known.
            self.prior_precision = self._prior_precision
            self.prior_mean = self._prior_mean
        except ValueError:
            self.model.forget()
            self.n_params = self.n_layers = None
            raise

    def _find_last_layer(self, data: Any) -> None:
        self._know_last_layer(self._moved(data))

    def _parameter_vector(self) -> Tensor:
        vector = flatten_parameters(self.model.last_layer.parameters())
        return vector if self.enable_backprop else vector.detach()

    def _parameter_sizes(self) -> list[int]:
        return [p.numel() for p in self.model.last_layer.parameters()]

    def _encoder_dim(self) -> int:
        return self.model.encoder.dim

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior precision of every parameter of the layer, shape (P,); also from one value a parameter tensor."""
        prior = self.prior_precision
        if len(prior) in (1, self.n_params):
            return prior.expand(self.n_params)
        return torch.cat([p.expand(size) for p, size in zip(prior, self._parameter_sizes(), strict=True)])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`ContrastiveLaplace.load_state_dict`."""
        if state_dict.get("data") is not None:
            self._find_last_layer(state_dict["data"])
        super().load_state_dict(state_dict)

    def _features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            return self.model.forward_with_features(self._moved(x))

    def _sampling_context(self, x: Inputs) -> Any:
        return self._features(x)[1]

    def _outputs_at(self, context: Any, theta: Tensor, linearized: bool) -> Tensor:
        """A linear layer is its own linearisation."""
        layer = self.model.last_layer
        weight = theta[:, : layer.weight.numel()].view(-1, *layer.weight.shape)
        out = torch.einsum("bf,sdf->sbd", context, weight)
        return out if layer.bias is None else out + theta[:, None, layer.weight.numel() :]


class ContrastiveDiagLLLaplace(LastLayerLaplace, DiagLLLaplace):
    """Last linear layer, diagonal precision; curvature and prediction exact and in closed form."""

    _key = ("last_layer", "diag", CONTRASTIVE)
    structure = Structure.DIAG

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        return EmbeddingDistribution(z, variance=diag_last_layer_variance(phi, self.posterior_variance, z.shape[1]))

    def _curvature_diagonal(self) -> Tensor:
        return self.H


class ContrastiveKronLLLaplace(_KroneckerFactored, LastLayerLaplace, KronLLLaplace):
    """Last linear layer, Kronecker-factored precision (K-FAC); ``fixed`` and ``psd`` only."""

    _key = ("last_layer", "kron", CONTRASTIVE)

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        covariance = kron_last_layer_covariance(phi, self.posterior_precision)
        if diagonal:
            return EmbeddingDistribution(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution(z, covariance=covariance)


class ContrastiveFullLLLaplace(LastLayerLaplace, FullLLLaplace):
    """Last linear layer, dense precision; curvature and prediction exact and in closed form."""

    _key = ("last_layer", "full", CONTRASTIVE)
    structure = Structure.FULL

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        covariance = dense_last_layer_covariance(phi, self.posterior_covariance, z.shape[1])
        if diagonal:
            return EmbeddingDistribution(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution(z, covariance=covariance)

    def _curvature_diagonal(self) -> Tensor:
        return self.H.diagonal()

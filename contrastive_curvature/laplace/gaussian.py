"""The Gaussian over the weights of an encoder, in the interface of laplace-torch.

A structure (:mod:`contrastive_curvature.structures`) holds the curvature. laplace-torch adds the marginal likelihood
and its optimisation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils import Kron as HostKron
from laplace.utils.matrix import KronDecomposed
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, NotFittedError, UnsupportedError
from contrastive_curvature.laplace.prior import check_prior
from contrastive_curvature.network.encoder import Encoder, at_least_float32, flatten_parameters
from contrastive_curvature.structures import Clamped, Structure
from contrastive_curvature.structures.base import of_each_weight
from contrastive_curvature.structures.kron import ClampedKron


class GaussianOverWeights(ParametricLaplace):
    """A Gaussian over some weights of an encoder: its precision is the curvature over the temperature, plus the prior.

    Attributes:
        structure: Structure of the curvature.
        curvature: The curvature, unclamped; ``None`` before ``fit``.
        clamped: Its positive semidefinite part, decomposed.
        prior_chosen: Whether the prior precision was set since the construction.
    """

    # None until the first batch shows the last layer.
    n_params: Any
    n_layers: Any
    n_data: int
    loss: Tensor | float
    model: Any
    subset_of_weights: str
    structure: type[Structure]
    curvature: Structure | None = None
    clamped: Clamped | None = None
    prior_chosen: bool
    _indices: Tensor | None = None
    _prior_precision: Any
    _prior_mean: Any

    @property
    def on_last_layer(self) -> bool:
        """Whether the posterior is over the last linear layer, which has closed forms."""
        return self.subset_of_weights == "last_layer"

    @property
    def H(self) -> Any:
        """Clamped curvature in laplace-torch's form: (P,), (P, P) or Kronecker factors; ``None`` before ``fit``.

        laplace-torch has no ``kron_lowrank``; for this structure it is the decomposition itself.
        """
        if isinstance(self.clamped, ClampedKron):
            return KronDecomposed(self.clamped.vectors, self.clamped.eigenvalues)
        return None if self.clamped is None else self.clamped.plain()

    @property
    def H_raw(self) -> Any:
        """The curvature before clamping: (P,), (P, P) or lists of factors; ``None`` before ``fit``."""
        return None if self.curvature is None else self.curvature.plain()

    @property
    def H_facs(self) -> HostKron:
        """Kronecker factors, unclamped, in laplace-torch's form."""
        return HostKron(self.H_raw)

    @property
    def posterior_precision(self) -> Any:
        """Posterior precision in laplace-torch's form: (P,), (P, P), or decomposed Kronecker factors."""
        clamped = self.require_clamped()
        if isinstance(clamped, ClampedKron):
            return self.H * self._H_factor + self.prior_precision
        return clamped.posterior_precision(*self._scales)

    @property
    def posterior_covariance(self) -> Tensor:
        """Covariance of the weights, shape (P, P)."""
        eye = torch.eye(self.n_weights, dtype=self._dtype, device=self._device)
        return self.require_clamped().covariance(eye, *self._scales)

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision of every weight, shape (P,)."""
        if self.n_params is None:
            # The first batch shows how many parameters there are.
            self.check_fitted()
        return of_each_weight(self.prior_precision, self.parameter_sizes())

    @property
    def log_det_ratio(self) -> Tensor:
        """Log determinant of the posterior precision minus that of the prior precision."""
        return self.require_clamped().log_det_ratio(*self._scales)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log determinant of the posterior precision."""
        return self.log_det_ratio + self.log_det_prior_precision

    @property
    def log_likelihood(self) -> Tensor:
        """Minus the loss, divided by the temperature."""
        self.check_fitted()
        return super().log_likelihood

    @property
    def scatter(self) -> Tensor:
        """Squared distance of the weights to the prior mean, weighted with the prior precision."""
        self.check_fitted()
        delta = self._chosen(self.mean) - self.prior_mean
        return (delta * self.prior_precision_diag) @ delta

    @property
    def rank(self) -> int:
        """Number of eigenvectors of the input factor that the structure ``kron_lowrank`` keeps.

        Raises:
            NotFittedError: Before ``fit``.
        """
        return int(self.require_clamped().rank)  # type: ignore[attr-defined]

    @property
    def n_params_subnet(self) -> int:
        """Number of chosen weights of a subnetwork."""
        return self.n_weights

    @property
    def mean_subnet(self) -> Tensor:
        """Mean of the chosen weights of a subnetwork, shape (K,)."""
        return self._chosen(self.mean)

    def _chosen(self, weights: Tensor) -> Tensor:
        """Select the posterior's weights from all trainable weights (..., P)."""
        return weights if self._indices is None else weights[..., self._indices]

    def require_clamped(self) -> Clamped:
        """Return the clamped curvature.

        Raises:
            NotFittedError: Before ``fit``.
        """
        self.check_fitted()
        assert self.clamped is not None
        return self.clamped

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights from the posterior.

        Args:
            n_samples: Number S of samples.
            generator: Source of randomness, on the encoder's device.

        Returns:
            Shape (S, P); for a subnetwork too, all trainable weights.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        self.check_sampling(n_samples, generator)
        like: dict[str, Any] = {"device": self._device, "dtype": self._dtype, "generator": generator}
        noise = torch.randn(n_samples, self.n_weights, **like)
        shift = self.require_clamped().sample(noise, *self._scales)
        if self._indices is None:
            return self.mean + shift
        weights = self.mean.repeat(n_samples, 1)
        weights[:, self._indices] += shift
        return weights

    def square_norm(self, value: Tensor) -> Tensor:
        """Return ``(value - mean)^T P (value - mean)`` with the posterior precision ``P``.

        Args:
            value: Weights, shape (P,); for a subnetwork the chosen weights.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` is malformed.
        """
        self.check_weights(value)
        return self.require_clamped().square_norm(value - self._chosen(self.mean), *self._scales)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log density of the posterior.

        Args:
            value: Weights, shape (P,); for a subnetwork the chosen weights.
            normalized: ``False`` leaves out the terms that do not depend on ``value``.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        validate.flag("normalized", normalized)
        norm = self.square_norm(value)
        if not normalized:
            return -norm / 2
        return -self.n_weights / 2 * math.log(2 * math.pi) + self.log_det_posterior_precision / 2 - norm / 2

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Return the covariances of the linearised outputs, shape (B, D, D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self.check_weights(Js, "Js", ("B", "D"))
        return self.require_clamped().covariance(Js, *self._scales)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Return the covariance of all linearised outputs, shape (B D, B D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self.check_weights(Js, "Js", ("B", "D"))
        return self.require_clamped().covariance(Js.flatten(0, 1), *self._scales)

    @property
    def temperature(self) -> float:
        """Temperature of the likelihood: the curvature is divided by it."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if isinstance(value, (Tensor, np.generic)) and np.size(value) == 1:
            value = value.item()
        number = validate.number("temperature", value, positive=True)
        inverse = torch.ones((), dtype=self._dtype) / number
        if not bool(inverse.isfinite()) or not bool(inverse > 0):
            wanted = f"a number whose inverse is positive and finite in {self._dtype}"
            raise InputError("temperature", wanted, number)
        self._temperature = number

    @BaseLaplace.sigma_noise.setter  # type: ignore[untyped-decorator]
    def sigma_noise(self, value: float | Tensor) -> None:
        """Refuse an observation noise other than one."""
        one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not one or isinstance(value, bool) or float(value) != 1:
            raise UnsupportedError(
                "sigma_noise: embeddings have no observation noise. Use temperature=... to weaken the likelihood."
            )
        BaseLaplace.sigma_noise.fset(self, value)

    @property
    def prior_precision(self) -> Tensor:
        """Precision of the prior: one number, one for each parameter tensor, or one for each parameter."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        sizes = self._prior_sizes()
        check_prior("prior_precision", value, self._dtype, sizes)
        self.prior_chosen = True
        if sizes is None:
            # The number of parameters is unknown before the first batch; then the value is set again.
            self._prior_precision = value
        else:
            BaseLaplace.prior_precision.fset(self, _plain(value))

    def set_prior(self, precision: float | Tensor | None, mean: float | Tensor) -> None:
        """Set precision and mean of the prior; ``None`` is a precision of 1 until one is chosen."""
        self.prior_precision = 1.0 if precision is None else precision
        self.prior_mean = mean
        self.prior_chosen = precision is not None

    @property
    def prior_mean(self) -> Tensor:
        """Mean of the prior: one number, or one for each parameter."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        sizes = self._prior_sizes(of_mean=True)
        check_prior("prior_mean", value, self._dtype, sizes, positive=False)
        if sizes is None:
            self._prior_mean = value
        else:
            BaseLaplace.prior_mean.fset(self, _plain(value))

    @property
    def n_weights(self) -> int:
        """Number of weights of the posterior."""
        return int(self.n_params) if self._indices is None else len(self._indices)

    @property
    def prior_structures(self) -> tuple[str, ...]:
        """Allowed values of ``prior_structure``; laplace-torch has only one prior precision for a subnetwork."""
        return ("scalar",) if self.subset_of_weights == "subnetwork" else self.structure.priors

    def posterior_parameters(self) -> list[Tensor]:
        """Parameters of the posterior, in order; the chosen entries of a subnetwork are one tensor."""
        if self.on_last_layer:
            return [at_least_float32(p) for p in self.model.last_layer.parameters()]
        return list(self.params) if self._indices is None else [self._chosen(flatten_parameters(self.params))]

    def parameter_sizes(self) -> list[int]:
        """Number of entries of every part that has its own precision in a layerwise prior."""
        return [p.numel() for p in self.posterior_parameters()]

    @property
    def likelihood_factor(self) -> float | Tensor:
        """Factor of the curvature in the posterior precision: 1 / temperature."""
        return self._H_factor

    @property
    def _scales(self) -> tuple[Tensor, float | Tensor]:
        """Prior precision and likelihood factor; with the clamped curvature they give the posterior precision."""
        return self.prior_precision, self._H_factor

    def check_fitted(self) -> None:
        """Refuse a posterior without a curvature.

        Raises:
            NotFittedError: Before ``fit``.
        """
        if not self.n_data:
            raise NotFittedError("Laplace not fitted. Run la.fit(train_loader) first, or la.load_state_dict(state).")

    def _check_H_init(self) -> None:
        """Call :meth:`check_fitted`; laplace-torch uses this name."""
        self.check_fitted()

    def check_sampling(self, n_samples: object, generator: object) -> None:
        """Refuse to sample before ``fit`` or with malformed arguments.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        self.check_fitted()
        validate.count("n_samples", n_samples)
        validate.generator(generator, self._device)

    def check_weights(self, value: Tensor, argument: str = "value", rows: tuple[str, ...] = ()) -> None:
        """Refuse anything but finite numbers, one for each weight, shape (P,) or (*rows, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` has another shape, dtype or device, or is not finite.
        """
        self.check_fitted()
        validate.tensor(argument, value, (*rows, self.n_weights), self.mean)

    def _prior_sizes(self, *, of_mean: bool = False) -> set[int] | None:
        """Return the allowed numbers of entries of the prior precision, or of the prior mean; ``None`` if unknown.

        For a last layer these numbers are unknown before the first batch.
        """
        if self.n_params is None or (self.on_last_layer and not isinstance(self.model, Encoder)):
            return None
        means = ("scalar",) if self.subset_of_weights == "subnetwork" else ("scalar", "diag")
        per = {"scalar": 1, "layerwise": len(self.parameter_sizes()), "diag": self.n_weights}
        return {per[structure] for structure in (means if of_mean else self.prior_structures)}

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the posterior: the encoder's dtype, or float32 for an encoder in half precision."""
        return torch.promote_types(super()._dtype, torch.float32)

    def curvature_diagonal(self) -> Tensor:
        """Return the diagonal of the clamped curvature, without the likelihood factor, shape (P,)."""
        return self.require_clamped().diagonal()

    def effective_parameters(self, prior: Tensor) -> float:
        """Return the effective number of parameters, for a prior precision at the temperature 1."""
        return self.require_clamped().effective_parameters(prior)


def _plain(value: float | Tensor) -> float | Tensor:
    """Return a number as a Python float, because laplace-torch accepts only some of NumPy's numbers."""
    return value if isinstance(value, Tensor) else float(value)

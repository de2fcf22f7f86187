"""What a posterior knows only after ``fit``: laplace-torch's own methods, which before it fail in as many ways."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.arguments import check_count, check_flag, check_generator
from contrastive_curvature.errors import NotFittedError, UnsupportedError
from contrastive_curvature.laplace.checks import (
    check_jacobians,
    check_value,
)
from contrastive_curvature.laplace.host import Host

__all__ = ["FittedOnly"]


def _fitted_only(name: str, meaning: str) -> Any:
    """The host's property of that name, once there is a fit."""

    def get(self: FittedOnly) -> Any:
        beneath: Any = super(FittedOnly, type(self))
        if hasattr(beneath, name):
            self._check_fitted()
        # Where this structure has no such property, Python says so.
        return getattr(super(FittedOnly, self), name)

    return property(get, doc=meaning)


class FittedOnly(Host):
    """Stands in front of the host's class: checks that there is a fit, and the arguments, and passes on."""

    posterior_precision = _fitted_only("posterior_precision", "Precision of the weights, in the structure's own form.")
    posterior_scale = _fitted_only("posterior_scale", "A root of the covariance of the weights.")
    posterior_covariance = _fitted_only("posterior_covariance", "Covariance of the weights, shape (P, P).")
    posterior_variance = _fitted_only("posterior_variance", "Variances of the weights, shape (P,).")
    log_det_posterior_precision = _fitted_only("log_det_posterior_precision", "Log determinant of the precision.")
    log_det_ratio = _fitted_only("log_det_ratio", "Log determinant of the posterior precision over the prior's.")
    log_likelihood = _fitted_only("log_likelihood", "The loss over the temperature, negated.")
    scatter = _fitted_only("scatter", "Squared distance of the weights to the prior mean, in the prior's units.")
    mean_subnet = _fitted_only("mean_subnet", "The chosen weights.")
    V = _fitted_only("V", "A term of the low-rank covariance; see laplace-torch.")
    Kinv = _fitted_only("Kinv", "A term of the low-rank covariance; see laplace-torch.")

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights from the posterior.

        Args:
            n_samples: Number S of samples.
            generator: Source of randomness, on the encoder's device.

        Returns:
            Shape (S, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        self._check_sampling(n_samples, generator)
        return super().sample(n_samples, generator)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` with the posterior precision.

        Args:
            value: Weights, shape (P,); of a subnetwork the chosen ones.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` is malformed.
        """
        self._check_value(value)
        return super().square_norm(value)  # type: ignore[misc]

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log density of the posterior.

        Args:
            value: Weights, shape (P,); of a subnetwork the chosen ones.
            normalized: ``False`` leaves out the terms that do not depend on ``value``.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        check_flag("normalized", normalized)
        norm = self.square_norm(value)
        if not normalized:
            return -norm / 2
        return -self._n_weights() / 2 * math.log(2 * math.pi) + self.log_det_posterior_precision / 2 - norm / 2

    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """Laplace approximation of the log marginal likelihood, differentiable in the prior precision.

        Args:
            prior_precision: Set first, where it is given.
            sigma_noise: Must be left alone.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The prior precision is malformed.
            UnsupportedError: ``sigma_noise`` is given.
        """
        self._check_fitted()
        if sigma_noise is not None:
            msg = "sigma_noise: embeddings have no observation noise. Set la.temperature to weaken the likelihood."
            raise UnsupportedError(msg)
        return super().log_marginal_likelihood(prior_precision)  # type: ignore[misc]

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Covariances of the linearised outputs, shape (B, D, D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self._check_jacobian(Js)
        return super().functional_variance(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Covariance of all linearised outputs together, shape (B D, B D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self._check_jacobian(Js)
        return super().functional_covariance(Js)

    def _check_fitted(self) -> None:
        if not self.n_data:
            msg = "Laplace not fitted. Run la.fit(train_loader) first, or la.load_state_dict(state)."
            raise NotFittedError(msg)

    def _check_sampling(self, n_samples: object, generator: object) -> None:
        self._check_fitted()
        check_count("n_samples", n_samples)
        check_generator(generator, self._device)

    def _check_value(self, value: object) -> None:
        self._check_fitted()
        check_value(value, self.mean, self._n_weights())

    def _check_jacobian(self, value: object) -> None:
        self._check_fitted()
        check_jacobians(value, self.mean, self._n_weights())

    def _n_weights(self) -> int:
        """Number of weights that the posterior is over."""
        return int(self.n_params)

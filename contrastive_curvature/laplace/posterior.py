"""laplace-torch's posterior with its arguments checked: the prior, the temperature, and everything that needs a fit.

laplace-torch stores most settings unchecked, and fails in several ways where there is no fit yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError, expected
from contrastive_curvature.laplace.prior import PRIOR_STRUCTURES
from contrastive_curvature.network.full_precision import full_precision


def _fitted_only(name: str, meaning: str) -> Any:
    """Return laplace-torch's property of that name, which by itself answers without a fit, too."""

    def get(self: CheckedPosterior) -> Any:
        self.check_fitted()
        return getattr(super(CheckedPosterior, self), name)

    return property(get, doc=meaning)


class CheckedPosterior(ParametricLaplace):
    """One of laplace-torch's classes with its arguments and the fit checked.

    Attributes:
        prior_structures: Values that ``prior_structure`` may have.
    """

    prior_structures: ClassVar[tuple[str, ...]] = PRIOR_STRUCTURES

    # None until the first batch shows what the last layer is.
    n_params: Any
    n_layers: Any
    n_data: int
    loss: Tensor | float
    _posterior_scale: Tensor | None

    log_det_posterior_precision = _fitted_only("log_det_posterior_precision", "Log determinant of the precision.")
    log_det_ratio = _fitted_only("log_det_ratio", "Log determinant of the posterior precision over the prior's.")
    log_likelihood = _fitted_only("log_likelihood", "The loss over the temperature, negated.")
    scatter = _fitted_only("scatter", "Squared distance of the weights to the prior mean, in the prior's units.")

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
        self.check_sampling(n_samples, generator)
        return super().sample(n_samples, generator)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` with the posterior precision.

        Args:
            value: Weights, shape (P,); of a subnetwork the chosen ones.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` is malformed.
        """
        self.check_weights(value)
        return super().square_norm(value)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log density of the posterior.

        Args:
            value: Weights, shape (P,); of a subnetwork the chosen ones.
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

    @full_precision
    def functional_variance(self, Js: Tensor) -> Tensor:
        """Covariances of the linearised outputs, shape (B, D, D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self._check_jacobians(Js)
        return super().functional_variance(Js)

    @full_precision
    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Covariance of all linearised outputs together, shape (B D, B D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self._check_jacobians(Js)
        return super().functional_covariance(Js)

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
            raise InputError(expected("temperature", wanted, number))
        self._temperature = number
        # laplace-torch keeps a root of the covariance, and does not drop it here.
        self._posterior_scale = None

    @BaseLaplace.sigma_noise.setter  # type: ignore[untyped-decorator]
    def sigma_noise(self, value: float | Tensor) -> None:
        """Refuse an observation noise: anything but one."""
        one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not one or isinstance(value, bool) or float(value) != 1:
            msg = "sigma_noise: embeddings have no observation noise. Use temperature=... to weaken the likelihood."
            raise UnsupportedError(msg)
        BaseLaplace.sigma_noise.fset(self, value)

    @BaseLaplace.prior_precision.setter  # type: ignore[untyped-decorator]
    def prior_precision(self, value: float | Tensor) -> None:
        """Set the precision of the prior: one number, one a parameter tensor, or one a parameter."""
        sizes = self._prior_sizes()
        check_prior("prior_precision", value, self._dtype, sizes)
        self._prior_chosen = True
        if sizes is None:
            # The first batch shows how many parameters there are; then this is set once more.
            self._prior_precision = value
        else:
            BaseLaplace.prior_precision.fset(self, _plain(value))

    @BaseLaplace.prior_mean.setter  # type: ignore[untyped-decorator]
    def prior_mean(self, value: float | Tensor) -> None:
        """Set the mean of the prior: one number, or one a parameter."""
        sizes = self._prior_mean_sizes()
        check_prior("prior_mean", value, self._dtype, sizes, positive=False)
        if sizes is None:
            self._prior_mean = value
        else:
            BaseLaplace.prior_mean.fset(self, _plain(value))

    @property
    def n_weights(self) -> int:
        """Number of weights that the posterior is over."""
        return int(self.n_params)

    @property
    def likelihood_factor(self) -> float | Tensor:
        """Factor of the curvature in the posterior precision: one over the temperature."""
        return self._H_factor

    def check_fitted(self) -> None:
        """Refuse a posterior without a curvature.

        Raises:
            NotFittedError: Before ``fit``.
        """
        if not self.n_data:
            msg = "Laplace not fitted. Run la.fit(train_loader) first, or la.load_state_dict(state)."
            raise NotFittedError(msg)

    def _check_H_init(self) -> None:
        """Do it where laplace-torch asks."""
        self.check_fitted()

    def check_sampling(self, n_samples: object, generator: object) -> None:
        """Refuse samples before ``fit``, and malformed arguments of them.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        self.check_fitted()
        validate.count("n_samples", n_samples)
        if generator is not None:
            validate.generator(generator, self._device)

    def check_weights(self, value: Tensor) -> None:
        """Refuse anything but finite weights (P,).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` has another shape, dtype or device, or is not finite.
        """
        self.check_fitted()
        validate.tensor("value", value, (self.n_weights,), self.mean)

    def _check_jacobians(self, Js: Tensor) -> None:
        self.check_fitted()
        validate.tensor("Js", Js, ("B", "D", self.n_weights), self.mean)

    def _prior_sizes(self) -> set[int] | None:
        """Return the numbers of prior precisions that the structure takes, besides one; ``None`` if not yet known."""
        if self.n_params is None:
            return None
        per = {"scalar": 1, "layerwise": self.n_layers, "diag": self.n_params}
        return {per[structure] for structure in self.prior_structures}

    def _prior_mean_sizes(self) -> set[int] | None:
        """Return the numbers of prior means that the structure takes, besides one; ``None`` if not yet known."""
        return None if self.n_params is None else {self.n_params}


def _plain(value: float | Tensor) -> float | Tensor:
    """Return a number as a Python float: laplace-torch accepts only some of NumPy's numbers."""
    return value if isinstance(value, Tensor) else float(value)


def check_prior(
    argument: str, value: object, dtype: torch.dtype, sizes: Collection[int] | None = None, *, positive: bool = True
) -> None:
    """Refuse what is no prior precision (or mean, where numbers need not be positive).

    Args:
        argument: Its name.
        value: A number, or a tensor of at most one dimension.
        dtype: Of the encoder: what underflows to zero there is refused.
        sizes: Numbers of entries that there is room for, besides one; ``None`` where that is not known yet.
        positive: Whether zero and negative numbers are refused.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            wanted = f"a {'positive' if positive else 'finite'} number or a tensor of them"
            hint = "Wrap it with torch.tensor(...)." if isinstance(value, (list, tuple)) else ""
            raise InputTypeError(expected(argument, wanted, f"a {type(value).__name__}", hint))
        value = torch.tensor(float(value), dtype=dtype)
    if value.is_complex() or value.dtype == torch.bool:
        raise InputTypeError(expected(argument, "real numbers", f"a tensor of {value.dtype}"))
    given = value.detach().to(dtype)
    if given.ndim > 1 or not given.numel():
        raise InputError(expected(argument, "a number or shape (K,), not empty", f"shape {tuple(given.shape)}"))
    if sizes is not None and given.numel() not in {1, *sizes}:
        room = " or ".join(str(size) for size in sorted({1, *sizes}))
        raise InputError(expected(argument, f"{room} entries", f"{given.numel()}"))
    good = given.isfinite() & (given > 0) if positive else given.isfinite()
    if not bool(good.all()):
        wanted = f"positive numbers, finite in {dtype}" if positive else f"finite numbers in {dtype}"
        shown = f"{float(given)}" if given.numel() == 1 else f"{int((~good).sum())} others"
        raise InputError(expected(argument, wanted, shown))

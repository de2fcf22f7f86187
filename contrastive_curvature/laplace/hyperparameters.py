"""Prior and temperature, checked before they are set: laplace-torch stores what comes, or fails half way."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from contrastive_curvature.laplace.checks import (
    check_prior_mean,
    check_prior_precision,
    check_temperature,
    plain_number,
)
from contrastive_curvature.laplace.host import Host
from contrastive_curvature.laplace.options import check_sigma_noise

__all__ = ["Hyperparameters"]


class Hyperparameters(Host):
    """The settings of a posterior that may change after the fit, each checked before it is set."""

    prior_structures: ClassVar[tuple[str, ...]]
    _temperature: float

    @property
    def temperature(self) -> float:
        """Temperature of the likelihood: the curvature is divided by it."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = check_temperature(value, self._dtype)
        # The host caches a root of the covariance, and forgets to drop it here.
        self._posterior_scale = None

    @property
    def sigma_noise(self) -> Tensor:
        """Always one: embeddings have no observation noise."""
        return super().sigma_noise  # type: ignore[misc]

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        check_sigma_noise(value)
        super(Hyperparameters, type(self)).sigma_noise.fset(self, value)  # type: ignore[misc]

    @property
    def prior_precision(self) -> Tensor:
        """Precision of the prior: one number, one a parameter tensor, or one a parameter."""
        return super().prior_precision  # type: ignore[misc]

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        sizes = self._prior_sizes()
        check_prior_precision(value, self._dtype, sizes)
        if sizes is None:
            # How many parameters there are shows with the first batch, and then this is set once more.
            self._prior_precision = value
            return
        super(Hyperparameters, type(self)).prior_precision.fset(self, plain_number(value))  # type: ignore[misc]

    @property
    def prior_mean(self) -> Tensor:
        """Mean of the prior: one number, or one a parameter."""
        return super().prior_mean  # type: ignore[misc]

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        sizes = self._prior_mean_sizes()
        check_prior_mean(value, self._dtype, sizes)
        if sizes is None:
            self._prior_mean = value
            return
        super(Hyperparameters, type(self)).prior_mean.fset(self, plain_number(value))  # type: ignore[misc]

    def _prior_sizes(self) -> set[int] | None:
        """Numbers of prior precisions that there is room for, besides one; ``None`` while that is not known."""
        if self.n_params is None:
            return None
        per = {"scalar": 1, "layerwise": self.n_layers, "diag": self.n_params}
        return {per[structure] for structure in self.prior_structures}

    def _prior_mean_sizes(self) -> set[int] | None:
        return None if self.n_params is None else {self.n_params}

"""Dense posteriors in float64, whatever the encoder's precision.

The precision ``H / T + prior`` has eigenvalues from the prior's to those of the curvature, which goes with
``1 / norm^2`` of the outputs. Where outputs are short, float32 cannot hold that range: laplace-torch's Cholesky factor
fails, or the variances along the largest eigenvalues are rounding errors.
"""

from __future__ import annotations

import warnings

import torch
from laplace.baselaplace import ParametricLaplace
from laplace.utils import invsqrt_precision
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

_MOST_ROUNDING = 0.5
"""Of the prior precision, which alone decides the variances along directions without curvature."""


class DensePosterior(ParametricLaplace):
    """Stands in front of laplace-torch's class of dense precisions; takes and gives the encoder's dtype."""

    _posterior_scale: Tensor | None

    @property
    def posterior_precision(self) -> Tensor:
        """Precision of the weights, shape (P, P)."""
        return self._wide_precision().to(self._dtype)

    @property
    def posterior_scale(self) -> Tensor:
        """A root of the covariance of the weights, shape (P, P)."""
        return self._wide_scale().to(self._dtype)

    @property
    def posterior_covariance(self) -> Tensor:
        """Covariance of the weights, shape (P, P)."""
        return self.wide_covariance().to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log determinant of the precision."""
        return self._wide_precision().logdet().to(self._dtype)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` for weights (P,)."""
        delta = (value - self.mean).double()
        return (delta @ self._wide_precision() @ delta).to(self._dtype)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Covariance of the outputs of every point, shape (B, D, D), for Jacobians (B, D, P)."""
        moved = Js.double() @ self._wide_scale()
        return (moved @ moved.mT).to(self._dtype)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Covariance of all outputs together, shape (B D, B D), for Jacobians (B, D, P)."""
        moved = Js.flatten(0, 1).double() @ self._wide_scale()
        return (moved @ moved.mT).to(self._dtype)

    def wide_covariance(self) -> Tensor:
        """Covariance of the weights, shape (P, P), in float64."""
        scale = self._wide_scale()
        return scale @ scale.mT

    def _wide_precision(self) -> Tensor:
        self._check_H_init()
        prior: Tensor = self.prior_precision_diag
        return self._H_factor * self.H.double() + torch.diag(prior.double())

    def _wide_scale(self) -> Tensor:
        if self._posterior_scale is None:
            precision = self._wide_precision()
            self._warn_of_rounding()
            try:
                self._posterior_scale = invsqrt_precision(precision)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                given = f"one that is not positive definite in float64 ({str(error).splitlines()[0].rstrip('.')})"
                hint = "Use optimize_prior_precision(), model.double() before fitting, or hessian_structure='diag'."
                raise InputError(expected("posterior precision", "a positive definite matrix", given, hint)) from error
        return self._posterior_scale

    def _warn_of_rounding(self) -> None:
        """Warn where the curvature, summed in the encoder's dtype, has rounding errors of the size of the prior."""
        rounding = torch.finfo(self.H.dtype).eps * float(self._H_factor * self.H.diagonal().max())
        part = rounding / float(self.prior_precision.min())
        if part > _MOST_ROUNDING:
            msg = (
                f"The curvature is rounded to {self.H.dtype}, which is {100 * part:.3g} % of the prior precision, so "
                "variances may be off. Fit the encoder in float64, model.double(), or use optimize_prior_precision(), "
                "whose prior grows with the curvature."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)

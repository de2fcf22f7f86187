"""The two quadratic fits of the log-normaliser that Kirchhof et al. (2022) train with, for comparison only.

``log_normalizer`` is exact, has gradients and costs little; nothing in the library uses the fits.
"""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.errors import UnsupportedError, expected
from contrastive_curvature.vmf._checks import check_dim, check_kappa

__all__ = ["log_normalizer_quadratic"]

# D -> the constant, the factor of kappa, the factor of kappa^2
_FITS = {128: (127.0, -0.01909, -0.003355), 512: (868.0, -0.0002662, -0.0009685)}


def log_normalizer_quadratic(kappa: Tensor, dim: int) -> Tensor:
    """Return the document's quadratic fit of ``log C_D(kappa)``, made for kappa from 10 to 50.

    Beyond it, the fit falls like ``-kappa^2`` and the log-normaliser like ``-kappa``: the fit is of no use for kappa
    much above D.

    Args:
        kappa: Concentrations (dimensionless), any shape, finite and >= 0.
        dim: Ambient dimension, 128 or 512, the two that the document gives.

    Returns:
        The fitted values, with the shape and dtype of ``kappa``.

    Raises:
        InputTypeError: If ``kappa`` is not a floating-point tensor or ``dim`` not an int.
        InputError: If ``kappa`` is negative or not finite, or ``dim`` < 2.
        UnsupportedError: If ``dim`` is not one of the two.

    Source: Eq. 12-13.
    """
    checked, dim = check_kappa(kappa), check_dim(dim)
    if dim not in _FITS:
        raise UnsupportedError(expected("dim", "128 or 512", dim, "log_normalizer is exact for every dimension."))
    constant, linear, quadratic = _FITS[dim]
    return constant + checked * (linear + quadratic * checked)

"""The von Mises-Fisher density, and the Kullback-Leibler divergence between two of them."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.vmf._checks import broadcast_batch, check_kappa, unit
from contrastive_curvature.vmf.normalizer import log_density_at_mode, of_kappa

__all__ = ["kl_divergence", "log_prob"]


def _same_dim(**tensors: Tensor) -> int:
    dims = {name: t.shape[-1] for name, t in tensors.items()}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {dim}" for name, dim in dims.items())
        raise InputError(expected("last axes", "one dimension D", shown))
    return next(iter(dims.values()))


def log_prob(z: Tensor, mu: Tensor, kappa: Tensor) -> Tensor:
    """Return the log-density at directions, with respect to the surface measure of the unit sphere.

    Computed as ``log_density_at_mode(kappa) - kappa/2 |u - m|^2`` with ``u = z/|z|`` and ``m = mu/|mu|``, which equals
    ``log C_D(kappa) + kappa <u, m>`` and does not cancel for large kappa.

    Args:
        z: Directions, shape (..., D); normalised here, so the gradient with respect to ``z`` is tangential to the
            sphere.
        mu: Mean directions, shape (..., D); normalised here.
        kappa: Concentrations, shape (...), finite and >= 0.

    Returns:
        Log-densities (in nats), with the broadcast batch shape.

    Raises:
        InputTypeError: If an argument is not a floating-point tensor.
        InputError: If a vector is zero or not finite, ``kappa`` is negative or not finite, D < 2 or disagrees, the
            batch shapes do not broadcast, or the devices differ.

    Source: appendix C of Warburg et al. (2023), with its Eq. 41 corrected to ``|z - mu|^2 = 2 - 2 <z, mu>``.
    """
    u, _ = unit("z", z)
    m, _ = unit("mu", mu)
    checked = check_kappa(kappa)
    dim = _same_dim(z=u, mu=m)
    broadcast_batch(z=(u, 1), mu=(m, 1), kappa=(checked, 0))
    return log_density_at_mode(checked, dim) - checked / 2 * (u - m).square().sum(-1)


def kl_divergence(mu: Tensor, kappa: Tensor, other_mu: Tensor, other_kappa: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from (mu, kappa) to (other_mu, other_kappa).

    ``KL = E_p[log p - log q]``, with ``E_p[u] = A_D(kappa) mu``. It is computed from ``1 - A_D``, which avoids
    cancellation for large kappa.

    Args:
        mu: Mean directions of p, shape (..., D); normalised here.
        kappa: Concentrations of p, shape (...), >= 0.
        other_mu: Mean directions of q, shape (..., D); normalised here.
        other_kappa: Concentrations of q, shape (...), >= 0.

    Returns:
        Divergences (in nats), with the broadcast batch shape; zero up to rounding for equal arguments.

    Raises:
        InputTypeError: If an argument is not a floating-point tensor.
        InputError: If a vector is zero or not finite, a concentration is negative or not finite, D < 2 or disagrees,
            the batch shapes do not broadcast, or the devices differ.
    """
    m, _ = unit("mu", mu)
    other_m, _ = unit("other_mu", other_mu)
    k, other_k = check_kappa(kappa), check_kappa(other_kappa)
    dim = _same_dim(mu=m, other_mu=other_m)
    broadcast_batch(mu=(m, 1), kappa=(k, 0), other_mu=(other_m, 1), other_kappa=(other_k, 0))
    at_modes = log_density_at_mode(k, dim) - log_density_at_mode(other_k, dim)
    spread = of_kappa(k, dim, "complement").to(k.dtype)
    turn = (m - other_m).square().sum(-1) / 2
    length = of_kappa(k, dim, "ratio").to(k.dtype)
    return at_modes + (other_k - k) * spread + other_k * length * turn

"""What a fitted last layer needs to score an input, as named arrays: no object of laplace-torch is left in it.

All structures come down to three forms of the covariance of the outputs at features ``phi`` (F,):

- ``diagonal`` (``diag``): variances ``V (phi * phi) + v`` with ``variance`` V (D, F) and ``bias_variance`` v (D,);
- ``axes`` (``kron``, ``kron_lowrank``): variances ``along (Q^T phi)^2 + across |phi - Q Q^T phi|^2`` on the columns of
  ``axes`` (D, D), with ``basis`` Q (F, R), ``along`` (D, R) and ``across`` (D,), and ``common`` (D, D) of the bias;
- ``dense`` (``full``): ``covariance`` (P, P) of ``[W.flatten(), b]``.

Besides, ``weight`` (D, F) and ``bias`` (D,) of the layer; ``typical_norm`` (); ``centres`` (K, D) and ``typical_ratio``
() of the classes; ``location`` (3,), ``scale`` (3,) and ``statistics`` (n,) of the calibration. What is not there has
no name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputTypeError, NotFittedError, UnsupportedError, expected
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.calibration import calibrated_reference
from contrastive_curvature.laplace.classes import (
    ContrastiveDiagLLLaplace,
    ContrastiveFullLLLaplace,
    ContrastiveKronLLLaplace,
)
from contrastive_curvature.laplace.kron_lowrank import ContrastiveKronLowRankLLLaplace
from contrastive_curvature.laplace.kron_lowrank_precision import KronLowRankPrecision
from contrastive_curvature.network.encoder import at_least_float32

__all__ = ["Parts", "check_exportable", "parts_of"]

_CLASSES = (
    ContrastiveDiagLLLaplace,
    ContrastiveKronLLLaplace,
    ContrastiveFullLLLaplace,
    ContrastiveKronLowRankLLLaplace,
)


@dataclass(frozen=True)
class Parts:
    """The arrays of a posterior.

    Attributes:
        form: ``"diagonal"``, ``"axes"`` or ``"dense"``.
        structure: Structure of the posterior, as the user typed it.
        arrays: By name; see the module. Detached copies on the device of the posterior.
    """

    form: str
    structure: str
    arrays: dict[str, Tensor]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what is returned for an input, in order."""
        names = ("mu", "kappa", "uncertainty")
        return (*names, "p_value") if "statistics" in self.arrays else names


def check_exportable(la: Any) -> None:
    """Refuse what has no last-layer posterior in closed form.

    Raises:
        InputTypeError: ``la`` is no contrastive posterior.
        UnsupportedError: It is one of another kind.
        NotFittedError: Before ``fit``.
    """
    if not isinstance(la, ContrastiveLaplace):
        hint = "Of OnlineLaplace take online.laplace(), of two towers la.a and la.b."
        raise InputTypeError(expected("la", "a contrastive last-layer posterior", f"a {type(la).__name__}", hint))
    if not isinstance(la, _CLASSES):
        weights, structure = la._key[:2]
        msg = (
            f"export: subset_of_weights={weights!r}, hessian_structure={structure!r} needs Jacobians or training "
            "inputs for every prediction, which no exported graph has. Fit subset_of_weights='last_layer' with "
            "hessian_structure='kron_lowrank' (the default), 'diag', 'kron' or 'full'."
        )
        raise UnsupportedError(msg)
    la.check_fitted()


def parts_of(la: Any, p_value: bool | None = None) -> Parts:
    """The arrays of a fitted posterior.

    Args:
        la: The posterior.
        p_value: Whether they give p-values; ``None`` where ``la`` is calibrated.

    Raises:
        InputTypeError: ``la`` is no contrastive posterior.
        UnsupportedError: It is one of another kind.
        NotFittedError: Before ``fit``; before ``la.calibrate``, where ``p_value``; or the calibration is of another
            prior precision, temperature or encoder.
    """
    check_exportable(la)
    layer = la.model.last_layer
    weight = at_least_float32(layer.weight)
    arrays: dict[str, Tensor] = {"weight": weight}
    if layer.bias is not None:
        arrays["bias"] = at_least_float32(layer.bias)
    with torch.autocast(layer.weight.device.type, enabled=False):
        form, spread = _spread(la)
    arrays |= spread
    if la.typical_norm is not None:
        arrays["typical_norm"] = torch.tensor(la.typical_norm, dtype=torch.float64, device=layer.weight.device)
    if la.class_centres is not None:
        arrays["centres"] = la.class_centres.centres.to(weight)
        arrays["typical_ratio"] = torch.tensor(
            la.class_centres.typical, dtype=torch.float64, device=layer.weight.device
        )
    if p_value and la.known.calibration is None:
        msg = (
            "p_value=True: la is not calibrated. Call la.calibrate(loader) with known inputs first, or leave p_value "
            "out to export mu, kappa and uncertainty alone."
        )
        raise NotFittedError(msg)
    reference = None if p_value is False else calibrated_reference(la)
    if reference is not None:
        arrays |= vars(reference)
    return Parts(form, la._key[1], {name: _copy(array) for name, array in arrays.items()})


def _copy(array: Tensor) -> Tensor:
    return array.detach().clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _spread(la: Any) -> tuple[str, dict[str, Tensor]]:
    """Name of the form of the covariance, and its arrays."""
    dim, width = la.model.last_layer.weight.shape
    if isinstance(la, ContrastiveDiagLLLaplace):
        variance = la.posterior_variance
        arrays = {"variance": variance[: dim * width].view(dim, width)}
        if len(variance) > dim * width:
            arrays["bias_variance"] = variance[dim * width :]
        return "diagonal", arrays
    if isinstance(la, ContrastiveFullLLLaplace):
        return "dense", {"covariance": la.wide_covariance()}
    precision = la.posterior_precision
    return "axes", _kron(precision) if isinstance(la, ContrastiveKronLLLaplace) else _kron_lowrank(precision)


def _kron(precision: Any) -> dict[str, Tensor]:
    """Of laplace-torch's decomposed precision; the formulas are those of ``laplace.classes._kron_covariance``."""
    (axes, basis), (g, a) = precision.eigenvectors[0], precision.eigenvalues[0]
    delta = precision.deltas[0]
    damp = delta.sqrt()
    scale = torch.outer(g + damp, a + damp) if precision.damping else torch.outer(g, a) + delta
    arrays = {"axes": axes, "basis": basis, "along": 1 / scale}
    if len(precision.eigenvalues) > 1:
        q, values = precision.eigenvectors[1][0], precision.eigenvalues[1][0]
        arrays["common"] = (q / (values + precision.deltas[1])) @ q.T
    return arrays


def _kron_lowrank(precision: KronLowRankPrecision) -> dict[str, Tensor]:
    """See :meth:`.KronLowRankPrecision.output_covariance`."""
    curvature = precision.curvature
    basis = curvature.inputs.vectors
    arrays = {"axes": curvature.vectors, "basis": basis, "along": precision.along.reciprocal().to(basis)}
    if basis.shape[1] < basis.shape[0]:
        arrays["across"] = precision.across.reciprocal().to(basis)
    if curvature.bias is not None and precision.of_bias is not None:
        q = curvature.bias[0]
        arrays["common"] = (q * precision.of_bias.reciprocal().to(basis)) @ q.T
    return arrays

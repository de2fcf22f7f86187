"""A fitted last layer as named arrays for scoring inputs, without any object of laplace-torch.

All structures reduce to three forms of the outputs' covariance at features ``phi`` (F,):

- ``diagonal`` (``diag``): variances ``V (phi * phi) + v`` with ``variance`` V (D, F) and ``bias_variance`` v (D,);
- ``axes`` (``kron``, ``kron_lowrank``): variances ``along (Q^T phi)^2 + across |phi - Q Q^T phi|^2`` on the columns of
  ``axes`` (D, D), with ``basis`` Q (F, R), ``along`` (D, R) and ``across`` (D,), and ``common`` (D, D) of the bias;
- ``dense`` (``full``): ``covariance`` (P, P) of ``[W.flatten(), b]``.

In addition: ``weight`` (D, F) and ``bias`` (D,) of the layer; ``typical_norm`` (); ``centres`` (K, D) and
``typical_ratio`` () of the classes; ``location`` (3,), ``scale`` (3,) and ``statistics`` (n,) of the calibration, with
``rounding`` () of the scores and, for p-values by class, ``counts`` (K,). A novelty with distances to training inputs
has ``known_centre`` (D,), ``known_axes`` (D, Q), ``known_inside`` (Q,) and ``known_outside`` (); with training classes
also ``known_basis`` (F, M), ``known_weights`` (M,), ``known_slopes`` (C, F) and ``known_offsets`` (C,); ``location``
and ``scale`` then have four or five entries. A missing array has no name. A file of the scorer also contains the
tensors of ``MatchProbability.state_dict``, with the prefix ``match.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.errors import InputTypeError, NotFittedError, UnsupportedError
from contrastive_curvature.laplace.calibration import example, present_calibration
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.structures.at_features import DenseAtFeatures, DiagonalAtFeatures


@dataclass(frozen=True)
class Parts:
    """The arrays of a posterior.

    Attributes:
        form: ``"diagonal"``, ``"axes"`` or ``"dense"``.
        structure: Structure of the posterior, as the user typed it.
        score: Score of the p-values, ``"novelty"`` or ``"uncertainty"``.
        arrays: Arrays by name, see the module: detached copies on the device of the posterior.
    """

    form: str
    structure: str
    score: str
    arrays: dict[str, Tensor]


def outputs_of(arrays: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the results for an input, in order."""
    names = ("mu", "kappa", "uncertainty")
    return (*names, "p_value") if "statistics" in arrays else names


def check_exportable(la: Any) -> None:
    """Refuse an object without a fitted last-layer posterior in closed form."""
    if not isinstance(la, ContrastiveLaplace):
        hint = "Of OnlineLaplace take online.laplace(), of two towers la.a and la.b."
        raise InputTypeError("la", "a contrastive last-layer posterior", f"a {type(la).__name__}", hint)
    if not la.keeps_features:
        weights, structure = la.subset_of_weights, la.hessian_structure
        raise UnsupportedError(
            f"export: subset_of_weights={weights!r}, hessian_structure={structure!r} needs Jacobians or training "
            "inputs for every prediction, which no exported graph has. Fit subset_of_weights='last_layer' with "
            "hessian_structure='kron_lowrank' (the default), 'diag', 'kron' or 'full'."
        )
    la.check_fitted()


@torch.no_grad()
def parts_of(la: Any, p_value: bool | None = None) -> Parts:
    """Return the arrays of a fitted posterior for the scorer; for ``p_value`` see :func:`score_arrays`."""
    score, arrays = score_arrays(la, p_value)
    layer = la.model.last_layer
    weight = at_least_float32(layer.weight)
    with torch.autocast(weight.device.type, enabled=False):
        form, spread = _spread(la)
    spread |= {"weight": weight, "bias": None if layer.bias is None else at_least_float32(layer.bias)}
    return Parts(form, la.hessian_structure, score, {**arrays, **copied(spread)})


def copied(arrays: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return copies, which later changes do not affect, without missing arrays."""
    contiguous = torch.contiguous_format
    return {name: a.detach().clone(memory_format=contiguous) for name, a in arrays.items() if a is not None}


@torch.no_grad()
def score_arrays(la: Any, p_value: bool | None = None) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the p-values' score, and the arrays that scores need besides the spread of the outputs.

    With ``p_value=None``, the arrays of p-values are there if ``la`` is calibrated.
    """
    check_exportable(la)
    like = at_least_float32(la.model.last_layer.weight)
    arrays: dict[str, Tensor | None] = {}
    if la.typical_norm is not None:
        arrays["typical_norm"] = torch.tensor(la.typical_norm, dtype=torch.float64, device=like.device)
    if la.class_centres is not None:
        arrays["centres"] = la.class_centres.centres.to(like)
        arrays["typical_ratio"] = torch.tensor(la.class_centres.typical, dtype=torch.float64, device=like.device)
    if p_value and la.known.calibration is None:
        raise NotFittedError(
            "p_value=True: la is not calibrated. Call la.calibrate(loader) with known inputs first, or leave p_value "
            "out to export mu, kappa and uncertainty alone."
        )
    calibration, score = None if p_value is False else present_calibration(la), NOVELTY
    if calibration is not None:
        if calibration.score.probe is not None:
            raise UnsupportedError(
                f"p_value: la is calibrated for the function {calibration.score.name!r}, which no file holds. Export "
                "with p_value=False, or calibrate for 'novelty' or 'uncertainty'."
            )
        calibration.score.check(example(la))
        reference, score = calibration.reference, calibration.score.name
        arrays |= {name: getattr(reference, name) for name in ("location", "scale", "statistics", "counts")}
        arrays["rounding"] = reference.statistics.new_tensor(reference.rounding)
        if calibration.gaussians is not None and score == NOVELTY:
            arrays |= {f"known_{name}": value for name, value in vars(calibration.gaussians).items()}
    return score, copied(arrays)


def _spread(la: Any) -> tuple[str, dict[str, Tensor | None]]:
    """Return the form of the covariance, and its arrays."""
    spread = la.output_spread()
    if isinstance(spread, DiagonalAtFeatures):
        dim, width = la.model.last_layer.weight.shape
        weights, bias = spread.variance.split([dim * width, len(spread.variance) - dim * width])
        return "diagonal", {"variance": weights.view(dim, width), "bias_variance": bias if len(bias) else None}
    if isinstance(spread, DenseAtFeatures):
        return "dense", {"covariance": spread.covariance}
    return "axes", {
        **{name: getattr(spread, name) for name in ("axes", "basis", "along", "across")},
        "common": spread.bias_covariance(),
    }

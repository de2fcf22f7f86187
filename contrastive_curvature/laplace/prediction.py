"""The Gaussian over raw outputs of the linearised encoder, for a posterior over weights.

The linearised encoder has the covariance ``J_i Sigma J_i^T`` at input i, with the Jacobian ``J_i`` (D, P) of its raw
outputs. All Jacobians of a batch may be far larger than the encoder, so only a chunk of them exists at a time; a
diagonal ``Sigma`` may need no Jacobian (:meth:`~contrastive_curvature.network.pullback.Pullback.output_covariance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from laplace.utils.enums import LinkApprox, PredType
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution, InvalidRowsError, with_invalid_rows
from contrastive_curvature.embedding.spread import Axes, Dense, Diagonal, Joint, Spread
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.network.inputs import Inputs, as_tensor, in_memory, slice_inputs, tokenized
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS, Pullback
from contrastive_curvature.pairs.relation import chunks
from contrastive_curvature.structures.at_features import (
    AtFeatures,
    AxesAtFeatures,
    DenseAtFeatures,
    DiagonalAtFeatures,
)

JOINT_ELEMENTS = 2**32
"""Numbers that ``joint=True`` may hold: the Jacobians of all inputs and their covariance; 16 GiB in float32."""

_POINTS_AT_ONCE = 16
"""Fewest inputs of one call of ``output_covariance``, which forms no Jacobian of all of them."""

OfJacobians = Callable[[Tensor], Tensor]
"""Covariances (C, A, A) of outputs, from Jacobians (C, A, P)."""


def parse_pred_type(value: PredType | str) -> PredType:
    """Turn ``"glm"`` or ``"nn"`` into laplace-torch's enumeration."""
    try:
        return PredType(value)
    except ValueError:
        raise InputError("pred_type", "'glm' or 'nn'", value) from None


def refuse_link(link_approx: object) -> None:
    """Refuse a link function; laplace-torch's own default passes."""
    if link_approx is not None and link_approx != LinkApprox.PROBIT:
        raise UnsupportedError(
            f"link_approx={str(link_approx)!r}: embeddings have no link function. Leave it out; pred_type chooses "
            "between the closed form ('glm') and sampled weights ('nn')."
        )


def read_inputs(model: Any, x: Any) -> Any:
    """Return a batch of inputs of all kinds of :func:`.in_memory`: a tensor, a mapping or a list of texts."""
    x = in_memory(x)
    return as_tensor(x, model) if isinstance(x, np.ndarray) else x


def moved_inputs(model: Any, x: Any, device: torch.device) -> Inputs:
    """Return inputs of all kinds of :func:`.in_memory` on a device; texts are tokenised first."""
    x = tokenized(model, read_inputs(model, x))
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, Mapping):
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in x.items()}
    hint = "Pass the inputs of one batch, as in [la(x) for x, _ in loader]; la.predict(loader) takes all of them."
    raise InputTypeError("x", "a tensor, an array, a mapping of tensors or texts", f"a {type(x).__name__}", hint)


def check_outputs(x: Inputs, z: Tensor, dim: int, *, sampled: bool = False) -> None:
    """Refuse inputs without finite raw outputs (B, D), or (S, B, D) for samples; linear layers accept all shapes."""
    tensors = {"": x} if isinstance(x, Tensor) else {k: v for k, v in x.items() if isinstance(v, Tensor)}
    if z.ndim != 2 + sampled or z.shape[-1] != dim:
        shapes = ", ".join(f"{key} {tuple(t.shape)}".strip() for key, t in tensors.items())
        wanted = f"inputs like those of the fit, with outputs of shape (B, {dim})"
        got = f"shape {shapes}, with outputs of shape {tuple(z.shape[sampled:])}"
        hint = "One axis, the first, is that of the batch: x[None] of one point."
        raise InputError("x", wanted, got, hint)
    # The sum of huge finite numbers overflows, so then each number is checked.
    if math.isfinite(z.sum().item()) or bool((good := z.detach().isfinite()).all()):
        return
    bad = (~good.all(dim=-1)).reshape(-1, z.shape[-2]).any(0)
    finite = all(bool(t.isfinite().all()) for t in tensors.values())
    hint = "The inputs themselves are finite." if finite else "The inputs hold NaN or infinity themselves."
    hint += " Leave them out, or call la(x, on_invalid='nan'), which gives NaN for these rows alone."
    got = f"NaN or infinity in rows {bad.nonzero().flatten()[:5].tolist()}"
    raise InvalidRowsError(bad, "x", "inputs with finite outputs", got, hint)


_SPREADS: dict[type, type[Any]] = {DiagonalAtFeatures: Diagonal, AxesAtFeatures: Axes, DenseAtFeatures: Dense}


def spread_at(posterior: AtFeatures, phi: Tensor) -> Spread:
    """Return the spread of the outputs of a last layer at features (B, F)."""
    spread: Spread = _SPREADS[type(posterior)](*posterior(phi))
    return spread


def distribution(z: Tensor, spread: Spread, diagonal: bool) -> EmbeddingDistribution:
    """Return the distribution with means (B, D) and a spread, or its variances alone."""
    return EmbeddingDistribution.trusted(z, Diagonal(spread.variance) if diagonal else spread)


def at_features(posterior: AtFeatures, like: Tensor, z: Tensor, phi: Tensor) -> EmbeddingDistribution:
    """Return the distribution at stored outputs (B, D) and features (B, F), of the dtype and device of the encoder."""
    z, phi = (at_least_float32(part.to(like)) for part in (z, phi))
    return distribution(z, spread_at(posterior, phi), diagonal=False)


def joint_distribution(z: Tensor, covariance: Tensor) -> EmbeddingDistribution:
    """Return the distribution with means (B, D) and a covariance (B D, B D) of all outputs together."""
    return EmbeddingDistribution.trusted(z, Joint(covariance.view(*z.shape, *z.shape)))


def with_nan_rows(
    predict: Callable[[Any], EmbeddingDistribution],
    x: Any,
    generator: torch.Generator | None,
    nothing: Callable[[], EmbeddingDistribution],
) -> EmbeddingDistribution:
    """Return the prediction of a batch, with NaN for inputs without an embedding; other rows do not depend on them.

    ``nothing`` returns the prediction of an empty batch.
    """
    valid: Tensor | None = None
    while valid is None or bool(valid.any()):
        # Saved, so that the next attempt draws the same networks.
        source = generator or torch.default_generator
        before = source.get_state()
        try:
            prediction = predict(x if valid is None else _rows(x, valid.nonzero().flatten()))
            _refuse_zeros(prediction.raw_mean)
        except InvalidRowsError as error:
            source.set_state(before)
            bad = error.rows.cpu()
            valid = torch.ones_like(bad) if valid is None else valid
            valid[valid.nonzero().flatten()[bad]] = False
        else:
            return prediction if valid is None else with_invalid_rows(prediction, valid)
    return with_invalid_rows(nothing(), valid)


def _refuse_zeros(mean: Tensor) -> None:
    zero = (mean.detach() == 0).all(1)
    if bool(zero.any()):
        raise InvalidRowsError(zero, "outputs of zeros have no direction")


def _rows(x: Any, rows: Tensor) -> Any:
    """Return some points of a batch; for an encoder with a tokenizer the points may be texts."""
    return [x[row] for row in rows.tolist()] if isinstance(x, (list, tuple)) else slice_inputs(x, rows)


def check_joint_size(n: int, dim: int, n_weights: int) -> None:
    """Refuse Jacobians (B, D, P) and a covariance between inputs of more than :data:`JOINT_ELEMENTS` numbers."""
    needed = n * dim * n_weights + (n * dim) ** 2
    if needed > JOINT_ELEMENTS:
        wanted = f"inputs whose Jacobians and covariance are at most {JOINT_ELEMENTS:,} numbers"
        shown = f"{n} inputs, {needed:,} numbers ({needed * 4 / 2**30:.0f} GiB in float32)"
        hint = "Use fewer inputs, or functional_samples(x, joint=True), which forms no Jacobian."
        raise InputError("joint=True", wanted, shown, hint)


def marginal_spread(
    pullback: Pullback, context: Any, z: Tensor, of_jacobians: OfJacobians, of_weights: Tensor | None, diagonal: bool
) -> Tensor:
    """Return covariances (B, D, D) or variances (B, D) of the outputs; ``of_weights`` are weight variances (P,)."""
    axes, parts = _axes(z), []
    # The Jacobian rows of a single point may already fill a chunk.
    pieces = axes.split(max(1, JACOBIAN_ELEMENTS // max(1, pullback.width))) if diagonal else (axes,)
    for rows in _point_chunks(pullback, len(z), z.shape[1], 1 if of_weights is None else _POINTS_AT_ONCE):
        if of_weights is None:
            spreads = [of_jacobians(_jacobians(pullback, context, rows, piece)) for piece in pieces]
        else:
            with torch.no_grad():
                spreads = [pullback.output_covariance(pullback.slice_context(context, rows), of_weights)]
        parts.append(torch.cat([part.diagonal(dim1=1, dim2=2) for part in spreads], dim=1) if diagonal else spreads[0])
    return torch.cat(parts)


def jacobians_of_all(pullback: Pullback, context: Any, z: Tensor) -> Tensor:
    """Return the Jacobians (B, D, P) of all points."""
    out, eye = z.new_empty(*z.shape, pullback.n_params), _axes(z)
    for rows in _point_chunks(pullback, *z.shape):
        out[rows] = _jacobians(pullback, context, rows, eye)
    return out


def _jacobians(pullback: Pullback, context: Any, rows: slice, axes: Tensor) -> Tensor:
    """Return rows of the Jacobians (C, A, P) of some points, for output axes (A, D)."""
    with torch.no_grad():
        return pullback.vjp(pullback.slice_context(context, rows), axes.expand(rows.stop - rows.start, -1, -1))


def _axes(z: Tensor) -> Tensor:
    return torch.eye(z.shape[1], dtype=z.dtype, device=z.device)


def _point_chunks(pullback: Pullback, n: int, dim: int, least: int = 1) -> list[slice]:
    """Return slices of n points whose Jacobians fit into one chunk; one empty slice if n = 0."""
    step = max(least, JACOBIAN_ELEMENTS // max(1, dim * pullback.width))
    return list(chunks(n, step)) or [slice(0, 0)]

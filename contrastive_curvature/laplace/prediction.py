"""The Gaussian over raw outputs that a posterior over weights gives the linearised encoder.

The linearised encoder has the covariance ``J_i Sigma J_i^T`` at input i, with the Jacobian ``J_i`` (D, P) of its raw
outputs. All Jacobians of a batch may be far larger than the encoder, so only a chunk of them exists at any time; a
diagonal ``Sigma`` may need none (:meth:`~contrastive_curvature.network.pullback.Pullback.output_covariance`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from laplace.utils.enums import LinkApprox, PredType
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import Axes
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.laplace.checks import check_finite_outputs, check_output_shape
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length, tokenized
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS, Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.progress import Progress

__all__ = [
    "FASTER",
    "JOINT_ELEMENTS",
    "check_joint_size",
    "distribution",
    "gaussian",
    "parse_pred_type",
    "refuse_link",
    "timed_chunks",
    "to_device",
]

JOINT_ELEMENTS = 2**32
"""Numbers that ``joint=True`` may hold: the Jacobians of all inputs and their covariance; 16 GiB in float32."""

FASTER = "Faster: subset_of_weights='last_layer', which needs no Jacobian; fewer inputs; or a GPU."
"""What a user can do about a long prediction."""

_POINTS_AT_ONCE = 16
"""Inputs of one call of ``output_covariance``, which bounds its own memory: few enough to measure the speed."""


def parse_pred_type(value: PredType | str) -> PredType:
    """Turn ``"glm"`` or ``"nn"`` into laplace-torch's enumeration.

    Raises:
        InputError: Neither of them.
    """
    try:
        return PredType(value)
    except ValueError:
        raise InputError(expected("pred_type", "'glm' or 'nn'", value)) from None


def refuse_link(link_approx: object) -> None:
    """Refuse a link function; laplace-torch's own default passes.

    Raises:
        UnsupportedError: There is one.
    """
    if link_approx is not None and link_approx != LinkApprox.PROBIT:
        msg = (
            f"link_approx={str(link_approx)!r}: embeddings have no link function. Leave it out; pred_type chooses "
            "between the closed form ('glm') and sampled weights ('nn')."
        )
        raise UnsupportedError(msg)


def to_device(la: Any, x: Inputs) -> Inputs:
    """Inputs on the device of the posterior, and texts as what its encoder takes in.

    Raises:
        InputTypeError: Neither a tensor nor a mapping, nor texts for an encoder with a tokenizer.
    """
    x = tokenized(la.model, x)
    if not isinstance(x, (Tensor, Mapping)):
        hint = "Pass the inputs of one batch, as in [la(x) for x, _ in loader]; torch.as_tensor(x) for a NumPy array."
        raise InputTypeError(expected("x", "a tensor or a mapping of tensors", f"a {type(x).__name__}", hint))
    if isinstance(x, Tensor):
        return x.to(la._device)
    return {k: v.to(la._device) if isinstance(v, Tensor) else v for k, v in x.items()}


def distribution(z: Tensor, covariance: Tensor | Axes, diagonal: bool) -> EmbeddingDistribution:
    """The distribution of embeddings, from means (B, D) and covariances (B, D, D) of the raw outputs.

    Args:
        z: Means.
        covariance: Covariances.
        diagonal: Whether to keep the variances alone.

    Returns:
        The distribution.
    """
    if not diagonal:
        return EmbeddingDistribution.trusted(z, covariance=covariance)
    if isinstance(covariance, Axes):
        return EmbeddingDistribution.trusted(z, variance=covariance.variance)
    return EmbeddingDistribution.trusted(z, variance=covariance.diagonal(dim1=1, dim2=2))


def gaussian(la: Any, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
    """The Gaussian over raw outputs of the linearised encoder, whatever the structure of the posterior.

    Args:
        la: A fitted posterior.
        x: A batch of B inputs.
        joint: Whether to keep the covariance between inputs.
        diagonal: Whether to compute the variances alone.

    Returns:
        The distribution.

    Raises:
        InputError: An input has no finite output, or ``joint`` needs more than :data:`JOINT_ELEMENTS` numbers.
    """
    x = to_device(la, x)
    if joint:
        check_joint_size(input_length(x), la.n_outputs, la._n_weights())
    if la.enable_backprop:
        # The graph leads through every Jacobian, so all of them have to be kept.
        jacobians, z = la.backend.jacobians(x, enable_backprop=True)
        check_output_shape(x, z, la.n_outputs)
        check_finite_outputs(x, z)
        if joint:
            return EmbeddingDistribution.trusted(z, joint_covariance=la.functional_covariance(jacobians))
        return distribution(z, la.functional_variance(jacobians), diagonal)
    with evaluation_mode(la.model):
        with torch.no_grad():
            pullback = la.backend.pullback(x)
            z, context = pullback.forward(x)
        check_output_shape(x, z, la.n_outputs)
        check_finite_outputs(x, z)
        if joint:
            jacobians = _all_jacobians(pullback, context, z)
            return EmbeddingDistribution.trusted(z, joint_covariance=la.functional_covariance(jacobians))
        parts = (_variances if diagonal else _covariances)(la, pullback, context, z)
        spread = torch.cat(list(parts))
    if diagonal:
        return EmbeddingDistribution.trusted(z, variance=spread)
    return EmbeddingDistribution.trusted(z, covariance=spread)


def check_joint_size(n: int, dim: int, n_weights: int) -> None:
    """Refuse a covariance between inputs that does not fit, before anything is computed.

    Args:
        n: Number B of inputs.
        dim: Number D of outputs.
        n_weights: Number P of weights in a Jacobian; zero where none is formed.

    Raises:
        InputError: More than :data:`JOINT_ELEMENTS` numbers.
    """
    needed = n * dim * n_weights + (n * dim) ** 2
    if needed > JOINT_ELEMENTS:
        wanted = f"inputs whose Jacobians and covariance are at most {JOINT_ELEMENTS:,} numbers"
        shown = f"{n} inputs, {needed:,} numbers ({needed * 4 / 2**30:.0f} GiB in float32)"
        hint = "Use fewer inputs, or functional_samples(x, joint=True), which forms no Jacobian."
        raise InputError(expected("joint=True", wanted, shown, hint))


def _covariances(la: Any, pullback: Pullback, context: Any, z: Tensor) -> Iterator[Tensor]:
    """Covariances (C, D, D) of the outputs, by chunks of points."""
    variance = _fixed_variance(la)
    if variance is None:
        eye = _axes(z)
        for rows in timed_chunks(pullback, *z.shape):
            yield la.functional_variance(_jacobians(pullback, context, rows, eye))
        return
    for rows in timed_chunks(pullback, len(z), z.shape[1], _POINTS_AT_ONCE):
        with torch.no_grad():
            yield pullback.output_covariance(pullback.slice_context(context, rows), variance)


def _variances(la: Any, pullback: Pullback, context: Any, z: Tensor) -> Iterator[Tensor]:
    """Variances (C, D) of the outputs, by chunks of points; and of outputs, where those of one point fill a chunk."""
    at_once = max(1, JACOBIAN_ELEMENTS // max(1, pullback.width))
    if z.shape[1] <= at_once or _fixed_variance(la) is not None:
        for covariance in _covariances(la, pullback, context, z):
            yield covariance.diagonal(dim1=1, dim2=2)
        return
    for rows in timed_chunks(pullback, *z.shape):
        jacobians = (_jacobians(pullback, context, rows, axes) for axes in _axes(z).split(at_once))
        yield torch.cat([la.functional_variance(j).diagonal(dim1=1, dim2=2) for j in jacobians], dim=1)


def _fixed_variance(la: Any) -> Tensor | None:
    """Variances (P,) of the weights of a diagonal posterior; ``None`` of others, and where they have a graph."""
    variance = la.posterior_variance if la.structure is Structure.DIAG else None
    return None if variance is None or variance.requires_grad else variance


def _all_jacobians(pullback: Pullback, context: Any, z: Tensor) -> Tensor:
    """Jacobians (B, D, P) of all points."""
    out, eye = z.new_empty(*z.shape, pullback.n_params), _axes(z)
    for rows in timed_chunks(pullback, *z.shape):
        out[rows] = _jacobians(pullback, context, rows, eye)
    return out


def _jacobians(pullback: Pullback, context: Any, rows: slice, axes: Tensor) -> Tensor:
    """Rows of the Jacobians (C, A, P) of some points, for output axes (A, D)."""
    with torch.no_grad():
        return pullback.vjp(pullback.slice_context(context, rows), axes.expand(rows.stop - rows.start, -1, -1))


def _axes(z: Tensor) -> Tensor:
    return torch.eye(z.shape[1], dtype=z.dtype, device=z.device)


def timed_chunks(pullback: Pullback, n: int, dim: int, least: int = 1) -> Iterator[slice]:
    """Slices of points whose Jacobians fit a chunk; the first is one point, from which the time of all is told.

    Args:
        pullback: The pullback.
        n: Number of points.
        dim: Number D of outputs.
        least: Least number of points a slice.

    Yields:
        Slices; a single one where all points fit.
    """
    fits = JACOBIAN_ELEMENTS // max(1, dim * pullback.width)
    if n <= max(1, fits):
        yield slice(0, n)
        return
    progress, started = Progress(False, FASTER), time.monotonic()
    start, step = 0, 1
    while start < n:
        stop = min(start + step, n)
        yield slice(start, stop)
        progress.extrapolate(started, stop, n, f"The prediction of {n} inputs")
        start, step = stop, max(least, fits, 1)

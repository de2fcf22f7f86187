"""The methods of ``optimize_prior_precision``: two closed forms, laplace-torch's marginal likelihood, and a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from laplace.utils.enums import PredType
from torch import Tensor
from tqdm import tqdm

from contrastive_curvature import metrics, validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace.checks import check_number, check_prior_precision
from contrastive_curvature.laplace.prior import PRIOR_STRUCTURES, STRENGTH, PriorMethod, average_information
from contrastive_curvature.laplace.sampling import sampled_weights
from contrastive_curvature.network.loader import check_batches, check_whole

__all__ = [
    "RetrievalCriterion",
    "check_method",
    "make_grid",
    "maximise_marginal_likelihood",
    "search_grid",
    "set_information",
]

RetrievalCriterion = Callable[[Tensor, Tensor], float]
"""``criterion(samples (S, N, D) on the sphere, labels (N,)) -> float``, the lower the better."""


def check_method(la: Any, method: PriorMethod | str, prior_structure: object, strength: object) -> PriorMethod:
    """Return the method as an enumeration, once it goes with the other options.

    Args:
        la: The posterior.
        method: What the user passed, as for the two that follow.
        prior_structure: ``"scalar"``, ``"layerwise"`` or ``"diag"``.
        strength: A positive number, or ``None``.

    Raises:
        InputError: An option is unknown, out of range or of no use to the method.
        UnsupportedError: The posterior takes no prior of this structure.
    """
    try:
        method = PriorMethod(method)
    except ValueError:
        known = ", ".join(repr(m.value) for m in PriorMethod)
        raise InputError(expected("method", f"one of {known}", method)) from None
    if strength is not None and method is not PriorMethod.AVERAGE_INFORMATION:
        hint = "It is for method='average_information'."
        raise InputError(expected(f"strength for {method.value!r}", "None", strength, hint))
    if strength is not None:
        check_number("strength", strength, positive=True)
    if prior_structure not in PRIOR_STRUCTURES:
        raise InputError(expected("prior_structure", f"one of {PRIOR_STRUCTURES}", prior_structure))
    if prior_structure not in la.prior_structures:
        msg = (
            f"prior_structure={prior_structure!r}: this structure of the posterior has room for "
            f"{la.prior_structures} only. Use one of these, or hessian_structure='diag'."
        )
        raise UnsupportedError(msg)
    return method


def make_grid(low: float, high: float, size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Values of the prior precision that a grid search tries, shape (size,).

    Args:
        low: Exponent of the first value.
        high: Exponent of the last value.
        size: Number of values.
        base: Base of the exponents.
        dtype: Of the encoder.

    Raises:
        InputError: An argument is malformed, or a value is not positive and finite in ``dtype``.
    """
    validate.count("grid_size", size)
    check_number("log_prior_prec_min", low, most=1e3)
    check_number("log_prior_prec_max", high, most=1e3)
    check_number("log_prior_prec_base", base, positive=True, most=1e30)
    grid = torch.logspace(low, high, size, base=base)
    if not bool(((grid.to(dtype) > 0) & grid.isfinite()).all()):
        wanted = f"exponents whose powers of {base:g} are positive and finite"
        raise InputError(expected("log_prior_prec_min, log_prior_prec_max", wanted, f"{low} and {high}"))
    return grid


def set_information(la: Any, method: PriorMethod, prior_structure: str, strength: float | None) -> None:
    """Set the prior precision to a multiple of the average information, and maybe the temperature.

    The temperature is ``T = 2 L / (N + gamma)``, with the loss ``L`` of all N points at the trained weights and the
    effective number ``gamma`` of parameters. ``2 L / N`` is the maximum-likelihood variance of a Gaussian whose
    log-likelihood is the loss, a sum of half squares. To second order a sampled network has on average the loss
    ``L + T gamma / 2``: with ``gamma`` in the denominator, this stays below ``2 L`` however many parameters there are.

    Args:
        la: A fitted posterior.
        method: ``AVERAGE_INFORMATION`` or ``UNIT_INFORMATION``.
        prior_structure: As checked by :func:`check_method`.
        strength: The multiple for ``AVERAGE_INFORMATION``; ``None`` for :data:`.STRENGTH`.

    Raises:
        InputError: The curvature is zero everywhere, is not positive semidefinite by rounding, or the prior precision
            leaves the numbers of the encoder's dtype. Prior and temperature are as they were.
    """
    prior = average_information(la.form.diagonal(la), la._parameter_sizes(), prior_structure)
    before = la.temperature
    try:
        if method is PriorMethod.UNIT_INFORMATION:
            la.prior_precision = prior * la._H_factor / la.n_data
            return
        prior = prior * (STRENGTH if strength is None else float(strength))
        if not la._temperature_given and float(la.cost) > 0:
            la.temperature = 2 * float(la.cost) / (la.n_data + la.form.effective_parameters(la, prior))
        la.prior_precision = prior * la._H_factor
    except BaseException:
        la.temperature = before
        raise


def maximise_marginal_likelihood(
    la: Any, optimize: Callable[..., None], n_steps: int, lr: float, start: float | Tensor, structure: str, bar: bool
) -> None:
    """laplace-torch's maximisation of the marginal likelihood; where it fails, the prior stays as it was.

    Args:
        la: A fitted posterior.
        optimize: laplace-torch's ``optimize_prior_precision``, bound to it.
        n_steps: Number of steps.
        lr: Learning rate.
        start: Prior precision of the first step.
        structure: Of the prior.
        bar: Whether to show a progress bar.

    Raises:
        InputError: An argument is malformed, or a step leaves the positive finite numbers.
    """
    validate.count("n_steps", n_steps)
    check_number("lr", lr, positive=True, most=1e30)
    check_prior_precision(start, la._dtype, la.prior_sizes(), "init_prior_prec")
    before = la.prior_precision
    try:
        optimize(PredType.GLM, "marglik", n_steps, float(lr), start, structure, progress_bar=bar)
    except InputError as error:
        la.prior_precision = before
        wanted = "a maximisation that stays among positive finite numbers"
        hint = "Use a smaller lr, or method='average_information'."
        raise InputError(expected("lr, n_steps, init_prior_prec", wanted, f"({error})", hint)) from None
    except BaseException:
        la.prior_precision = before
        raise


def search_grid(
    la: Any,
    grid: Tensor,
    val_loader: Iterable[Any] | None,
    prior_structure: str,
    loss: RetrievalCriterion | None,
    linearized: bool,
    n_samples: int,
    bar: bool,
) -> None:
    """Set the prior precision of a grid at which samples of embeddings retrieve best; else it stays as it was.

    Args:
        la: A fitted posterior.
        grid: Values to try.
        val_loader: Validation data, batches ``(x, labels)``.
        prior_structure: Must be ``"scalar"``.
        loss: The criterion, or ``None`` for :func:`contrastive_curvature.metrics.retrieval_brier`.
        linearized: Whether to sample outputs of the linearised encoder.
        n_samples: Number of samples.
        bar: Whether to show a progress bar.

    Raises:
        InputError: There are no validation data, the structure is another, or the criterion is no number anywhere.
    """
    if val_loader is None:
        raise InputError(expected("val_loader", "validation data for method='gridsearch'", None))
    if prior_structure != "scalar":
        hint = "Use method='unit_information' or 'marglik' for others."
        raise InputError(expected("prior_structure", "'scalar' for method='gridsearch'", prior_structure, hint))
    if loss is not None and not callable(loss):
        raise InputTypeError(expected("loss", "a callable (samples, labels) -> float", f"a {type(loss).__name__}"))
    check_batches(val_loader, "val_loader")
    check_whole(val_loader, "val_loader")
    contexts, labels = [], []
    for batch in val_loader:
        x, y = la.backend.read(batch)
        contexts.append(la._sampling_context(x))
        labels.append(y)
    if not contexts:
        raise InputError(expected("val_loader", "at least one batch", "an empty loader"))
    targets, before, scores = torch.cat(labels), la.prior_precision, []
    try:
        for value in tqdm(grid, desc="[prior grid]", disable=not bar):
            la.prior_precision = value
            samples = _embedding_samples(la, contexts, linearized, n_samples)
            scores.append(_score(loss or metrics.retrieval_brier, samples, targets))
    finally:
        la.prior_precision = before
    numbers = [(score, place) for place, score in enumerate(scores) if not math.isnan(score)]
    if not numbers:
        raise InputError(expected("loss", "a criterion that is a number somewhere on the grid", "NaN everywhere"))
    la.prior_precision = grid[min(numbers)[1]].reshape(1)


def _embedding_samples(la: Any, contexts: list[Any], linearized: bool, n_samples: int) -> Tensor:
    """Embeddings (S, N, D) of all batches, of the same S networks."""
    # The same random numbers for every value, so that the criterion compares priors and not draws.
    generator = torch.Generator(la._device).manual_seed(0)
    samples = []
    for theta in sampled_weights(la, n_samples, generator):
        raw = torch.cat([la._outputs_at(context, theta, linearized) for context in contexts], dim=1)
        samples.append(normalize(raw.flatten(0, 1))[0].view_as(raw))
    return torch.cat(samples)


def _score(criterion: RetrievalCriterion, samples: Tensor, targets: Tensor) -> float:
    value = criterion(samples, targets)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(expected("loss", "a number from it", f"a {type(value).__name__}")) from None

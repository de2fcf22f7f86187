"""The scale of the prior, the strongest influence on the uncertainties of a contrastive encoder.

Two closed forms, laplace-torch's marginal likelihood, and a grid choose the scale. The temperature follows from the
effective number of parameters, ``gamma = tr(H (H + D)^-1)`` for a curvature ``H`` and a prior precision ``D``, both at
the temperature 1 (MacKay, 1992, "Bayesian interpolation", section 4).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import StrEnum
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature import metrics, validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.network.loader import check_loader, check_not_empty, in_fixed_order
from contrastive_curvature.options import parse_option
from contrastive_curvature.posterior.predict import LinearizedEncoder, on_sphere, samples_at
from contrastive_curvature.posterior.value import Posterior
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures.structure import Structure

PRIOR_STRUCTURES = ("scalar", "layerwise", "diag")
"""One prior precision in all, one a parameter tensor, or one a parameter."""

STRENGTH = 0.01
"""The default prior precision over the average information. Measured: ``docs/defaults.md``."""

NOTHING_POSITIVE = (
    "The negative pairs push more than the positive ones pull, as before training. Train the encoder further, or use a "
    "smaller negative_weight or margin (backend_kwargs), or hessian_structure='diag' with pd_fix='positive'."
)
"""Why the positive part of a curvature is zero, and what to do."""

NO_GRADIENT = (
    "It is zero before it is clamped, too: no gradient reaches the weights, as where forward computes under "
    "torch.no_grad() or detaches a tensor, or the pairs cancel. Remove what stops the gradient; a last layer "
    "(subset_of_weights='last_layer') needs none."
)
"""Why a curvature is zero before it is clamped, and what to do."""


def why_zero(curvature: Structure, last_layer: bool) -> str:
    """Return why the positive part of a curvature is zero, and what to do; a last layer needs no gradient."""
    return NOTHING_POSITIVE if last_layer or bool(curvature.traces().any()) else NO_GRADIENT


RetrievalCriterion = Callable[[Tensor, Tensor], float]
"""``criterion(samples (S, N, D) on the sphere, labels (N,)) -> float``, the lower the better."""


class PriorMethod(StrEnum):
    """Ways to choose the prior precision."""

    AVERAGE_INFORMATION = "average_information"
    """A hundredth of the information of the data on the average weight, at the temperature that the loss itself
    suggests. The default: closed form, no validation data."""

    UNIT_INFORMATION = "unit_information"
    """The information of one average observation (Kass and Wasserman, 1995), at the present temperature."""

    MARGLIK = "marglik"
    """laplace-torch's own: maximise the Laplace marginal likelihood."""

    GRIDSEARCH = "gridsearch"
    """Minimise a retrieval criterion on validation data over a grid."""


def average_information(diagonal: Tensor, sizes: list[int], structure: str, why: str = NOTHING_POSITIVE) -> Tensor:
    """Return the mean diagonal of the curvature: the information of the data on the average weight.

    This prior adapts to the scale of the loss, the scale of the outputs and the number of data: if the curvature is
    multiplied by a number, so is the prior. Divided by the number of observations it is the unit-information prior.

    Args:
        diagonal: Non-negative diagonal of the fitted curvature, likelihood factor included, shape (P,).
        sizes: Number of entries of every parameter tensor, summing to P.
        structure: ``"scalar"``: one mean over all parameters; ``"layerwise"``: one mean for each parameter tensor;
            ``"diag"``: for each parameter, half its own entry plus half the mean, so that no precision is zero.
        why: Why the diagonal would be zero, for the message.

    Returns:
        Shape (1,), (number of tensors,) or (P,).

    Raises:
        InputError: The curvature is zero everywhere.
    """
    if not bool((diagonal > 0).any()):
        hint = f"{why} Or set la.prior_precision by hand."
        raise InputError("curvature", "a positive entry somewhere on its diagonal", "zero everywhere", hint)
    mean = diagonal.mean()
    if structure == "scalar":
        return mean.reshape(1)
    if structure == "layerwise":
        parts = torch.stack([part.mean() for part in diagonal.split(sizes)])
        return torch.where(parts > 0, parts, mean)
    return (diagonal + mean) / 2


def parse_method(
    method: PriorMethod | str, prior_structure: str, strength: object, room: tuple[str, ...]
) -> PriorMethod:
    """Return the method as an enumeration; refuse it if it does not fit the other options or the structure."""
    method = parse_option(PriorMethod, "method", method)
    if strength is not None:
        if method is not PriorMethod.AVERAGE_INFORMATION:
            hint = "It is for method='average_information'."
            raise InputError(f"strength for {method.value!r}", "None", strength, hint)
        validate.number("strength", strength, positive=True)
    validate.choice("prior_structure", prior_structure, PRIOR_STRUCTURES)
    if prior_structure not in room:
        raise UnsupportedError(
            f"prior_structure={prior_structure!r}: this structure of the posterior has room for {room} only. Use one "
            "of these, or hessian_structure='diag'."
        )
    return method


def make_grid(low: float, high: float, size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return the prior precisions that a grid search tries, shape (size,): powers of ``base``."""
    validate.count("grid_size", size)
    for name, value in (("log_prior_prec_min", low), ("log_prior_prec_max", high)):
        validate.number(name, value, signed=True)
    validate.number("log_prior_prec_base", base, positive=True)
    grid = torch.logspace(low, high, size, base=base, dtype=torch.float32, device="cpu")
    if not bool(((grid.to(dtype) > 0) & grid.isfinite()).all()):
        wanted = f"exponents whose powers of {base:g} are positive and finite"
        raise InputError("log_prior_prec_min, log_prior_prec_max", wanted, f"{low} and {high}")
    return grid


def informed(
    posterior: Posterior, method: PriorMethod, prior_structure: str, strength: float | None, last_layer: bool
) -> Posterior:
    """Return the posterior whose prior precision is a multiple of the average information.

    The temperature, unless the user chose one, is ``T = 2 L / (N + gamma)``, with the loss ``L`` of all N points at the
    trained weights and the effective number ``gamma`` of parameters. ``2 L / N`` is the maximum-likelihood variance of
    a Gaussian whose log-likelihood is the loss, a sum of half squares. To second order a sampled network has on average
    the loss ``L + T gamma / 2``. Because ``gamma`` is in the denominator of ``T``, this stays below ``2 L`` for any
    number of parameters. If the loss is zero, the temperature does not change.
    """
    fitted, temperature = posterior.fitted, posterior.prior.temperature
    why = why_zero(fitted.curvature, last_layer)
    precision = average_information(fitted.clamped.diagonal(), fitted.sizes, prior_structure, why)
    if method is PriorMethod.UNIT_INFORMATION:
        precision = precision / fitted.n
    else:
        precision = precision * (STRENGTH if strength is None else float(strength))
        if not posterior.prior.keeps_temperature:
            if fitted.cost > 0:
                gamma = fitted.clamped.effective_parameters(precision)
                temperature = check_temperature(2 * fitted.cost / (fitted.n + gamma), fitted.mean.dtype)
            else:
                _say_no_cost(temperature)
    # The prior is divided by the temperature, like the curvature, so that the temperature scales the whole covariance.
    precision = (precision / temperature).to(fitted.mean)
    check_prior("prior_precision", precision, precision.dtype, None)
    return posterior.with_prior(replace(posterior.prior, precision=precision, temperature=temperature, chosen=True))


def _say_no_cost(temperature: float | Tensor) -> None:
    """Warn that a fit with zero loss cannot determine the temperature."""
    msg = (
        "optimize_prior_precision: la.cost is 0, as where all positives coincide and every negative is beyond the "
        f"margin, so it does not say how uncertain the encoder is. The temperature stays {temperature:g}: the sizes of "
        "variances and of uncertainty mean nothing; rankings and p-values do not depend on it. Choose it with "
        "la.temperature=..., or fit on data that the encoder does not fit perfectly."
    )
    warnings.warn(msg, UserWarning, stacklevel=4)


def best_of_grid(
    posterior: Posterior,
    read: LinearizedEncoder,
    grid: Tensor,
    val_loader: Iterable[Any] | None,
    prior_structure: str,
    loss: RetrievalCriterion | None,
    linearized: bool,
    n_samples: int,
    bar: bool,
) -> Posterior:
    """Return the posterior with the prior precision of a grid at which sampled embeddings retrieve best."""
    if val_loader is None:
        raise InputError("val_loader", "validation data for method='gridsearch'", None)
    if prior_structure != "scalar":
        hint = "Use method='unit_information' or 'marglik' for others."
        raise InputError("prior_structure", "'scalar' for method='gridsearch'", prior_structure, hint)
    if loss is not None and not callable(loss):
        raise InputTypeError("loss", "a callable (samples, labels) -> float", f"a {type(loss).__name__}")
    check_loader(val_loader, "val_loader", once=True)
    contexts, labels = [], []
    for batch in in_fixed_order(val_loader, "val_loader"):
        x, y = read.backend.read(batch)
        contexts.append(read.sampling_context(x))
        labels.append(y)
    check_not_empty(len(contexts), "val_loader")
    targets, mean = torch.cat(labels), posterior.fitted.mean

    def at(value: Tensor) -> Posterior:
        return posterior.with_prior(replace(posterior.prior, precision=value.reshape(1).to(mean), chosen=True))

    def score(value: Tensor) -> float:
        # Every value uses the same random numbers, so that the criterion compares priors, not draws.
        generator = torch.Generator(mean.device).manual_seed(0)
        samples = samples_at(at(value), read, contexts, n_samples, generator, linearized=linearized)
        return float((loss or metrics.retrieval_brier)(on_sphere(samples), targets))

    scores = [score(value) for value in Progress(bar).over(grid, "[prior grid]")]
    numbers = [(score, place) for place, score in enumerate(scores) if not math.isnan(score)]
    if not numbers:
        raise InputError("loss", "a criterion that is a number somewhere on the grid", "NaN everywhere")
    return at(grid[min(numbers)[1]])


def check_prior(
    argument: str, value: object, dtype: torch.dtype, sizes: Collection[int] | None, *, positive: bool = True
) -> None:
    """Refuse a malformed prior precision (or, with ``positive=False``, prior mean).

    Args:
        argument: Name of the argument.
        value: A number, or a tensor of at most one dimension.
        dtype: Dtype of the encoder; a number that underflows to zero in it is refused.
        sizes: Allowed numbers of entries (one is always allowed); ``None`` if they are not known yet.
        positive: Whether zero and negative numbers are refused.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            wanted = f"a {'positive' if positive else 'finite'} number or a tensor of them"
            hint = "Wrap it with torch.tensor(...)." if isinstance(value, (list, tuple)) else ""
            raise InputTypeError(argument, wanted, f"a {type(value).__name__}", hint)
        value = torch.tensor(float(value), dtype=dtype, device="cpu")
    if value.is_complex() or value.dtype == torch.bool:
        raise InputTypeError(argument, "real numbers", f"a tensor of {value.dtype}")
    values = value.detach().to(dtype)
    if values.ndim > 1 or not values.numel():
        raise InputError(argument, "a number or shape (K,), not empty", f"shape {tuple(values.shape)}")
    if sizes is not None and values.numel() not in {1, *sizes}:
        room = " or ".join(str(size) for size in sorted({1, *sizes}))
        raise InputError(argument, f"{room} entries", f"{values.numel()}")
    good = values.isfinite() & (values > 0) if positive else values.isfinite()
    if not bool(good.all()):
        wanted = f"positive numbers, finite in {dtype}" if positive else f"finite numbers in {dtype}"
        shown = f"{float(values)}" if values.numel() == 1 else f"{int((~good).sum())} others"
        raise InputError(argument, wanted, shown)


def check_temperature(value: object, dtype: torch.dtype) -> float | Tensor:
    """Return a temperature, a tensor if it has a gradient; its inverse has to be positive and finite in a dtype."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad):
        value = value.item()
    number = validate.hyperparameter("temperature", value, positive=True)
    inverse = torch.ones((), dtype=dtype, device="cpu") / validate.without_graph(number)
    if not bool(inverse.isfinite()) or not bool(inverse > 0):
        raise InputError(
            "temperature", f"a number whose inverse is positive and finite in {dtype}", validate.without_graph(number)
        )
    return number

"""The probability that two embeddings match, a logistic function of their distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hedged._checks import check_points, check_slope
from contrastive_curvature.vmf._checks import broadcast_batch

__all__ = ["MatchParameters", "inverse_softplus", "log_mean", "match_logits", "match_probability", "pair_logits"]


def inverse_softplus(value: float) -> float:
    """Return ``log(exp(value) - 1)`` of a positive number, in a form that does not overflow."""
    return value + math.log(-math.expm1(-value))


class MatchParameters(nn.Module):
    """The two learned numbers of the match probability: ``a = softplus(raw_a) > 0``, and ``b``.

    Calling it returns the tensors ``(a, b)``, through which gradients flow.

    Args:
        a: First value of the slope, > 0.
        b: First value of the intercept, any finite number. At distance ``b / a`` a match is as likely as not.

    Raises:
        InputTypeError: One is not a number.
        InputError: One is not finite, or ``a`` is not positive, in torch's default dtype.

    Source: "Hedged instance embedding", Eq. 2, which asks for ``a > 0`` and does not say how. Neither does it give
    first values.
    """

    def __init__(self, a: float = 1.0, b: float = 0.0) -> None:
        super().__init__()
        validate.number("a", a, positive=True)
        check_slope(a, b)
        self.raw_a = nn.Parameter(torch.tensor(inverse_softplus(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))
        # Again as they come back: the parameters have the default dtype, which may be too narrow for the numbers.
        check_slope(*self())

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return ``(a, b)``."""
        return softplus(self.raw_a), self.b


def match_logits(z1: Tensor, z2: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """Return the logit of the match probability of points, ``-a |z1 - z2| + b``.

    Args:
        z1: Points, shape (..., D).
        z2: Points, shape (..., D), whose batch shape broadcasts.
        a: Slope per unit of distance, > 0.
        b: Intercept.

    Returns:
        Logits with the broadcast batch shape. The gradient at distance 0 is 0.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, or ``a`` is
            not positive.

    Source: "Hedged instance embedding", Eq. 2, which prints ``a |z1 - z2| + b``: with ``a > 0`` the probability of a
    match would grow with the distance.
    """
    check_slope(a, b)
    first, second = check_points("z1", z1), check_points("z2", z2)
    _check_dims(z1=first, z2=second)
    broadcast_batch(z1=(first, 1), z2=(second, 1))
    return b - a * torch.linalg.vector_norm(first - second, dim=-1)


def pair_logits(samples1: Tensor, samples2: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """Return the logits of all pairs of samples of two embeddings.

    Args:
        samples1: Samples of the first embedding, shape (..., K1, D).
        samples2: Samples of the second, shape (..., K2, D), whose batch shape broadcasts.
        a: Slope, > 0.
        b: Intercept.

    Returns:
        Shape (..., K1, K2).

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: As :func:`match_logits`.
    """
    check_slope(a, b)
    first, second = check_points("samples1", samples1, samples=True), check_points("samples2", samples2, samples=True)
    _check_dims(samples1=first, samples2=second)
    broadcast_batch(samples1=(first, 2), samples2=(second, 2))
    # torch.cdist computes |x|^2 + |y|^2 - 2 x y for many samples, which cancels where they are close.
    return b - a * torch.linalg.vector_norm(first.unsqueeze(-2) - second.unsqueeze(-3), dim=-1)


def match_probability(samples1: Tensor, samples2: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """Return the Monte Carlo estimate of the probability that two uncertain embeddings match.

    The mean of ``sigmoid(-a |z1 - z2| + b)`` over all ``K1 * K2`` pairs of samples: unbiased where the samples of one
    embedding are independent of the other's. Of an embedding with itself, two sets of samples are needed;
    :func:`~contrastive_curvature.hedged.self_mismatch` draws them.

    Args:
        samples1: Samples of the first embedding, shape (..., K1, D); a point is one sample.
        samples2: Samples of the second, shape (..., K2, D), whose batch shape broadcasts.
        a: Slope per unit of distance, > 0.
        b: Intercept.

    Returns:
        Probabilities with the broadcast batch shape. The work needs ``K1 * K2 * D`` numbers for each pair of
        embeddings.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, or ``a`` is
            not positive.

    Source: "Hedged instance embedding", Eq. 2, 4 and 5 (with the sign of :func:`match_logits`).
    """
    return torch.sigmoid(pair_logits(samples1, samples2, a, b)).mean((-2, -1))


def log_mean(logits: Tensor, matches: Tensor) -> Tensor:
    """Return the log of the mean probability of what is so, match or mismatch, over the last two axes.

    Args:
        logits: Logits of a match, shape (..., K1, K2).
        matches: What is so, booleans (...).

    Returns:
        Shape (...), finite also where the probability itself is too small for its dtype.
    """
    signed = torch.where(matches[..., None, None], logits, -logits)
    return torch.logsumexp(logsigmoid(signed), (-2, -1)) - math.log(logits.shape[-1] * logits.shape[-2])


def _check_dims(**points: Tensor) -> None:
    dims = {name: value.shape[-1] for name, value in points.items()}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {dim}" for name, dim in dims.items())
        raise InputError(expected(", ".join(points), "one dimension D", shown))

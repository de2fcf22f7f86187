"""Contrastive losses of pairs of points: with a soft threshold that is learned, and with a hard margin."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hedged._checks import check_matches, check_points, reduced
from contrastive_curvature.hedged.match import match_logits
from contrastive_curvature.vmf._checks import broadcast_batch

__all__ = ["hard_contrastive_loss", "soft_contrastive_loss"]


def soft_contrastive_loss(
    z1: Tensor,
    z2: Tensor,
    matches: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the negative log-probability of what is so of each pair of points: that it matches, or that it does not.

    With ``p = sigmoid(-a |z1 - z2| + b)``: ``-log p`` of a match, ``-log(1 - p)`` of a mismatch.

    Args:
        z1: Points, shape (..., D).
        z2: Points, shape (..., D), whose batch shape broadcasts.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.

    Returns:
        The loss (in nats): a scalar, or the batch shape with ``"none"``.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, ``a`` is not
            positive, ``reduction`` is unknown, or the mean over no pairs is asked for.

    Source: "Hedged instance embedding", Eq. 2 and 3 (with the sign of
    :func:`~contrastive_curvature.hedged.match_logits`).
    """
    logits = match_logits(z1, z2, a, b)
    so = check_matches(matches, logits.shape, logits.device)
    return reduced(-logsigmoid(torch.where(so, logits, -logits)), reduction)


def hard_contrastive_loss(
    z1: Tensor,
    z2: Tensor,
    matches: Tensor,
    margin: float = 1.0,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the contrastive loss with a hard margin, of points that need not be on the sphere.

    ``|z1 - z2|^2`` of a match, ``max(margin - |z1 - z2|, 0)^2`` of a mismatch.
    :class:`~contrastive_curvature.losses.ContrastiveLoss`, the library's own, has unit vectors and another term for a
    mismatch.

    Args:
        z1: Points, shape (..., D).
        z2: Points, shape (..., D), whose batch shape broadcasts.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        margin: Distance from which a mismatch costs nothing, > 0.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.

    Returns:
        The loss (in squared units of the embedding): a scalar, or the batch shape with ``"none"``. The gradient of a
        mismatch at distance 0 is 0.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, ``margin`` is
            not positive, ``reduction`` is unknown, or the mean over no pairs is asked for.

    Source: "Hedged instance embedding", Eq. 1 (Hadsell et al. 2006).
    """
    margin = validate.number("margin", margin, positive=True)
    first, second = check_points("z1", z1), check_points("z2", z2)
    if first.shape[-1] != second.shape[-1]:
        raise InputError(expected("z1, z2", "one dimension D", f"z1 {first.shape[-1]}, z2 {second.shape[-1]}"))
    broadcast_batch(z1=(first, 1), z2=(second, 1))
    between = first - second
    so = check_matches(matches, between.shape[:-1], between.device)
    far = (margin - torch.linalg.vector_norm(between, dim=-1)).clamp(min=0)
    return reduced(torch.where(so, between.square().sum(-1), far.square()), reduction)

"""What a vector store keeps of embeddings: mean direction, concentration, uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import Diagonal
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_embeddings, check_scores

__all__ = ["StoredEmbeddings", "read_embeddings"]


@dataclass(frozen=True, eq=False)
class _Stored(Diagonal):
    """Equal variances in all directions, and the numbers (N,) that they come from."""

    kappa: Tensor
    uncertainty: Tensor

    def concentration(self, mean: Tensor) -> Tensor:
        """Return the concentrations as they were given."""
        return self.kappa


class StoredEmbeddings(EmbeddingDistribution):
    """Embeddings of which only mean direction, concentration and uncertainty are known.

    It stands wherever an :class:`.EmbeddingDistribution` does. Of the covariance, one number is left: the outputs are a
    Gaussian around ``mu`` with equal variances in all directions, whose concentration is ``kappa``.

    Args:
        mu: Mean directions, of any norm, shape (N, D), D >= 2.
        kappa: Concentrations, >= 0, shape (N,).
        uncertainty: Uncertainties, >= 0, shape (N,); any score that is larger for less certain embeddings.

    Raises:
        InputTypeError: An argument is not a tensor of real numbers.
        InputError: Shapes or devices disagree, a number is not finite or is negative, or a row of ``mu`` is zero.
    """

    spread: _Stored

    def __init__(self, mu: Tensor, kappa: Tensor, uncertainty: Tensor) -> None:
        checked = check_embeddings("mu", mu)
        if checked.shape[1] < 2:
            raise InputError(expected("mu", "shape (N, D) with D >= 2", f"shape {tuple(checked.shape)}"))
        if checked.dtype in (torch.float16, torch.bfloat16):
            checked = checked.float()
        direction = normalize(checked)[0]
        numbers = _not_negative("kappa", kappa, direction), _not_negative("uncertainty", uncertainty, direction)
        each = tangential_variance_of(numbers[0], direction.shape[1]) / (direction.shape[1] - 1)
        super().__init__(direction, variance=each.to(direction).unsqueeze(1).expand_as(direction))
        self.spread = _Stored(self.variance, *numbers)

    @classmethod
    def of(cls, embeddings: EmbeddingDistribution) -> StoredEmbeddings:
        """What a store keeps of a prediction ``la(x)``.

        Fit a :class:`.MatchProbability` on such embeddings if it is later asked about those from a store.

        Args:
            embeddings: The prediction.

        Raises:
            InputTypeError: It is no EmbeddingDistribution.
            InputError: A concentration or an uncertainty is not finite.
        """
        if not isinstance(embeddings, EmbeddingDistribution):
            wanted = "an EmbeddingDistribution, such as la(x)"
            raise InputTypeError(expected("embeddings", wanted, f"a {type(embeddings).__name__}"))
        if isinstance(embeddings, StoredEmbeddings):
            return embeddings
        with torch.no_grad():
            mu, kappa = embeddings
            return cls(mu, kappa, embeddings.uncertainty)

    @property
    def uncertainty(self) -> Tensor:
        """Uncertainties as they were given, shape (N,)."""
        return self.spread.uncertainty

    @property
    def mu(self) -> Tensor:
        """Mean directions, unit vectors, shape (N, D)."""
        return self.raw_mean

    def __repr__(self) -> str:
        """Number and dimension of the embeddings."""
        return f"StoredEmbeddings({self.raw_mean.shape[0]} embeddings in {self.raw_mean.shape[1]} dimensions)"


def read_embeddings(argument: str, value: object) -> StoredEmbeddings:
    """Read a prediction, or a tuple of vectors, concentrations and uncertainties.

    Raises:
        InputTypeError: It is neither.
        InputError: A shape or a number is wrong.
    """
    if isinstance(value, EmbeddingDistribution):
        if not len(value.raw_mean):
            raise InputError(expected(argument, "at least one embedding", "none"))
        return StoredEmbeddings.of(value)
    if isinstance(value, tuple) and len(value) == 3:
        return StoredEmbeddings(*value)
    shown = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
    wanted = "an EmbeddingDistribution, such as la(x), or a tuple (vectors, kappa, uncertainty)"
    raise InputTypeError(expected(argument, wanted, shown))


def tangential_variance_of(kappa: Tensor, dim: int) -> Tensor:
    """Return the tangential variance whose concentration is ``kappa``: the inverse of ``concentration_of_variance``.

    With ``s = sqrt(1 + tv)``, the concentration is ``(D s^2 - 1) / (s (s^2 - 1))``, which falls as s grows. The root is
    bracketed by halving in ``log(s - 1)``, where tiny variances keep their digits.

    Args:
        kappa: Concentrations >= 0, shape (N,).
        dim: Dimension D.

    Returns:
        Float64, shape (N,), finite: at most about 1e16.
    """
    # Below 1e-6 the direction is uniform to every digit that anything here computes.
    wanted = kappa.double().clamp(min=1e-6 * dim)
    low, high = torch.full_like(wanted, -100.0), torch.full_like(wanted, 20.0)
    for _ in range(60):
        middle = (low + high) / 2
        beyond = middle.exp()
        s = 1 + beyond
        reached = (dim * s * s - 1) / (s * beyond * (2 + beyond))
        too_wide = reached < wanted
        low, high = torch.where(too_wide, low, middle), torch.where(too_wide, middle, high)
    beyond = low.exp()
    return beyond * (2 + beyond)


def _not_negative(name: str, value: object, like: Tensor) -> Tensor:
    checked = check_scores(name, value, len(like))
    if checked.device != like.device:
        raise InputError(expected(name, f"device {like.device}, that of the vectors", str(checked.device)))
    if bool((checked < 0).any()):
        raise InputError(expected(name, "numbers >= 0", f"a smallest of {float(checked.min()):g}"))
    rounded = checked.to(like.dtype)
    if not bool(rounded.isfinite().all()):
        raise InputError(expected(name, f"numbers that {like.dtype} can hold", f"{float(checked.max()):g}"))
    return rounded

"""Embeddings in a vector store: mean direction, concentration, uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import Diagonal
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_embeddings, check_scores


@dataclass(frozen=True, eq=False)
class _Stored(Diagonal):
    """Equal variances in all directions, with the stored concentrations and uncertainties, shape (N,) each."""

    kappa: Tensor
    uncertainty: Tensor


class StoredEmbeddings(EmbeddingDistribution):
    """Embeddings with only mean direction, concentration and uncertainty.

    It can replace any :class:`.EmbeddingDistribution`. The outputs are a Gaussian around ``mu`` with equal variances in
    all directions, chosen so that the concentration is ``kappa``.

    Args:
        mu: Mean directions, of any norm, shape (N, D), D >= 2.
        kappa: Concentrations, >= 0, shape (N,).
        uncertainty: Uncertainties, >= 0, shape (N,); any score that is larger for less certain embeddings.

    Raises:
        InputTypeError: An argument is not a tensor of real numbers.
        InputError: Shapes disagree, a number is not finite or is negative, or a row of ``mu`` is zero.
    """

    spread: _Stored

    def __init__(self, mu: Tensor, kappa: Tensor, uncertainty: Tensor) -> None:
        direction = normalize(check_embeddings("mu", mu))[0]
        dim = direction.shape[1]
        if dim < 2:
            raise InputError("mu", "shape (N, D) with D >= 2", f"shape {tuple(direction.shape)}")
        numbers = _not_negative("kappa", kappa, direction), _not_negative("uncertainty", uncertainty, direction)
        variance = (tangential_variance_of(numbers[0], dim) / (dim - 1)).to(direction)
        super().__init__(direction, variance=variance.unsqueeze(1).expand_as(direction))
        self.spread = _Stored(self.variance, *numbers)

    @classmethod
    def of(cls, embeddings: EmbeddingDistribution) -> StoredEmbeddings:
        """Return the stored form of a prediction ``la(x)``.

        If you later use a :class:`.MatchProbability` on stored embeddings, fit it on stored embeddings too.

        Args:
            embeddings: The prediction.

        Raises:
            InputTypeError: ``embeddings`` is not an EmbeddingDistribution.
            InputError: A concentration or an uncertainty is not finite.
        """
        if not isinstance(embeddings, EmbeddingDistribution):
            wanted = "an EmbeddingDistribution, such as la(x)"
            raise InputTypeError("embeddings", wanted, f"a {type(embeddings).__name__}")
        if isinstance(embeddings, StoredEmbeddings):
            return embeddings
        with torch.no_grad():
            mu, kappa = embeddings
            return cls(mu, kappa, embeddings.uncertainty)

    @property
    def kappa(self) -> Tensor:
        """The stored concentrations, shape (N,)."""
        return self.spread.kappa

    @property
    def uncertainty(self) -> Tensor:
        """The stored uncertainties, shape (N,)."""
        return self.spread.uncertainty

    @property
    def mu(self) -> Tensor:
        """Mean directions, unit vectors, shape (N, D)."""
        return self.raw_mean

    def __repr__(self) -> str:
        """Return the number and the dimension of the embeddings."""
        return f"StoredEmbeddings({self.raw_mean.shape[0]} embeddings in {self.raw_mean.shape[1]} dimensions)"


def tangential_variance_of(kappa: Tensor, dim: int) -> Tensor:
    """Return the tangential variances (N,), float64, of the concentrations ``kappa`` (N,).

    This inverts ``concentration_of_variance``. With ``s = sqrt(1 + tv)``, the concentration is
    ``(D s^2 - 1) / (s (s^2 - 1))``, which falls as s grows. Bisection in ``log(s - 1)`` finds the root, so tiny
    variances keep their digits. The result is finite, at most about 1e16.
    """
    # Below 1e-6 the direction counts as uniform: no digit of any result changes.
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


def _not_negative(name: str, value: Tensor, like: Tensor) -> Tensor:
    """Return finite numbers >= 0, one for each row of ``like``, in its dtype."""
    checked = check_scores(name, value, len(like)).to(like)
    if not bool((checked.isfinite() & (checked >= 0)).all()):
        got = f"{float(checked.min()):g} to {float(checked.max()):g}"
        raise InputError(name, f"numbers >= 0 that {like.dtype} can hold", got)
    return checked

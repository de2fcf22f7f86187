"""What a pair of embeddings shows: its cosine, the spread of the angle between the two, and both uncertainties."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.embedding.directions import Directions, directions
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_embeddings

__all__ = ["Side", "check_sides", "pair_features"]

_EQUAL = 8 * torch.finfo(torch.float64).eps
"""Between unit vectors that are no further apart, or from being opposite, no great circle is told from another."""


@dataclass(frozen=True)
class Side:
    """One side of N pairs.

    Attributes:
        mu: Unit vectors, shape (N, D).
        spread: Mean and covariance of the directions, or ``None`` if uncertainties are left out.
        uncertainty: Shape (N,), or ``None``.
    """

    mu: Tensor
    spread: Directions | None = None
    uncertainty: Tensor | None = None

    @classmethod
    def of(cls, name: str, embeddings: object, *, use_uncertainty: bool) -> Side:
        """Read what the features need.

        Args:
            name: Name of the argument, for error messages.
            embeddings: An EmbeddingDistribution, or without uncertainties a tensor (N, D).
            use_uncertainty: Whether uncertainties are read.

        Raises:
            InputTypeError: It is something else.
            InputError: There are no embeddings, an entry or an uncertainty is not finite, or a row is zero.
        """
        if isinstance(embeddings, Tensor) and not use_uncertainty:
            checked = check_embeddings(name, embeddings)
            lifted = checked.float() if checked.dtype in (torch.float16, torch.bfloat16) else checked
            return cls(normalize(lifted)[0])
        if not isinstance(embeddings, EmbeddingDistribution):
            wanted = "an EmbeddingDistribution, such as la(x)" + ("" if use_uncertainty else ", or a tensor (N, D)")
            hint = "MatchProbability(use_uncertainty=False) takes plain embeddings." if use_uncertainty else ""
            raise InputTypeError(expected(name, wanted, f"a {type(embeddings).__name__}", hint))
        if not len(embeddings.raw_mean):
            raise InputError(expected(name, "at least one embedding", "none"))
        with torch.no_grad():
            if not use_uncertainty:
                return cls(embeddings.mu)
            uncertainty = embeddings.uncertainty.double()
            if not bool(uncertainty.isfinite().all()):
                raise InputError(expected(name, "finite uncertainties", "NaN or infinity"))
            return cls(embeddings.mu, directions(name, embeddings), uncertainty)

    def __len__(self) -> int:
        """Number of embeddings."""
        return len(self.mu)

    def __getitem__(self, rows: Tensor) -> Side:
        """Some of the embeddings."""
        if self.spread is None or self.uncertainty is None:
            return Side(self.mu[rows])
        return Side(self.mu[rows], self.spread[rows], self.uncertainty[rows])


def check_sides(names: tuple[str, str], a: Side, b: Side) -> None:
    """Refuse two sides of different dimensions or devices.

    Raises:
        InputError: They differ.
    """
    if a.mu.shape[1] != b.mu.shape[1]:
        wanted = f"D = {a.mu.shape[1]}, that of {names[0]}"
        raise InputError(expected(names[1], wanted, f"D = {b.mu.shape[1]}"))
    if a.mu.device != b.mu.device:
        raise InputError(expected(names[1], f"device {a.mu.device}, that of {names[0]}", str(b.mu.device)))


def pair_features(a: Side, b: Side, *, symmetric: bool) -> Tensor:
    """Features of row i of ``a`` with row i of ``b``.

    Args:
        a: N embeddings.
        b: N embeddings.
        symmetric: Whether exchanging the sides must not matter; then the larger of two uncertainties comes first.

    Returns:
        Float64, shape (N, 4): the cosine, the log of the variance of the angle between the two, and the logs of both
        uncertainties. Without uncertainties shape (N, 1).
    """
    cosine = (a.mu.double() * b.mu.double()).sum(1, keepdim=True)
    if a.spread is None or b.spread is None or a.uncertainty is None or b.uncertainty is None:
        return cosine
    angle = _along(a.mu, a.spread, b.mu) + _along(b.mu, b.spread, a.mu)
    both = torch.stack([a.uncertainty, b.uncertainty], 1)
    if symmetric:
        both = both.sort(1, descending=True).values
    return torch.cat([cosine, angle.unsqueeze(1).log(), both.log()], 1)


def _along(mu: Tensor, spread: Directions, towards: Tensor) -> Tensor:
    """Variance of directions along the great circle to other ones, shape (N,); of equal directions, its mean over all.

    The sum of both sides' is the variance of the angle between the two, to first order. Unlike the variance of the
    cosine, it says nothing of the angle itself.
    """
    u = normalize(mu.double())[0]
    apart = normalize(towards.double())[0] - u
    tangent = apart - (apart * u).sum(1, keepdim=True) * u
    length = tangent.norm(dim=1, keepdim=True)
    mean = (spread.lost - spread.along(u)) / (u.shape[1] - 1)
    return torch.where(length[:, 0] > _EQUAL, spread.along(tangent / length.clamp(min=_EQUAL)), mean).clamp(min=0)

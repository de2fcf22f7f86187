"""How far an embedding lies between two classes, as a factor of its angle; see :class:`.ClassCentres`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.fit.class_centres import CAP, WEIGHT

__all__ = ["BetweenCentres"]

_NEAREST = 4
"""Centres whose distances are computed exactly."""


class BetweenCentres(nn.Module):
    """``exp(WEIGHT (r - typical r))``, where r is the distance to the nearest centre over that to the second.

    Args:
        centres: Directions, shape (K, D), K >= 2; one of zeros is at a right angle to everything.
        typical: Typical ratio, shape ().
    """

    centres: Tensor
    typical: Tensor

    def __init__(self, centres: Tensor, typical: Tensor) -> None:
        super().__init__()
        self.register_buffer("centres", centres)
        self.register_buffer("typical", typical.to(centres.dtype))

    def forward(self, mu: Tensor) -> Tensor:
        """Factors (B,) of unit vectors (B, D)."""
        cosine = mu @ self.centres.T
        nearest = cosine.topk(min(_NEAREST, len(self.centres)), dim=1).indices
        # Differences, because 1 - cosine loses all digits near a centre.
        apart = (mu.unsqueeze(1) - self.centres[nearest]).square().sum(2).sqrt()
        first, second = apart.topk(2, dim=1, largest=False).values.unbind(1)
        # Two centres in one place: the embedding is as much between two as it can be.
        ratio = torch.where(second == 0, 1.0, first / torch.where(second == 0, 1.0, second))
        return (WEIGHT * (ratio.clamp(max=CAP) - self.typical)).exp()

"""The conformal p-value of an input, from its components and the calibration; see :mod:`.known`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from contrastive_curvature.known import _ROUNDING as ROUNDING
from contrastive_curvature.known import combine

__all__ = ["PValue"]

_TINY, _LARGEST = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max


class PValue(nn.Module):
    """Conformal p-values ``(1 + #{known >= s}) / (n + 1)``.

    The known statistics lie in rows of about ``sqrt(n)``: the last of each says which row to search, so that no search
    of a sorted array is needed, which ONNX does not have.

    Args:
        arrays: ``location`` and ``scale`` of the components, shape (3,), and ``statistics``, ascending, shape (n,).
    """

    location: Tensor
    scale: Tensor
    rows: Tensor

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        super().__init__()
        statistics = arrays["statistics"].double()
        self.n = len(statistics)
        self.width = math.isqrt(self.n) + 1
        # The last place of the last row is infinite, so that there is always a row to search.
        rows = statistics.new_full(((self.n // self.width + 1) * self.width,), torch.inf)
        rows[: self.n] = statistics
        self.register_buffer("rows", rows.view(-1, self.width))
        self.register_buffer("location", arrays["location"].double())
        self.register_buffer("scale", arrays["scale"].double())
        self.tolerance = ROUNDING / float(arrays["scale"].min())

    def forward(self, spread: Tensor, length: Tensor, phi: Tensor) -> Tensor:
        """P-values.

        Args:
            spread: Logarithms of the tangential variances, float64, shape (B,).
            length: Logarithms of the norms of the outputs, float64, shape (B,).
            phi: Features, shape (B, F).

        Returns:
            Float64, shape (B,).
        """
        features = phi.double().square().sum(1).sqrt().clamp(min=_TINY, max=_LARGEST).log()
        components = torch.stack([spread - features, spread - 2 * features, -length], dim=1)
        least = combine((components - self.location) / self.scale).unsqueeze(1) - self.tolerance
        row = (self.rows[:, -1] < least).sum(1)
        below = row * self.width + (self.rows[row] < least).sum(1)
        return (1 + self.n - below).double() / (self.n + 1)

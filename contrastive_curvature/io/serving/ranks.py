"""The conformal p-value of an input, from its components and the calibration; see :mod:`.known`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from contrastive_curvature.embedding.known import ROUNDING, combine

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
    tiny: Tensor
    largest: Tensor

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
        # As tensors, because ONNX would round plain numbers to float32 first.
        self.register_buffer("tiny", torch.tensor(_TINY, dtype=torch.float64, device=statistics.device))
        self.register_buffer("largest", torch.tensor(_LARGEST, dtype=torch.float64, device=statistics.device))
        self.tolerance = ROUNDING / float(arrays["scale"].min())

    def forward(self, spread: Tensor, mean: tuple[Tensor, Tensor], phi: Tensor) -> Tensor:
        """P-values.

        Args:
            spread: Tangential variances, float64, shape (B,).
            mean: Largest entry of the outputs, and their norms with that divided out, float64, shape (B,) each.
            phi: Features, shape (B, F).

        Returns:
            Float64, shape (B,).
        """
        size, scaled = mean
        length = torch.maximum(self._log(scaled) + size.log(), self.tiny.log())
        features = self._log(phi.double().square().sum(1).sqrt())
        across = self._log(spread)
        components = torch.stack([across - features, across - 2 * features, -length], dim=1)
        least = combine((components - self.location) / self.scale).unsqueeze(1) - self.tolerance
        row = (self.rows[:, -1] < least).sum(1)
        below = row * self.width + (self.rows[row] < least).sum(1)
        p_value = (1 + self.n - below).double() / (self.n + 1)
        # What is not finite is no known input.
        return torch.where(size + spread <= self.largest, p_value, torch.nan)

    def _log(self, value: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(value, self.tiny), self.largest).log()

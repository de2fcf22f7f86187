"""From raw outputs and features to ``mu, kappa, uncertainty, p_value``, in operations that every graph format has.

The same numbers as those of :class:`~contrastive_curvature.EmbeddingDistribution`, which checks its inputs with a look
at their values. A graph cannot: it gives NaN where ``la(x)`` raises an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from contrastive_curvature.serving.centres import BetweenCentres
from contrastive_curvature.serving.parts import Parts
from contrastive_curvature.serving.ranks import PValue
from contrastive_curvature.serving.spread import make_spread
from contrastive_curvature.vmf.gaussian import concentration

__all__ = ["ScoreHead"]

_TINY, _LARGEST = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max
_LOG_TINY = math.log(_TINY)


class ScoreHead(nn.Module):
    """The scores of B inputs from what the last layer takes in and gives out.

    Args:
        parts: Of the posterior.

    Attributes:
        float32_arctan: Whether the arc tangent is computed in float32, as ONNX's runtime has no other.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        arrays = parts.arrays
        self.spread = make_spread(parts.form, arrays)
        self.between = BetweenCentres(arrays["centres"], arrays["typical_ratio"]) if "centres" in arrays else None
        self.ranks = PValue(arrays) if "statistics" in arrays else None
        self.register_buffer("typical_norm", arrays.get("typical_norm"))
        self.float32_arctan = False

    def forward(self, z: Tensor, phi: Tensor) -> tuple[Tensor, ...]:
        """Score.

        Args:
            z: Raw outputs, shape (B, D).
            phi: Features, shape (B, F).

        Returns:
            ``mu`` (B, D), ``kappa`` (B,), ``uncertainty`` (B,) in the dtype of ``z``, and ``p_value`` (B,) in float64
            if the posterior was calibrated.
        """
        wide = z.double()
        size = wide.abs().amax(1, keepdim=True).clamp(min=_TINY)
        scaled = wide / size
        length = scaled.square().sum(1, keepdim=True).sqrt()
        u = scaled / length.clamp(min=_TINY)
        total, radial = self.spread(phi, u)
        # A zero output has no direction.
        norm = torch.where(length > 0, length * size, torch.nan)
        mu = (scaled / torch.where(length > 0, length, torch.nan)).to(z.dtype)
        norm = norm.squeeze(1)
        # Divided twice, because the square of a tiny or huge norm underflows or overflows.
        tangential = ((total - radial).clamp(min=0) / norm / norm).to(z.dtype)
        angle = tangential.sqrt()
        if self.typical_norm is not None:
            angle = angle * (self.typical_norm / norm).sqrt().to(z.dtype)
        if self.between is not None:
            angle = angle * self.between(mu)
        out = (mu, concentration(tangential, z.shape[1]), self._arctan(angle))
        if self.ranks is None:
            return out
        rounding = z.shape[1] * torch.finfo(z.dtype).eps
        spread = torch.maximum(total - radial, rounding * total).clamp(min=_TINY).log()
        length_log = (length.squeeze(1).clamp(min=_TINY).log() + size.squeeze(1).log()).clamp(min=_LOG_TINY)
        p_value = self.ranks(spread, length_log, phi)
        # What is not finite is no known input.
        finite = wide.abs().sum(1) + total <= _LARGEST
        return (*out, torch.where(finite, p_value, torch.nan))

    def _arctan(self, angle: Tensor) -> Tensor:
        return angle.float().arctan().to(angle.dtype) if self.float32_arctan else angle.arctan()

"""From raw outputs and features to ``mu, kappa, uncertainty, p_value``, in operations that every graph format has.

The same numbers as those of :class:`~contrastive_curvature.EmbeddingDistribution`, which checks its inputs with a look
at their values. A graph cannot: it gives NaN where ``la(x)`` raises an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.embedding.distribution import turning_angle
from contrastive_curvature.fit.class_centres import between_classes, nearest_ratio
from contrastive_curvature.io.serving.parts import Parts
from contrastive_curvature.io.serving.ranks import PValue
from contrastive_curvature.io.serving.spread import make_spread
from contrastive_curvature.vmf.estimation import concentration_of_variance

__all__ = ["ScoreHead"]

_TINY = torch.finfo(torch.float64).tiny


class ScoreHead(nn.Module):
    """The scores of B inputs from what the last layer takes in and gives out.

    Args:
        parts: Of the posterior.

    Attributes:
        float32_arctan: Whether the arc tangent is computed in float32, as ONNX's runtime has no other.
    """

    tiny: Tensor
    typical_norm: Tensor | None
    centres: Tensor | None
    typical_ratio: Tensor | None

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        arrays = parts.arrays
        self.spread = make_spread(parts.form, arrays)
        self.ranks = PValue(arrays) if "statistics" in arrays else None
        self.register_buffer("typical_norm", arrays.get("typical_norm"))
        self.register_buffer("centres", arrays.get("centres"))
        typical = arrays.get("typical_ratio")
        self.register_buffer("typical_ratio", None if typical is None else typical.to(arrays["weight"].dtype))
        # A tensor, because ONNX would round a plain number to float32 first.
        self.register_buffer("tiny", torch.tensor(_TINY, dtype=torch.float64, device=arrays["weight"].device))
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
        size = torch.maximum(wide.abs().amax(1), self.tiny)
        scaled = wide / size.unsqueeze(1)
        length = scaled.square().sum(1).sqrt()
        u = scaled / torch.maximum(length, self.tiny).unsqueeze(1)
        total, radial = self.spread(phi, u)
        # A zero output has no direction.
        divisor = torch.where(length > 0, length, torch.nan)
        mu, norm = (scaled / divisor.unsqueeze(1)).to(z.dtype), divisor * size
        # Divided twice, because the square of a tiny or huge norm underflows or overflows.
        tangential = ((total - radial).clamp(min=0) / norm / norm).to(z.dtype)
        between = None
        if self.centres is not None and self.typical_ratio is not None:
            between = between_classes(nearest_ratio(mu, self.centres), self.typical_ratio)
        angle = turning_angle(tangential, norm, self.typical_norm, between, self._arctan)
        out = (mu, concentration_of_variance(tangential, z.shape[1]), angle)
        if self.ranks is None:
            return out
        rounding = z.shape[1] * torch.finfo(z.dtype).eps
        return (*out, self.ranks(torch.maximum(total - radial, rounding * total), (size, length), phi))

    def _arctan(self, angle: Tensor) -> Tensor:
        return angle.float().arctan().to(angle.dtype) if self.float32_arctan else angle.arctan()

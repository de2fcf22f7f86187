"""Generalised-mean pooling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected


class GeM(nn.Module):
    """Generalised mean over the positions of a feature map, ``(mean_hw x^p)^(1/p)`` for every channel.

    Radenović et al. 2018, "Fine-tuning CNN Image Retrieval with No Human Annotation", equation 3. ``p = 1`` is average
    pooling, ``p -> inf`` maximum pooling.

    Args:
        p: Exponent at the start, at least 1; learned with the network.
        eps: Activations below it count as ``eps``: a power needs a positive base.

    Raises:
        InputError: ``p`` or ``eps`` is out of range.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        # written so that NaN fails too
        if not 1 <= p < math.inf:
            raise InputError(expected("p", "at least 1, and finite", p))
        if not 0 < eps < math.inf:
            raise InputError(expected("eps", "above 0, and finite", eps))
        self.p = nn.Parameter(torch.tensor(float(p)))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Pool.

        Args:
            x: Shape (N, C, H, W).

        Returns:
            Shape (N, C).
        """
        x = x.clamp(min=self.eps)
        # The scale cancels, and so has no gradient; without it large powers overflow in single precision.
        scale = x.detach().amax((-2, -1), keepdim=True)
        pooled = (x / scale).pow(self.p).mean((-2, -1)).pow(1 / self.p)
        return pooled * scale.flatten(1)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"p={self.p.item():.3g}, eps={self.eps:g}"

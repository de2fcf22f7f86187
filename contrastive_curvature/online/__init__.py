"""Laplace posteriors that are learned while the encoder is trained (paper, Eq. 4-5 and 79-80)."""

from __future__ import annotations

from contrastive_curvature.online.learner import OnlineLaplace
from contrastive_curvature.removed import refuse_removed

__all__ = ["OnlineLaplace"]

__getattr__ = refuse_removed(__name__)

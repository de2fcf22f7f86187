"""Laplace posteriors that are learned while the encoder is trained (paper, Eq. 4-5 and 79-80).

:class:`OnlineLaplace` is called once per training step, in any loop. :class:`Trainer` is a loop that can be killed and
resumed.
"""

from __future__ import annotations

from contrastive_curvature.online.checkpoint import load_checkpoint, save_checkpoint
from contrastive_curvature.online.learner import OnlineLaplace
from contrastive_curvature.online.trainer import Trainer

__all__ = ["OnlineLaplace", "Trainer", "load_checkpoint", "save_checkpoint"]

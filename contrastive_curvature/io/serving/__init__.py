"""Posteriors without the library that made them: exported graphs, and a scorer that needs numpy only."""

from contrastive_curvature.io.serving.export import export
from contrastive_curvature.io.serving.module import ServedEncoder
from contrastive_curvature.io.serving.numpy_scorer import Scorer

__all__ = ["Scorer", "ServedEncoder", "export"]

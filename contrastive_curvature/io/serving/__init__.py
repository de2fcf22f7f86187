"""Posteriors without this library: exported graphs, and a scorer that needs only numpy."""

from contrastive_curvature.io.serving.export import export
from contrastive_curvature.io.serving.module import ServedEncoder
from contrastive_curvature.io.serving.numpy_scorer import Scorer

__all__ = ["Scorer", "ServedEncoder", "export"]

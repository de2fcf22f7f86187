"""Posteriors without the library that made them: exported graphs, and a scorer that needs numpy only."""

from contrastive_curvature.serving.module import ServedEncoder

__all__ = ["ServedEncoder"]

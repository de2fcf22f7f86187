"""Posteriors without this library: exported graphs."""

from contrastive_curvature.io.serving.export import export
from contrastive_curvature.io.serving.served_encoder import ServedEncoder
from contrastive_curvature.removed import refuse_removed

__all__ = ["ServedEncoder", "export"]

__getattr__ = refuse_removed(__name__)

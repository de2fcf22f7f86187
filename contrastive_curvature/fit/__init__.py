"""Output Hessian -> parameter curvature: ``J^T H J`` in the structures ``diag``, ``full``, ``kron`` and low rank."""

from contrastive_curvature.fit.api import ggn

__all__ = ["ggn"]

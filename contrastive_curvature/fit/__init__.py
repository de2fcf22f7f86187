"""Output Hessian -> parameter curvature: ``J^T H J`` in the structures ``diag``, ``full`` and ``kron``."""

from contrastive_curvature.fit.api import ggn

__all__ = ["ggn"]

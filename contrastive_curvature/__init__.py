"""Curvature of the contrastive loss, and what it is for: encoders that know how sure an embedding is.

labels -> pairs -> output Hessian -> parameter curvature -> Laplace posterior -> embedding distribution
"""

from contrastive_curvature.ggn import ggn
from contrastive_curvature.loss import ContrastiveLoss
from contrastive_curvature.output_hessian import OutputHessian, output_hessian
from contrastive_curvature.sphere import L2Norm

__version__ = "0.1.0"

__all__ = ["ContrastiveLoss", "L2Norm", "OutputHessian", "ggn", "output_hessian"]

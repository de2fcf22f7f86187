"""Curvature of the contrastive loss, and what it is for: encoders that know how sure an embedding is.

labels -> pairs -> output Hessian -> parameter curvature -> Laplace posterior -> embedding distribution

Importing the package registers ``likelihood="contrastive"`` with laplace-torch; :func:`unregister` undoes it.
"""

from contrastive_curvature import metrics, vmf
from contrastive_curvature.backends import ContrastiveGGN
from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, InputTypeError, UnsupportedError
from contrastive_curvature.ggn import ggn
from contrastive_curvature.laplace import register, unregister
from contrastive_curvature.loss import ContrastiveLoss
from contrastive_curvature.options import Distance, Normalization, PDFix
from contrastive_curvature.output_hessian import OutputHessian, output_hessian
from contrastive_curvature.sphere import L2Norm

__version__ = "0.1.0"

__all__ = [
    # pairs -> loss
    "ContrastiveLoss",
    "Distance",
    "PDFix",
    "Normalization",
    # loss -> output Hessian -> parameter curvature
    "OutputHessian",
    "output_hessian",
    "ggn",
    "ContrastiveGGN",
    # Laplace posterior -> embedding distribution
    "register",
    "unregister",
    "EmbeddingDistribution",
    "L2Norm",
    # the sphere, and how good it all is
    "vmf",
    "metrics",
    # errors
    "ContrastiveCurvatureError",
    "InputError",
    "InputTypeError",
    "UnsupportedError",
]

register()

"""Losses of cosines between embeddings: values, and derivatives for the output Hessians."""

from contrastive_curvature.losses.base import PairLoss, Terms
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.logistic import LogisticLoss
from contrastive_curvature.losses.multisimilarity import MultiSimilarityLoss
from contrastive_curvature.losses.proxy import ProxyLoss
from contrastive_curvature.losses.row_loss import RowLoss, RowTerms
from contrastive_curvature.losses.siglip import SigLIPLoss
from contrastive_curvature.losses.soft_contrastive import SoftContrastiveLoss
from contrastive_curvature.losses.supcon import SupConLoss
from contrastive_curvature.losses.triplet_hinge import TripletLoss
from contrastive_curvature.removed import refuse_removed

__all__ = [
    "ContrastiveLoss",
    "CosineLoss",
    "InfoNCELoss",
    "LogisticLoss",
    "MultiSimilarityLoss",
    "PairLoss",
    "ProxyLoss",
    "RowLoss",
    "RowTerms",
    "SigLIPLoss",
    "SoftContrastiveLoss",
    "SupConLoss",
    "Terms",
    "TripletLoss",
]

__getattr__ = refuse_removed(__name__)

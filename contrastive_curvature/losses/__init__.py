"""Losses of pairs of embeddings: their values, and the derivatives that output Hessians are made of."""

from contrastive_curvature.losses.base import PairLoss, Terms
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.logistic import LogisticLoss

__all__ = ["ContrastiveLoss", "LogisticLoss", "PairLoss", "Terms"]

"""The output Hessian of a data set, or of a batch that stands for one."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.weighting import Shares
from contrastive_curvature.pairs import Relation

__all__ = ["batch_hessian", "dataset_hessian"]


def dataset_hessian(loss: PairLoss, z: Tensor, relation: Relation) -> DatasetHessian:
    """The Hessian over all pairs of a data set.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        z: Checked raw outputs of all N points, shape (N, D).
        relation: Which pairs are positive and negative.
    """
    return DatasetHessian(z, loss.derivatives(relation, normalize(z)[0]), loss.distance, loss.pd_fix)


def batch_hessian(loss: PairLoss, z: Tensor, relation: Relation, shares: Shares) -> OutputHessian:
    """The Hessian of a batch as its part of a data set's (paper, Proposition B.1).

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        z: Checked raw outputs, shape (B, D).
        relation: Which pairs of the batch are positive and negative.
        shares: What they weigh, so that they stand for the pairs that lie in no batch
            (:meth:`~contrastive_curvature.losses.weighting.Shares.standing_for`).

    Returns:
        A Hessian that sums over batches to an estimate of that of all pairs.
    """
    return loss.hessian_of(z, loss.derivatives(relation, normalize(z)[0], shares=shares))

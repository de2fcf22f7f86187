"""The output Hessian of a data set, or of a batch that stands for one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.weighting import batch_scale
from contrastive_curvature.pairs import Relation, make_relation

__all__ = ["batch_hessian", "dataset_hessian"]


def dataset_hessian(loss: PairLoss, z: Tensor, relation: Relation) -> DatasetHessian:
    """The Hessian over all pairs of a data set.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        z: Checked raw outputs of all N points, shape (N, D).
        relation: Which pairs are positive and negative.
    """
    return DatasetHessian(z, loss.derivatives(relation, normalize(z)[0]), loss.distance, loss.pd_fix)


def batch_hessian(
    loss: PairLoss,
    z: Tensor,
    targets: Tensor,
    n_data: int,
    totals: tuple[float, float] | None = None,
    relation: Any = None,
    pairs: Any = None,
) -> OutputHessian:
    """The Hessian of B points as their share of a data set's (paper, Proposition B.1).

    ``sum``: the positives of a batch stand for all positives of the data set, its negatives for all negatives (Eq.
    29-38); batches count by their number of points. ``type``: means are averaged over the batches. ``anchor``: every
    point brings its own share, so batches add up as they are.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        z: Checked raw outputs, shape (B, D).
        targets: Their labels or targets.
        n_data: Number N of points in the data set.
        totals: Number of positive and negative pairs in the data set; ``None`` takes the batch for representative of
            both, ``N (N - 1) / (B (B - 1))`` times its own.
        relation: ``None`` for class labels, or a callable on targets.
        pairs: Index tuples of a miner, instead of targets and relation.

    Returns:
        A Hessian that sums over batches to an estimate of that of all pairs.
    """
    made = make_relation(z.shape[0], z.device, *((targets, relation) if pairs is None else (None, pairs)))
    scale = batch_scale(made, loss.normalization, n_data, totals)
    return loss.hessian_of(z, loss.derivatives(made, normalize(z)[0], scale=scale))

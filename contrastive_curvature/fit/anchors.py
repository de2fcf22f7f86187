"""The curvature of a loss of anchors over a data set: the sum over its batches, in one pass.

The candidates of an anchor are those of its batch, as in training. So nothing has to be known of other batches, inputs
may be augmented anew, and the result does not change where a batch of the training size is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.fit.anchor_sums import AnchorSums, check_anchors, finished_anchors, note_skipped
from contrastive_curvature.fit.dataset import DatasetCurvature
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Structure
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import State
from contrastive_curvature.progress import Progress

__all__ = ["AnchorBatch", "AnchorReader", "anchors_curvature", "anchors_of_part", "note_skipped"]


class AnchorBatch(NamedTuple):
    """A batch of n points with what the loss takes besides their embeddings.

    Args:
        x: The points.
        labels: Class labels, shape (n,), or ``None``.
        pairs: See the loss, or ``None``.
        classes: Class labels that are not only those of views of one input, for the centres of the classes.
    """

    x: Inputs
    labels: Tensor | None
    pairs: Pairs | None
    classes: Tensor | None


AnchorReader = Callable[[Any], AnchorBatch]
"""Converts what the loader yields into a batch on the model's device."""


def anchors_curvature(
    pullback: Pullback,
    loader: Iterable[Any],
    read: AnchorReader,
    loss: CosineLoss,
    structure: Structure,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
    *,
    whole: bool = True,
) -> DatasetCurvature:
    """Sum of the curvatures of all batches, unclamped; a mean over anchors counts times their number.

    Args:
        pullback: Pullback to the parameters.
        loader: Batches, iterated once.
        read: Takes a batch apart.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        kfac_approx: How ``kron`` treats points that are coupled.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        whole: Whether these are all batches, so that something has to be compared in them.

    Returns:
        The sum. If a single point contributes most of it, there is a warning.

    Raises:
        InputError: The loader is empty, no anchor has a positive, a batch is malformed, or a curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    state = anchors_of_part(pullback, loader, read, loss, structure, progress, kfac_approx, sampler)
    if whole:
        check_anchors(state)
    return finished_anchors(pullback, state, structure)


def anchors_of_part(
    pullback: Pullback,
    loader: Iterable[Any],
    read: AnchorReader,
    loss: CosineLoss,
    structure: Structure,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
    *,
    identity: Mapping[str, str] | None = None,
    part: tuple[int, int] = (0, 1),
) -> State:
    """What the batches of a part of the data add to the sum; see :func:`anchors_curvature`.

    Args:
        pullback: Pullback to the parameters.
        loader: Batches, iterated once.
        read: Takes a batch apart.
        loss: The loss, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        kfac_approx: How ``kron`` treats points that are coupled.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.
        identity: See :class:`~contrastive_curvature.parts.State`.
        part: Index of the part and number of all parts.

    Raises:
        InputError: A batch is malformed, or a curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    index, count = part
    sums = AnchorSums(pullback, structure, kfac_approx, sampler, index if count > 1 else -1)
    for number, (batch, numbers) in enumerate(Progress.of(progress).over(Share(loader, index), "[curvature]")):
        given = read(batch)
        z, context = pullback.forward(given.x)
        z = check_outputs(z, f"model(x) of batch {number} (counted from 0)")
        # Of two views of an input both are points.
        views, rest = divmod(len(z), len(numbers)) if len(numbers) else (0, len(z))
        of_points = None if rest else torch.cat([views * numbers + view for view in range(views)])
        sums.add(context, batch_of_data(loss, z, given.labels, given.pairs), given.classes, of_points)
    return sums.state(identity, part)


def batch_of_data(loss: CosineLoss, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> OutputHessian:
    """The Hessian of a batch as its part of a data set.

    Args:
        loss: The loss.
        z: Checked raw outputs, shape (n, D).
        labels: See the loss.
        pairs: See the loss.
    """
    return loss.data_hessian(z, loss.relate(z, labels, pairs))

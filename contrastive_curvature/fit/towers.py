"""The curvature of two towers over a data set: the sum over its batches, in one pass over pairs of inputs.

The loss of a batch is one of all its outputs ``[z_a; z_b]``, so its Hessian has blocks within either tower and blocks
between the two. A posterior of one tower holds what the parameters of that tower know of each other: the block within
it, with all that couples its points. The blocks between the towers have a part in products alone
(:func:`towers_product`). One module for both kinds of inputs has one set of parameters, and the whole Hessian.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.anchor_sums import AnchorSums, check_anchors, finished_anchors
from contrastive_curvature.fit.dataset import DatasetCurvature
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.fit.tower_batch import TowerBatch
from contrastive_curvature.hessian.derivatives import CosineDerivatives, PartOfDerivatives
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.sides import joined_towers
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.loader import joined_inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Structure
from contrastive_curvature.progress import Progress

__all__ = ["TowerReader", "towers_curvature", "towers_product"]

_log = logging.getLogger("contrastive_curvature")

TowerReader = Callable[[Any], TowerBatch]
"""Converts what the loader yields into a batch on the model's device."""


def towers_curvature(
    pullbacks: Sequence[Pullback],
    loader: Iterable[Any],
    read: TowerReader,
    loss: CosineLoss,
    structure: Structure,
    progress: Progress | bool | None = None,
    kfac_approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
) -> list[DatasetCurvature]:
    """Sum of the curvatures of all batches, unclamped; a mean over anchors counts times their number.

    Args:
        pullbacks: To the parameters of the first tower and to those of the second; or one, of a module that both are.
        loader: Batches, iterated once.
        read: Takes a batch apart.
        loss: Of anchors or of graded pairs, with the distance and the fix of its curvature.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Progress of the whole fit, or whether to show progress.
        kfac_approx: How ``kron`` treats points that are coupled.
        sampler: Samples the blocks of the Hessian for an estimate; ``None`` uses the exact blocks.

    Returns:
        The sum of every tower, each with half of the loss, so that both together have all of it; or the one sum of the
        shared module.

    Raises:
        InputError: The loader is empty, no anchor has a positive or none has a negative, a batch is malformed, or a
            curvature is not finite.
        UnsupportedError: ``kron`` is requested for a layer that has no Kronecker factors.
    """
    sums = [AnchorSums(pullback, structure, kfac_approx, sampler) for pullback in pullbacks]
    batches = without = 0
    for batch in Progress.of(progress).over(loader, "[curvature]"):
        given = read(batch)
        z_a, z_b, contexts = _outputs(pullbacks, given)
        z, first, whole = _derivatives(loss, z_a, z_b, given)
        batches, without = batches + 1, without + int(not given.compares)
        node_sums = whole.node_sums()
        ranges = [slice(0, first), slice(first, len(z))] if len(pullbacks) == 2 else [slice(0, len(z))]
        labels = None if given.labels is None else torch.cat(given.labels)
        for into, context, rows in zip(sums, contexts, ranges, strict=True):
            hessian = loss.hessian_of(z[rows], PartOfDerivatives(whole, rows, node_sums))
            into.add(context, hessian, None if labels is None else labels[rows])
    states = [into.state() for into in sums]
    check_anchors(states[0], changes=False)
    if without == batches:
        hint = "An anchor is told apart from the inputs of its batch that do not belong to it: use larger batches."
        came = f"{batches} batches whose inputs all belong together" + (", or as much" if loss.graded else "")
        raise InputError(expected("train_loader", "batches of two pairs or more", came, hint))
    if without:
        _log.info("%d of %d batches had no inputs that belong together less than others", without, batches)
    share = 1 / len(sums)
    return [
        finished_anchors(pullback, state, structure, share) for pullback, state in zip(pullbacks, states, strict=True)
    ]


def towers_product(
    pullbacks: Sequence[Pullback],
    loader: Iterable[Any],
    read: TowerReader,
    loss: CosineLoss,
    vectors: Sequence[Tensor],
) -> list[Tensor]:
    """``J^T H J v`` over a data set, with the blocks between the towers; no matrix is formed.

    Args:
        pullbacks: See :func:`towers_curvature`.
        loader: Batches, iterated once.
        read: Takes a batch apart.
        loss: Of anchors or of graded pairs, with the distance and the fix of its curvature.
        vectors: ``v``, one part for every pullback, shape (P,) each.

    Returns:
        The parts of the product, shape (P,) each, unclamped.

    Raises:
        InputError: The loader is empty, a batch is malformed, or a product is not finite.
    """
    out = [torch.zeros_like(v) for v in vectors]
    # A shared module has one set of parameters under both kinds of inputs.
    of_a, of_b = 0, len(pullbacks) - 1
    number = -1
    for number, batch in enumerate(loader):
        given = read(batch)
        z_a, moved_a = pullbacks[of_a].jvp(given.a, vectors[of_a])
        z_b, moved_b = pullbacks[of_b].jvp(given.b, vectors[of_b])
        z, first, whole = _derivatives(loss, z_a, z_b, given)
        curved = loss.hessian_of(z, whole).matvec(torch.cat([moved_a, moved_b]))
        out[of_a] += pullbacks[of_a].vjp_sum(given.a, curved[:first])
        out[of_b] += pullbacks[of_b].vjp_sum(given.b, curved[first:])
        for pullback, part in zip(pullbacks, out, strict=True):
            check_finite(part, pullback, f"batch {number} (counted from 0)")
    if number < 0:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    return out


def _outputs(pullbacks: Sequence[Pullback], given: TowerBatch) -> tuple[Tensor, Tensor, list[Any]]:
    """Raw outputs of both towers, and the contexts of the pullbacks."""
    if len(pullbacks) == 2 or isinstance(pullbacks[0], LastLayerPullback):
        z_a, context_a = pullbacks[0].forward(given.a)
        z_b, context_b = pullbacks[-1].forward(given.b)
        contexts = [context_a, context_b] if len(pullbacks) == 2 else [torch.cat([context_a, context_b])]
        return z_a, z_b, contexts
    x = joined_inputs(given.a, given.b)
    z, context = pullbacks[0].forward(x)
    first = input_length(given.a)
    return z[:first], z[first:], [context]


def _derivatives(
    loss: CosineLoss, z_a: Tensor, z_b: Tensor, given: TowerBatch
) -> tuple[Tensor, int, CosineDerivatives]:
    """Outputs of both towers after each other, how many are of the first, and the derivatives in their cosines."""
    z_a, z_b = check_outputs(z_a, "encoder_a(a)"), check_outputs(z_b, "encoder_b(b)")
    z, relation, first = joined_towers(z_a, z_b, given.labels)
    u = normalize(z)[0]
    if isinstance(loss, RowLoss):
        return z, first, loss.between_towers(relation, u, first, as_data=True)
    index = torch.arange(len(z), device=z.device)
    return z, first, loss.derivatives(loss.relate(z, None, (index[:first], index[first:], _grades(given))), u)


def _grades(given: TowerBatch) -> Tensor:
    if given.grades is None:
        msg = "a batch of a loss of graded pairs has grades"
        raise RuntimeError(msg)
    return given.grades

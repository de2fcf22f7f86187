"""Random points of a data set of a loss of anchors, each other's candidates, for posteriors in function space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.anchors import AnchorReader, note_skipped
from contrastive_curvature.fit.subset import HessianSubset, concatenated, selected_rows
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.progress import Progress

__all__ = ["anchor_subset"]


def anchor_subset(
    encoder: Encoder,
    loader: Iterable[Any],
    read: AnchorReader,
    loss: CosineLoss,
    size: int,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> tuple[HessianSubset, Tensor, Tensor, int]:
    """Draw points without replacement, two views of an input together, and take the root of their Hessian.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: Batches; iterated twice.
        read: Takes a batch apart.
        loss: The loss, with the distance and the fix of its curvature.
        size: Number M of points.
        seed: Seed of the random draw.
        progress: Progress of the whole fit, or whether to show progress.

    Returns:
        The points, with the factor times the square root of N / M; N / M times their loss and cost; and N.

    Raises:
        InputError: The data set has fewer than M points, or no anchor among them has a positive.
        UnsupportedError: The Hessian is not positive semidefinite, or the loss is of listed pairs.
    """
    progress = Progress.of(progress)
    counts: list[tuple[int, bool]] = []
    for batch in progress.over(loader, "[targets]"):
        given = read(batch)
        if given.labels is None:
            msg = "hessian_structure='gp': a loss of listed pairs has no subset of points. Use 'diag' or 'kron'."
            raise UnsupportedError(msg)
        counts.append((input_length(given.x), given.classes is None and given.pairs is None))
    n = sum(count for count, _ in counts)
    if size > n:
        raise InputError(expected("n_subset", f"at most the {n} points of the data", size))
    generator = torch.Generator().manual_seed(seed)
    by_views = any(views for _, views in counts)
    # Numbers of inputs: of two views each, where the views are all that belongs together.
    inputs = n // 2 if by_views else n
    chosen = torch.zeros(inputs, dtype=torch.bool)
    chosen[torch.randperm(inputs, generator=generator)[: max(1, size // 2) if by_views else size]] = True
    parts, labels, relation, start = [], [], None, 0
    for batch in progress.over(loader, "[inducing points]"):
        given = read(batch)
        count = input_length(given.x)
        mine = chosen[start : start + (count // 2 if by_views else count)]
        rows = (mine.repeat(2) if by_views else mine).to(given.labels.device)  # type: ignore[union-attr]
        if len(rows) != count:
            raise InputError(expected("train_loader", "the same number of points in every pass", "others"))
        if bool(rows.any()):
            parts.append(selected_rows(given.x, rows))
            labels.append(given.labels[rows] + (start if by_views else 0))  # type: ignore[index]
        relation, start = given.pairs, start + len(mine)
    x = concatenated(parts)
    with torch.no_grad():
        z = check_outputs(encoder(x), "model(x)")
    hessian = loss.data_hessian(z, loss.relate(z, torch.cat(labels), relation))
    note_skipped(hessian.derivatives.anchors, hessian.derivatives.skipped)
    scale = n / len(z)
    factor = hessian.factor() if hessian.coupled else hessian.blocks.factor()
    value, cost = hessian.loss_and_cost()
    return HessianSubset(x, scale**0.5 * factor, hessian.coupled), scale * value, scale * cost, n

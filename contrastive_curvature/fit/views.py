"""What a batch of a loader is for a loss of anchors: its points, and which of them belong together."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.fit.anchors import AnchorBatch
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.loader import Views, joined_inputs
from contrastive_curvature.pairs.relation import RelationFunction, check_labels

__all__ = ["as_anchors", "check_usable"]


def as_anchors(
    views: Views, loss: CosineLoss, relation: RelationFunction | None = None, positives: str | None = None
) -> AnchorBatch:
    """Turn a batch of one or two views into points, and what the loss takes besides them.

    Args:
        views: The batch.
        loss: The loss.
        relation: A callable on targets; ``None`` for class labels.
        positives: Where there are two views and labels: ``"views"`` of one input belong together, or inputs with the
            same of the ``"labels"``; ``None`` asks the loss.

    Returns:
        The points: the second views stand behind the first.

    Raises:
        InputTypeError: Targets have a wrong type.
        InputError: There are no labels and one view only, or targets are malformed.
    """
    n, targets = input_length(views.first), views.targets
    if views.second is None:
        if targets is None:
            msg = "a batch of one view has targets"
            raise RuntimeError(msg)
        if positives == "views":
            hint = "The loader has one view of each input. Leave positives out, or yield (view, view)."
            raise InputError(expected("positives", "'labels' or nothing", positives, hint))
        if relation is not None:
            return AnchorBatch(views.first, targets, relation, None)
        labels = _labels(targets, n)
        return AnchorBatch(views.first, labels, None, labels)
    name = type(loss).__name__
    if loss.needs_labels and targets is None:
        hint = f"{name} compares with class weights, so two views do not say enough: yield ((view, view), labels)."
        raise InputError(expected("train_loader", "class labels", views.unusable or "none", hint))
    if loss.needs_labels and positives == "views":
        hint = f"{name} compares with class weights. Leave positives out."
        raise InputError(expected("positives", "'labels' or nothing", positives, hint))
    check_usable(views, loss, positives)
    x = joined_inputs(views.first, views.second)
    if loss.graded:
        if targets is None:
            hint = f"{name} compares pairs of known similarity."
            raise InputError(expected("train_loader", "(view, view, grades)", "no grades", hint))
        first = torch.arange(n, device=targets.device)
        return AnchorBatch(x, None, (first, first + n, targets), None)
    if targets is None and (positives == "labels" or relation is not None):
        hint = "Yield ((view, view), labels), or leave it out: views of one input belong together."
        raise InputError(expected("train_loader", "two views and labels", "two views", hint))
    by_views = positives == "views" or (positives is None and not (loss.supervised or relation is not None))
    if targets is None or by_views:
        device = next(iter(x.values())).device if not isinstance(x, Tensor) else x.device
        return AnchorBatch(x, torch.arange(n, device=device).repeat(2), None, None)
    both = torch.cat([targets, targets])
    if relation is not None:
        return AnchorBatch(x, both, relation, None)
    labels = _labels(both, 2 * n)
    return AnchorBatch(x, labels, None, labels)


def check_usable(views: Views, loss: CosineLoss, positives: str | None) -> None:
    """Refuse what stands in the place of labels that would be used.

    Args:
        views: The batch.
        loss: The loss.
        positives: See :func:`as_anchors`.

    Raises:
        InputTypeError: It is no tensor of one entry a point.
    """
    if views.unusable is not None and (positives == "labels" or (positives is None and loss.supervised)):
        hint = "Yield labels as a tensor of whole numbers, or say positives='views' if they are not to be used."
        raise InputTypeError(expected("train_loader", "labels as a tensor of one entry a point", views.unusable, hint))


def _labels(targets: Tensor, n: int) -> Tensor:
    if targets.is_floating_point():
        hint = (
            "Known are (x, labels) with whole numbers as labels, (view, view), ((view, view), labels) and (view, view, "
            "labels); two views have the same shape and type."
        )
        raise InputTypeError(expected("train_loader", "labels, or a second view", f"{targets.dtype}", hint))
    return check_labels(targets, n)

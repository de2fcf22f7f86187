"""What a batch of a loader is for two towers: inputs of both, and which of them belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.fit.views import check_usable
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.loader import read_views
from contrastive_curvature.pairs.relation import check_labels

__all__ = ["TowerBatch", "read_towers"]

_FORMS = "batches (a, b), ((a, b), labels), (a, b, labels) or (a, b, (labels of a, labels of b))"


class TowerBatch(NamedTuple):
    """A batch of two towers.

    Args:
        a: N inputs of the first tower.
        b: M inputs of the second.
        labels: Class labels of both, (N,) and (M,); ``None`` where ``a[i]`` belongs to ``b[i]``.
        grades: How similar ``a[i]`` and ``b[i]`` are, shape (N,), for a loss of graded pairs.
    """

    a: Inputs
    b: Inputs
    labels: tuple[Tensor, Tensor] | None
    grades: Tensor | None = None

    @property
    def compares(self) -> bool:
        """Whether some inputs belong together less than others do."""
        if self.grades is not None:
            return bool((self.grades != self.grades[0]).any())
        if self.labels is None:
            return input_length(self.a) > 1
        both = torch.cat(self.labels)
        return bool((both != both[0]).any())


def read_towers(batch: Any, device: torch.device, loss: CosineLoss, positives: str | None = None) -> TowerBatch:
    """Take apart what a loader yields, and bring it to a device.

    Args:
        batch: ``(a, b)`` where ``a[i]`` belongs to ``b[i]``; ``((a, b), labels)`` and ``(a, b, labels)`` with one label
            a pair, or those of all N inputs of a and then of all M of b; ``(a, b, (labels of a, labels of b))``. For a
            loss of graded pairs, ``(a, b, grades)``.
        device: Where to bring it.
        loss: Of both towers.
        positives: ``"labels"``: inputs of the same label belong together; ``"views"``: a[i] and b[i] alone. ``None``
            takes labels of both towers, and asks the loss where there is one label a pair: losses of classes take it,
            InfoNCE and SigLIP were trained with the pairs.

    Raises:
        InputTypeError: Something else, or labels that are no whole numbers.
        InputError: A batch without a point, or with a wrong number of labels.
    """
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        came = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        hint = "An encoder that takes a mapping gets one of its own: yield ({'pixel_values': ...}, {'input_ids': ...})."
        raise InputTypeError(expected("train_loader", _FORMS, came, hint))
    if len(batch) == 3 and isinstance(batch[2], (tuple, list)):
        batch = (batch[0], batch[1], _joined_labels(batch))
    if len(batch) == 2 and isinstance(batch[0], (tuple, list)) and len(batch[0]) == 2 and _of_both(batch[1]):
        batch = (*batch[0], _joined_labels((*batch[0], batch[1])))
    views = read_views(batch, device, argument="train_loader", towers=True)
    check_usable(views, loss, positives)
    if views.second is None:
        msg = "a batch of two towers has two inputs"
        raise RuntimeError(msg)
    counts = input_length(views.first), input_length(views.second)
    if loss.graded:
        if views.targets is None or counts[0] != counts[1] or len(views.targets) != counts[0]:
            grades = "" if views.targets is None else f" with {len(views.targets)} grades"
            came = f"{counts[0]} and {counts[1]} inputs{grades}"
            hint = f"{type(loss).__name__} compares pairs of known similarity."
            raise InputError(expected("train_loader", "(a, b, grades) with a grade for every pair", came, hint))
        return TowerBatch(views.first, views.second, None, views.targets)
    labels = views.targets
    a_pair = labels is not None and counts[0] == counts[1] == len(labels)
    if labels is None or positives == "views" or (positives is None and a_pair and not loss.supervised):
        if positives == "labels":
            raise InputError(expected("train_loader", "(a, b, labels) for positives='labels'", "no labels"))
        return TowerBatch(views.first, views.second, None)
    if a_pair:
        labels = torch.cat([labels, labels])
    if len(labels) != sum(counts):
        wanted = f"{sum(counts)} labels, of {counts[0]} inputs of the first tower and then of {counts[1]} of the second"
        if counts[0] == counts[1]:
            wanted = f"{counts[0]} labels, one a pair"
        raise InputError(expected("train_loader", wanted, len(labels)))
    labels = check_labels(labels, sum(counts))
    return TowerBatch(views.first, views.second, (labels[: counts[0]], labels[counts[0] :]))


def _of_both(labels: Any) -> bool:
    """Whether these are the labels of each tower."""
    return isinstance(labels, (tuple, list)) and any(isinstance(part, Tensor) for part in labels)


def _joined_labels(batch: Any) -> Tensor:
    """Labels of both towers after each other, each as many as it has inputs."""
    a, b, labels = batch
    if len(labels) != 2 or not all(isinstance(part, Tensor) and part.ndim == 1 for part in labels):
        came = f"a {type(labels).__name__} of {len(labels)}, not two tensors"
        hint = "One label a pair is a tensor (N,), too."
        raise InputTypeError(expected("train_loader", "(labels of a, labels of b), tensors (N,) and (M,)", came, hint))
    for name, x, part in zip("ab", (a, b), labels, strict=True):
        if isinstance(x, (Tensor, Mapping)) and len(part) != input_length(x):
            raise InputError(expected("train_loader", f"{input_length(x)} labels of {name}", len(part)))
    return torch.cat([labels[0], labels[1].to(labels[0].device)])

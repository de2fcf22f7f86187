"""Batches in the form that a loss needs: points with their numbers, and which of them are positives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.fit.share import Share
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.loader import Views, joined_inputs, uncoordinated_workers
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.pairs.relation import check_labels

_MANY_REPEATED = 0.4
"""Share of inputs that repeat others: a half where two workers give the same."""


class Batch(NamedTuple):
    """A batch of n points with the data that the loss needs in addition to embeddings.

    Args:
        x: The points.
        labels: Class labels, numbers of inputs or targets of a relation, shape (n, ...).
        pairs: A relation of the labels, or ``None``.
        classes: Class labels where the loader has them, mostly on the CPU, so that counting them does not wait for a
            GPU; ``None`` for a relation, and if labels only mark views of one input.
        numbers: Numbers of the points, int64 on the CPU, shape (n,); a :class:`Reader` sets them.
    """

    x: Inputs
    labels: Tensor
    pairs: RelationFunction | None
    classes: Tensor | None
    numbers: Tensor = torch.zeros(0, dtype=torch.int64, device="cpu")


class Reader:
    """The batches of a loader in the form that a loss needs; they can be iterated several times.

    Args:
        loader: Loader that gives the same points in every pass.
        read: Function that converts a batch and moves it to the model's device.
        part: Index of the loader's part of the data.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Batch], part: int = 0) -> None:
        self.loader, self.share, self._read = loader, Share(loader, part), read
        self._workers = uncoordinated_workers(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        seen = self.share.start
        keys, given_so_far = set[int](), 0
        for given, inputs in self.share:
            batch = self._read(given)
            n = input_length(batch.x)
            if self._workers > 1:
                # If an input has two views, only the first counts.
                keys.update(once := _input_keys(batch.x)[: len(inputs) or n])
                given_so_far += len(once)
            views, rest = divmod(n, max(1, len(inputs)))
            # Both views of an input are points with their own numbers.
            numbers = torch.cat([views * inputs + view for view in range(views)])
            if rest or len(numbers) != n:
                numbers = torch.arange(seen, seen + n, device="cpu")
            yield batch._replace(numbers=numbers)
            seen += n
        if keys:
            self._advise_on_workers(given_so_far, len(keys))

    def _advise_on_workers(self, inputs: int, different: int) -> None:
        """Warn after the first pass if many inputs repeat, as when every worker returns the whole data set."""
        repeated = 1 - different / inputs
        if repeated >= _MANY_REPEATED:
            msg = (
                f"train_loader: {repeated:.0%} of its {inputs} inputs repeat others exactly, and all are counted. Each "
                f"of {self._workers} workers gives all of an IterableDataset that does not split its data. Use "
                "num_workers=1, or split the data in __iter__ by torch.utils.data.get_worker_info()."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        self._workers = 0


def _input_keys(x: Inputs) -> list[int]:
    """Return one hash for each of n inputs, equal for equal inputs."""
    n = input_length(x)
    parts = [x] if isinstance(x, Tensor) else [part for part in x.values() if isinstance(part, Tensor) and part.ndim]
    rows = [part.detach().cpu().reshape(n, -1).contiguous() for part in parts if part.shape[0] == n]
    bits = [part.view(torch.uint8).numpy() for part in rows]
    return [hash(tuple(part[k].tobytes() for part in bits)) for k in range(n)]


def labelled_batch(x: Inputs, targets: Tensor, relation: RelationFunction | None) -> Batch:
    """Return a batch of points with targets; without a relation, these are class labels."""
    n, device = input_length(x), _device(x)
    if relation is None:
        classes = check_labels(targets, n)
        return Batch(x, waiting.sent(classes, device), None, classes)
    if not targets.ndim or targets.shape[0] != n:
        wanted = f"one target for each of the {n} points of a batch"
        raise InputError("train_loader", wanted, f"shape {tuple(targets.shape)}")
    return Batch(x, waiting.sent(targets, device), relation, None)


def _device(x: Inputs) -> torch.device:
    """Return the device of a batch."""
    return next(part.device for part in ([x] if isinstance(x, Tensor) else x.values()) if isinstance(part, Tensor))


def as_batch(
    views: Views, loss: CosineLoss, relation: RelationFunction | None = None, positives: str | None = None
) -> Batch:
    """Convert a batch of one or two views into points and the labels that a loss of anchors needs."""
    n, targets = input_length(views.first), views.targets
    if views.second is None:
        if positives == "views":
            hint = "The loader has one view of each input. Leave positives out, or yield (view, view)."
            raise InputError("positives", "'labels' or nothing", positives, hint)
        return _of_targets(views.first, targets, relation)
    name = type(loss).__name__
    if loss.compares == "proxies" and targets is None:
        hint = f"{name} compares with class weights, so two views do not say enough: yield ((view, view), labels)."
        raise InputError("train_loader", "class labels", views.unusable or "none", hint)
    if loss.compares == "proxies" and positives == "views":
        hint = f"{name} compares with class weights. Leave positives out."
        raise InputError("positives", "'labels' or nothing", positives, hint)
    check_usable(views, loss, relation, positives)
    x = joined_inputs(views.first, views.second)
    if targets is None and (positives == "labels" or relation is not None):
        hint = "Yield ((view, view), labels), or leave it out: views of one input belong together."
        raise InputError("train_loader", "two views and labels", "two views", hint)
    by_views = positives == "views" or (positives is None and not (loss.supervised or relation is not None))
    if targets is None or by_views:
        return Batch(x, torch.arange(n, device=_device(x)).repeat(2), None, None)
    return _of_targets(x, torch.cat([targets, targets]), relation)


def check_usable(views: Views, loss: CosineLoss, relation: RelationFunction | None, positives: str | None) -> None:
    """Refuse unusable labels if the loss would use them, and grades of pairs; arguments as in :func:`as_batch`."""
    if views.unusable is not None and (positives == "labels" or (positives is None and loss.supervised)):
        hint = "Yield labels as a tensor of whole numbers, or say positives='views' if they are not to be used."
        raise InputTypeError("train_loader", "labels as a tensor of one entry a point", views.unusable, hint)
    if views.graded and relation is None and positives is None:
        hint = (
            "No loss takes grades of pairs: keep the pairs that belong together, and leave the grades out. Labels of "
            "classes need .long(). With positives='views' every pair belongs together, whatever its number."
        )
        raise InputTypeError("train_loader", "two views and whole numbers as labels", "one fraction a pair", hint)


def _of_targets(x: Inputs, targets: Any, relation: RelationFunction | None) -> Batch:
    if relation is None and isinstance(targets, Tensor) and targets.is_floating_point():
        hint = (
            "Known are (x, labels) with whole numbers as labels, (view, view), ((view, view), labels) and (view, view, "
            "labels); two views have the same shape and type."
        )
        raise InputTypeError("train_loader", "labels, or a second view", f"{targets.dtype}", hint)
    return labelled_batch(x, targets, relation)

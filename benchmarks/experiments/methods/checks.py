"""What methods refuse before they compute anything."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from benchmarks.experiments.data.places import PlaceSampler, WithinMetres
from benchmarks.experiments.data.split import Split
from benchmarks.experiments.methods.base import Setting
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.pairs.relation import check_labels

T = TypeVar("T")


def check_classes(setting: Setting, train: Split, positives: bool) -> None:
    """Whether there is anything to learn from class labels; positions are not looked at.

    Args:
        setting: Its relation is looked at.
        train: Training images; only their targets are read.
        positives: Whether two images of one class are needed too.

    Raises:
        InputError: There is one class, or no class with two images.
    """
    if setting.relation is not None:
        return
    sizes = train.targets.unique(return_counts=True)[1]
    if len(sizes) < 2:
        raise InputError("data.train", "images of at least two classes", f"{len(sizes)}")
    if positives and int(sizes.max()) < 2:
        raise InputError("data.train", "a class with at least 2 images", "one image of every class")


def check_saved(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Whether a saved method was trained with the options of the one that loads it.

    Args:
        saved: Options by name, as they were saved.
        own: Those of the method.

    Raises:
        InputError: One differs.
    """
    for name, value in own.items():
        if saved[name] != value:
            raise InputError(name, f"{saved[name]!r}, as in training", value)


def check_training(setting: Setting, train: Split) -> None:
    """Whether an encoder can be trained on these images in this setting.

    Args:
        setting: Its relation and batches are looked at.
        train: Training images; only their targets are read.

    Raises:
        InputError: Targets, relation and batches do not go together.
        UnsupportedError: A number of images of each class is asked for, where there are no classes.
    """
    if len(train) < 2:
        raise InputError("data.train", "at least 2 images", len(train))
    if setting.relation is None:
        check_labels(train.targets)
    if setting.per_class is not None:
        _check_per_class(setting, train)


def fitted(value: T | None, method: str) -> T:
    """What a fit leaves.

    Raises:
        InputError: There was no fit.
    """
    if value is None:
        raise InputError(method, "a fitted method", "one that is not", "Call fit or load first.")
    return value


def positive_radius(relation: RelationFunction) -> float:
    """Radius in metres within which two images show the same place.

    Raises:
        UnsupportedError: The relation is not one of distances.
    """
    if not isinstance(relation, WithinMetres):
        raise UnsupportedError(
            "setting.per_class with a relation: images of one place can only be found where the relation is a "
            "distance. Use benchmarks.experiments.data.places.WithinMetres, or per_class=None."
        )
    return relation.positive


def _check_per_class(setting: Setting, train: Split) -> None:
    per_class: Any = setting.per_class
    size = setting.batch_size
    if size % per_class:
        raise InputError("setting.batch_size", f"a multiple of per_class={per_class}", size)
    if setting.relation is not None:
        PlaceSampler(train.targets, positive_radius(setting.relation), per_class, torch.Generator())
        return
    classes = len(train.targets.unique())
    most = min(per_class * classes, len(train))
    if size > most:
        came = f"{size} for {len(train)} images of {classes} classes"
        raise InputError("setting.batch_size", f"at most {most} with per_class={per_class}", came)

"""What methods refuse before they compute anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.experiments.data.places import WithinMetres
from benchmarks.experiments.data.samplers import PlaceSampler
from benchmarks.experiments.data.split import Split
from benchmarks.experiments.methods.base import Setting
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.pairs.relation import check_labels

T = TypeVar("T")


def check_count(name: str, value: object, least: int = 1) -> int:
    """A whole number.

    Raises:
        InputError: It is none, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(expected(name, f"a whole number, at least {least}", value))
    return value


def check_positive(name: str, value: float, most: float = math.inf) -> float:
    """A finite number above zero, at most ``most``.

    Raises:
        InputError: It is not.
    """
    # written so that NaN fails too
    if not (0 < value <= most and math.isfinite(value)):
        raise InputError(
            expected(name, "a finite number above 0" + ("" if most == math.inf else f" up to {most}"), value)
        )
    return value


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """One of some words.

    Raises:
        InputError: It is none of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise InputError(expected(name, f"one of {', '.join(map(repr, allowed))}", value))
    return value


def check_fit(seed: int, folder: Path) -> None:
    """What every ``fit`` is given.

    Raises:
        InputError: The seed is outside [0, 2^32), or the folder is not there.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InputError(expected("seed", "a whole number in [0, 2^32)", seed))
    if not folder.is_dir():
        raise InputError(expected("folder", "a folder that exists", str(folder)))


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
        raise InputError(expected("data.train", "images of at least two classes", f"{len(sizes)}"))
    if positives and int(sizes.max()) < 2:
        raise InputError(expected("data.train", "a class with at least 2 images", "one image of every class"))


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
            raise InputError(expected(name, f"{saved[name]!r}, as in training", value))


def check_training(setting: Setting, train: Split) -> None:
    """Whether an encoder can be trained on these images in this setting.

    Args:
        setting: Its epochs, learning rate, margin, relation and batches are looked at.
        train: Training images; only their targets are read.

    Raises:
        InputError: A value is out of range, or targets and relation do not go together.
        UnsupportedError: A number of images of each class is asked for, where there are no classes.
    """
    check_count("setting.epochs", setting.epochs)
    check_count("setting.batch_size", setting.batch_size, 2)
    check_count("setting.eval_batch", setting.eval_batch)
    check_positive("setting.lr", setting.lr)
    if setting.margin is not None:
        check_positive("setting.margin", setting.margin, 2)
    if len(train) < 2:
        raise InputError(expected("data.train", "at least 2 images", len(train)))
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
        raise InputError(expected(method, "a fitted method", "one that is not", "Call fit or load first."))
    return value


def positive_radius(relation: RelationFunction) -> float:
    """Radius in metres within which two images show the same place.

    Raises:
        UnsupportedError: The relation is not one of distances.
    """
    if not isinstance(relation, WithinMetres):
        msg = (
            "setting.per_class with a relation: images of one place can only be found where the relation is a "
            "distance. Use benchmarks.experiments.data.places.WithinMetres, or per_class=None."
        )
        raise UnsupportedError(msg)
    return relation.positive


def _check_per_class(setting: Setting, train: Split) -> None:
    per_class: Any = setting.per_class
    check_count("setting.per_class", per_class)
    size = setting.batch_size
    if size % per_class:
        raise InputError(expected("setting.batch_size", f"a multiple of per_class={per_class}", size))
    if setting.relation is not None:
        PlaceSampler(train.targets, positive_radius(setting.relation), per_class, torch.Generator())
        return
    classes = len(train.targets.unique())
    most = min(per_class * classes, len(train))
    if size > most:
        came = f"{size} for {len(train)} images of {classes} classes"
        raise InputError(expected("setting.batch_size", f"at most {most} with per_class={per_class}", came))

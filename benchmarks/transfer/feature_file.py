"""The feature file: an encoder's last layer and features on disk.

A ``.npz`` archive with the arrays

- ``train_features (N, F)``, ``train_labels (N,)``, ``test_features (M, F)``, ``test_labels (M,)``;
- ``weight (D, F)`` and ``bias (D,)`` of the last layer;
- ``unknown_NAME (K, F)``, any number: inputs of another kind;
- ``corrupted_KIND_LEVEL (K, F)``, any number: the test inputs in ``corrupted_rows (K,)``, corrupted; KIND is any word,
  and a higher level is worse;
- ``pairs_left``, ``pairs_right``, ``pairs_same``, ``pairs_fold``, each (P,), or none of them: pairs of test inputs,
  whether both are of one class, and the fold of cross-validation. With ``pairs_features (n, F)`` they are row numbers
  in these and not in the test features; ``pairs_people_in_train (P,)`` may say which pairs have an input of a class
  that training has;
- ``calibration_features (C, F)``, ``calibration_labels (C,)``, or neither: known inputs that neither trained the
  encoder nor are among the test inputs.

The labels of the test inputs may be classes that training has not seen. Features may be saved in half precision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
_REQUIRED = ("train_features", "train_labels", "test_features", "test_labels", "weight", "bias")
_MORE = ("calibration_features", "calibration_labels", "corrupted_rows")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of inputs, of which a verifier says whether both are of one class.

    Args:
        left: Row numbers in the test features, or in ``features`` where there are some, shape (P,).
        right: The same of each pair's other half.
        same: Whether both are of one class.
        fold: Number of the fold that the pair belongs to.
        features: Of inputs that need not be test inputs, shape (n, F); ``None`` where all are.
        people_in_train: Whether one of the two is of a class that training has, or ``None``.
    """

    left: Rows
    right: Rows
    same: NDArray[np.bool_]
    fold: Rows
    features: Floats | None = None
    people_in_train: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """The last layer of an encoder, and the features of known, unknown and corrupted inputs.

    Features are converted to float32 when it is made, labels and row numbers to int64.

    Args:
        train_features: Shape (N, F).
        train_labels: Whole numbers, shape (N,).
        test_features: Shape (M, F).
        test_labels: Shape (M,).
        weight: Of the last layer, shape (D, F).
        bias: Shape (D,).
        unknown: Name -> features of inputs of another kind, shape (K, F).
        corrupted: Kind and level (from 1, higher is worse) -> features of corrupted test inputs, shape (K, F).
        corrupted_rows: Row numbers in the test arrays of the inputs that were corrupted, shape (K,).
        pairs: Pairs of inputs for verification.
        calibration_features: Of known inputs that neither trained the encoder nor are among the test inputs, shape
            (C, F); ``None`` where there are none.
        calibration_labels: Shape (C,).
    """

    train_features: Floats
    train_labels: Rows
    test_features: Floats
    test_labels: Rows
    weight: Floats
    bias: Floats
    unknown: dict[str, Floats] = field(default_factory=dict)
    corrupted: dict[tuple[str, int], Floats] = field(default_factory=dict)
    corrupted_rows: Rows | None = None
    pairs: Pairs | None = None
    calibration_features: Floats | None = None
    calibration_labels: Rows | None = None

    def __post_init__(self) -> None:
        def features(name: str, value: Any) -> Floats:
            out = np.ascontiguousarray(value, dtype=np.float32)
            if out.shape[1:] != self.weight.shape[1:] or not np.isfinite(out).all():
                raise InputError(name, f"finite numbers, {self.weight.shape[1]} features", f"others, shape {out.shape}")
            return out

        parts: dict[str, Any] = {"bias": np.asarray(self.bias, np.float32), "weight": features("weight", self.weight)}
        parts["unknown"] = {name: features(f"unknown_{name}", value) for name, value in self.unknown.items()}
        parts["corrupted"] = {key: features(str(key), value) for key, value in sorted(self.corrupted.items())}
        for part in ("train", "test", "calibration"):
            if (value := getattr(self, f"{part}_features")) is not None:
                labels = np.asarray(getattr(self, f"{part}_labels")).astype(np.int64, casting="same_kind")
                if len(labels) != len(value):
                    raise InputError(f"{part}_labels", f"{len(value)}, one for each input", len(labels))
                parts |= {f"{part}_features": features(f"{part}_features", value), f"{part}_labels": labels}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def outputs(self, features: Floats) -> Floats:
        """Raw outputs of the last layer, shape (K, D); embeddings are these, normalised."""
        out: Floats = features @ self.weight.T + self.bias
        return out


def save_features(path: Path, content: FeatureFile, *, half: bool = False) -> None:
    """Write a feature file so that no reader ever sees half of it.

    Args:
        path: Ends in ``.npz``; its folder is made if need be.
        content: What to write.
        half: Whether features are rounded to half precision, which halves the file. The last layer never is.
    """
    arrays: dict[str, Any] = {name: getattr(content, name) for name in (*_REQUIRED, *_MORE)}
    arrays |= {f"unknown_{name}": value for name, value in content.unknown.items()}
    arrays |= {f"corrupted_{kind}_{level}": value for (kind, level), value in content.corrupted.items()}
    if content.pairs is not None:
        arrays |= {f"pairs_{name}": value for name, value in vars(content.pairs).items()}
    for name, value in arrays.items():
        if half and value is not None and value.ndim == 2 and name != "weight":
            with np.errstate(over="raise"):
                arrays[name] = value.astype(np.float16)
    path.parent.mkdir(parents=True, exist_ok=True)
    there = {name: value for name, value in arrays.items() if value is not None}
    write_whole(path, lambda file: np.savez(file, **there))


def load_features(path: Path) -> FeatureFile:
    """Read a feature file, anybody's."""
    # An array of objects would be unpickled, which can run anything.
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if missing := [name for name in _REQUIRED if name not in arrays]:
        raise InputError(str(path), f"the arrays {', '.join(_REQUIRED)}", f"no {', '.join(missing)}")
    given: dict[str, Any] = {name: arrays.pop(name, None) for name in (*_REQUIRED, *_MORE)}
    pairs = {one.name: arrays.pop(f"pairs_{one.name}") for one in fields(Pairs) if f"pairs_{one.name}" in arrays}
    unknown, corrupted = {}, {}
    for name, value in arrays.items():
        if level := re.fullmatch(r"corrupted_(.+)_([1-9]\d*)", name):
            corrupted[level[1], int(level[2])] = value
        elif name.startswith("unknown_"):
            unknown[name.removeprefix("unknown_")] = value
        else:
            raise InputError(str(path), "arrays of these names, unknown_NAME or corrupted_KIND_LEVEL", name)
    if pairs and pairs.get("features") is not None:
        pairs["features"] = pairs["features"].astype(np.float32)
    both = Pairs(**pairs) if pairs else None
    return FeatureFile(**given, unknown=unknown, corrupted=corrupted, pairs=both)

"""What a judge needs of an encoder: its last layer, and the features that go into it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from benchmarks.transfer.arrays import Floats, Rows, check_features, check_floats, check_range, check_rows
from benchmarks.transfer.pairs import Pairs, check_pairs
from contrastive_curvature.errors import InputError, expected

__all__ = ["FeatureFile", "Pairs"]

_LEAST_DIM = 2


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """The last layer of an encoder, and the features of known, unknown and harmed inputs.

    Everything is checked and converted when it is made: features to float32, labels and row numbers to int64.

    Args:
        train_features: Shape (N, F).
        train_labels: Whole numbers, shape (N,).
        test_features: Shape (M, F); at least two of them.
        test_labels: Shape (M,).
        weight: Of the last layer, shape (D, F), with D at least 2.
        bias: Shape (D,).
        unknown: Name -> features of inputs of another kind, shape (K, F).
        harmed: Kind and level (from 1, higher is worse) -> features of harmed test inputs, shape (K, F).
        harmed_rows: Row numbers in the test arrays of the inputs that were harmed, shape (K,).
        pairs: Pairs of inputs for verification.
        calibration_features: Of known inputs that neither trained the encoder nor are among the test inputs, shape
            (C, F); ``None`` where there are none.
        calibration_labels: Shape (C,); as many as there are features.

    Raises:
        InputError: A shape, a type or a value does not fit; names of arrays are those of the archive.
    """

    train_features: Floats
    train_labels: Rows
    test_features: Floats
    test_labels: Rows
    weight: Floats
    bias: Floats
    unknown: dict[str, Floats] = field(default_factory=dict)
    harmed: dict[tuple[str, int], Floats] = field(default_factory=dict)
    harmed_rows: Rows | None = None
    pairs: Pairs | None = None
    calibration_features: Floats | None = None
    calibration_labels: Rows | None = None

    def __post_init__(self) -> None:
        weight = check_floats("weight", self.weight, 2)
        dim, width = weight.shape
        if dim < _LEAST_DIM:
            raise InputError(expected("weight", "shape (D, F) with D at least 2", weight.shape))
        parts: dict[str, Any] = {"weight": weight, "bias": check_floats("bias", self.bias, 1)}
        if parts["bias"].shape != (dim,):
            hint = "A last layer without a bias has zeros."
            raise InputError(expected("bias", f"shape ({dim},), as weight has {dim} rows", parts["bias"].shape, hint))
        for part in ("train", "test"):
            name = f"{part}_features"
            parts[name] = check_features(name, getattr(self, name), width)
            parts[f"{part}_labels"] = check_rows(f"{part}_labels", getattr(self, f"{part}_labels"), len(parts[name]))
        if len(parts["test_features"]) < _LEAST_DIM:
            raise InputError(expected("test_features", "at least two inputs, to retrieve one with another", "one"))
        parts["unknown"] = {
            _plain(name, "unknown_"): check_features(f"unknown_{name}", value, width)
            for name, value in self.unknown.items()
        }
        parts["harmed"], parts["harmed_rows"] = self._harm(width, len(parts["test_features"]))
        tests = len(parts["test_features"])
        parts["pairs"] = None if self.pairs is None else check_pairs(self.pairs, tests, width)
        parts["calibration_features"], parts["calibration_labels"] = self._calibration(width)
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def _harm(self, width: int, tests: int) -> tuple[dict[tuple[str, int], Floats], Rows | None]:
        if not self.harmed and self.harmed_rows is None:
            return {}, None
        if self.harmed_rows is None or not self.harmed:
            wanted, came = ("harmed_KIND_LEVEL arrays", "none") if not self.harmed else ("row numbers (K,)", "nothing")
            raise InputError(
                expected("harmed" if not self.harmed else "harmed_rows", f"{wanted} beside the other", came)
            )
        rows = check_range("harmed_rows", check_rows("harmed_rows", self.harmed_rows, None), tests)
        found = {}
        for (kind, level), value in self.harmed.items():
            name = f"harmed_{_plain(kind, 'harmed_')}_{level}"
            if isinstance(level, bool) or not isinstance(level, int) or level < 1:
                raise InputError(expected(name, "a level that is a whole number, at least 1", level))
            found[kind, level] = check_features(name, value, width)
            if len(found[kind, level]) != len(rows):
                wanted = f"{len(rows)} inputs, as many as harmed_rows has"
                raise InputError(expected(name, wanted, f"{len(found[kind, level])}"))
        return dict(sorted(found.items())), rows

    def _calibration(self, width: int) -> tuple[Floats | None, Rows | None]:
        features, labels = self.calibration_features, self.calibration_labels
        if features is None and labels is None:
            return None, None
        if features is None or labels is None:
            given, left_out = ("labels", "features") if features is None else ("features", "labels")
            raise InputError(expected(f"calibration_{left_out}", f"an array beside calibration_{given}", "none"))
        found = check_features("calibration_features", features, width)
        return found, check_rows("calibration_labels", labels, len(found))

    @property
    def features(self) -> int:
        """Features F before the last layer."""
        return self.weight.shape[1]

    @property
    def dim(self) -> int:
        """Latent dimension D."""
        return self.weight.shape[0]

    def outputs(self, features: Floats) -> Floats:
        """Raw outputs of the last layer, shape (K, D); embeddings are these, normalised."""
        found: Floats = features @ self.weight.T + self.bias
        return found


def _plain(name: str, prefix: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or f"{prefix}{name}" == "harmed_rows":
        raise InputError(expected(f"{prefix}NAME", "a name of letters, digits, '_', '-' and '.'", name))
    return name

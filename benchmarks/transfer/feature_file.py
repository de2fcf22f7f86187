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

In its place, a folder with the feature folders ``train`` and ``test`` that ``contrastive_curvature.features`` writes,
perhaps ``calibration`` and any number of ``unknown_NAME``, all of one encoder, and the archive ``last_layer.npz`` with
the arrays ``weight (D, F)`` and ``bias (D,)``.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError
from contrastive_curvature.io.feature_folder import FeatureFolder

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

_REQUIRED = ("train_features", "train_labels", "test_features", "test_labels", "weight", "bias")
_PAIRS = ("pairs_left", "pairs_right", "pairs_same", "pairs_fold")
_MORE_PAIRS = ("pairs_features", "pairs_people_in_train")
_CALIBRATION = ("calibration_features", "calibration_labels")
_LAST_LAYER = "last_layer.npz"
_LARGEST_HALF = 65504.0


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

    def checked(self, tests: int, width: int) -> Pairs:
        """Check and convert, for so many test inputs of so many features."""
        features = None if self.features is None else _features("pairs_features", self.features, width)
        count, of = (tests, "test") if features is None else (len(features), "pairs'")
        left = _row_numbers("pairs_left", self.left, None, count, of)
        right = _row_numbers("pairs_right", self.right, len(left), count, of)
        if (left == right).any():
            raise InputError("pairs_right", "another input than pairs_left", "pairs of an input with itself")
        seen = self.people_in_train
        seen = None if seen is None else _truths("pairs_people_in_train", seen, len(left))
        same, fold = _truths("pairs_same", self.same, len(left)), _whole("pairs_fold", self.fold, len(left))
        return Pairs(left, right, same, fold, features, seen)


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """The last layer of an encoder, and the features of known, unknown and corrupted inputs.

    Everything is checked and converted when it is made: features to float32, labels and row numbers to int64.

    Args:
        train_features: Shape (N, F).
        train_labels: Whole numbers, shape (N,).
        test_features: Shape (M, F); at least two of them.
        test_labels: Shape (M,).
        weight: Of the last layer, shape (D, F), with D at least 2.
        bias: Shape (D,).
        unknown: Name -> features of inputs of another kind, shape (K, F).
        corrupted: Kind and level (from 1, higher is worse) -> features of corrupted test inputs, shape (K, F).
        corrupted_rows: Row numbers in the test arrays of the inputs that were corrupted, shape (K,).
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
    corrupted: dict[tuple[str, int], Floats] = field(default_factory=dict)
    corrupted_rows: Rows | None = None
    pairs: Pairs | None = None
    calibration_features: Floats | None = None
    calibration_labels: Rows | None = None

    def __post_init__(self) -> None:
        weight, bias = _floats("weight", self.weight, 2), _floats("bias", self.bias, 1)
        dim, width = weight.shape
        if dim < 2:
            raise InputError("weight", "shape (D, F) with D at least 2", weight.shape)
        if bias.shape != (dim,):
            hint = "A last layer without a bias has zeros."
            raise InputError("bias", f"shape ({dim},), as weight has {dim} rows", bias.shape, hint)
        parts: dict[str, Any] = {"weight": weight, "bias": bias}
        for part in ("train", "test", "calibration"):
            features, labels = (getattr(self, f"{part}_{what}") for what in ("features", "labels"))
            if features is None and labels is None:
                continue
            if features is None or labels is None:
                absent, there = ("labels", "features") if labels is None else ("features", "labels")
                raise InputError(f"{part}_{absent}", f"an array beside {part}_{there}", "none")
            parts[f"{part}_features"] = _features(f"{part}_features", features, width)
            parts[f"{part}_labels"] = _whole(f"{part}_labels", labels, len(parts[f"{part}_features"]))
        tests = len(parts["test_features"])
        if tests < 2:
            raise InputError("test_features", "at least two inputs, to retrieve one with another", "one")
        parts["unknown"] = {
            _plain(name, "unknown_NAME"): _features(f"unknown_{name}", value, width)
            for name, value in self.unknown.items()
        }
        parts |= self._corruption(width, tests)
        parts["pairs"] = None if self.pairs is None else self.pairs.checked(tests, width)
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def _corruption(self, width: int, tests: int) -> dict[str, Any]:
        if not self.corrupted and self.corrupted_rows is None:
            return {}
        if not self.corrupted:
            raise InputError("corrupted", "corrupted_KIND_LEVEL arrays beside corrupted_rows", "none")
        if self.corrupted_rows is None:
            raise InputError("corrupted_rows", "row numbers (K,) beside corrupted_KIND_LEVEL", "nothing")
        rows = _row_numbers("corrupted_rows", self.corrupted_rows, None, tests)
        found = {}
        for (kind, level), value in sorted(self.corrupted.items()):
            name = f"corrupted_{_plain(kind, 'corrupted_KIND_LEVEL')}_{level}"
            if type(level) is not int or level < 1:
                raise InputError(name, "a level that is a whole number, at least 1", level)
            found[kind, level] = _features(name, value, width)
            if len(found[kind, level]) != len(rows):
                wanted = f"{len(rows)} inputs, as many as corrupted_rows has"
                raise InputError(name, wanted, f"{len(found[kind, level])}")
        return {"corrupted": found, "corrupted_rows": rows}

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


def save_features(path: Path, content: FeatureFile, *, half: bool = False) -> None:
    """Write a feature file so that no reader ever sees half of it.

    Args:
        path: Ends in ``.npz``; its folder is made if need be.
        content: What to write.
        half: Whether features are rounded to half precision, which halves the file. The last layer never is.

    Raises:
        InputError: The name has another ending, or a feature is too large for half precision.
    """
    if path.suffix != ".npz":
        raise InputError("path", "a name that ends in .npz", str(path))
    arrays: dict[str, Any] = {name: getattr(content, name) for name in (*_REQUIRED, *_CALIBRATION)}
    arrays |= {f"unknown_{name}": value for name, value in content.unknown.items()}
    arrays |= {f"corrupted_{kind}_{level}": value for (kind, level), value in content.corrupted.items()}
    if content.pairs is not None:
        arrays |= {name: getattr(content.pairs, name.removeprefix("pairs_")) for name in (*_PAIRS, *_MORE_PAIRS)}
    for name, value in arrays.items():
        if half and value is not None and (name.endswith("_features") or name.startswith(("unknown_", "corrupted_"))):
            if np.abs(value).max() > _LARGEST_HALF:
                wanted = f"at most {_LARGEST_HALF:.0f} in half precision"
                raise InputError(name, wanted, f"{np.abs(value).max()}")
            arrays[name] = value.astype(np.float16)
    arrays["corrupted_rows"] = content.corrupted_rows
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
        # mkstemp gives a file that nobody else may read; features are no secret
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_features(path: Path) -> FeatureFile:
    """Read a feature file, anybody's, or a folder of feature folders.

    Args:
        path: A ``.npz`` archive. Arrays with names that have no meaning here are left out, with a warning.

    Returns:
        Its content, checked.

    Raises:
        InputError: It cannot be read, an array is missing, or one does not fit the others.
    """
    folders = (path / _LAST_LAYER).is_file()
    arrays = _read_folders(path) if folders else _read(path)
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        hint = f"It holds {', '.join(sorted(arrays)) or 'nothing'}."
        raise InputError(str(path), f"the arrays {', '.join(_REQUIRED)}", f"no {', '.join(missing)}", hint)
    given: dict[str, Any] = {name: arrays.pop(name, None) for name in (*_REQUIRED, *_CALIBRATION, "corrupted_rows")}
    pairs = {name: arrays.pop(name) for name in (*_PAIRS, *_MORE_PAIRS) if name in arrays}
    if pairs and not pairs.keys() >= set(_PAIRS):
        raise InputError(str(path), f"all of {', '.join(_PAIRS)}, or none", f"only {', '.join(pairs)}")
    unknown, corrupted, strange = {}, {}, []
    for name, value in arrays.items():
        if name.startswith("unknown_"):
            unknown[name.removeprefix("unknown_")] = value
        elif found := re.fullmatch(r"corrupted_(.+)_([1-9]\d*)", name):
            corrupted[found[1], int(found[2])] = value
        elif name.startswith("corrupted_"):
            raise InputError(str(path), "corrupted_KIND_LEVEL with a level from 1 at its end", name)
        else:
            strange.append(name)
    if strange:
        msg = f"{path}: {', '.join(sorted(strange))} not used; inputs of another kind are named unknown_NAME."
        warnings.warn(msg, stacklevel=2)
    try:
        both = Pairs(**{name.removeprefix("pairs_"): value for name, value in pairs.items()}) if pairs else None
        return FeatureFile(**given, unknown=unknown, corrupted=corrupted, pairs=both)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def files_of(path: Path) -> list[Path]:
    """The files that tell features apart: the feature file itself, or headers, which have checksums of the others."""
    return [*sorted(path.glob("*/header.safetensors")), path / _LAST_LAYER] if path.is_dir() else [path]


def _read(path: Path) -> dict[str, NDArray[Any]]:
    wanted, hint = "a .npz archive of arrays", "numpy.savez writes one."
    try:
        # An array of objects would be unpickled, which can run anything.
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                return {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(str(path), wanted, f"what cannot be read ({reason})", hint) from None
    raise InputError(str(path), wanted, "a single array", hint)


def _read_folders(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of feature folders by the names that they have in an archive."""
    arrays = _read(path / _LAST_LAYER)
    source = None
    for header in sorted(path.glob("*/header.safetensors")):
        folder, name = FeatureFolder(header.parent), header.parent.name
        about = folder.source
        source = source or about
        if (about.last_layer, about.trunk) != (source.last_layer, source.trunk):
            wanted = "features of the encoder of the other folders"
            raise InputError(str(folder.path), wanted, "those of another")
        if name.startswith("unknown_"):
            arrays[name] = folder.numpy()
        else:
            arrays |= {f"{name}_features": folder.numpy(), f"{name}_labels": folder.targets.numpy()}
    return arrays


def _floats(name: str, value: Any, axes: int) -> Floats:
    """Finite numbers as float32, in memory without gaps; refuse anything else, and arrays that are empty."""
    found = np.asarray(value)
    if found.dtype.kind not in "fiu":
        raise InputError(name, "real numbers", f"an array of {found.dtype}")
    if found.ndim != axes or 0 in found.shape:
        raise InputError(name, f"{axes} axes, none of length 0", f"shape {found.shape}")
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(found, dtype=np.float32)
    if wrong := int((~np.isfinite(found)).sum()):
        raise InputError(name, "finite numbers", f"{wrong} that are NaN or infinite in float32")
    return found


def _features(name: str, value: Any, width: int) -> Floats:
    found = _floats(name, value, 2)
    if found.shape[1] != width:
        wanted = f"shape (number of inputs, {width}), as weight has {width} columns"
        raise InputError(name, wanted, f"shape {found.shape}")
    return found


def _whole(name: str, value: Any, count: int | None) -> Rows:
    """Whole numbers on one axis as int64, so many of them, or any number but none."""
    found = np.asarray(value)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        came = f"an array of {found.dtype}, shape {found.shape}"
        hint = "numpy.unique(names, return_inverse=True)[1] numbers names."
        raise InputError(name, "whole numbers on one axis", came, hint)
    if len(found) == 0 or count not in (None, len(found)):
        wanted = "at least one" if count is None else f"{count}, one for each input"
        raise InputError(name, wanted, f"{len(found)}")
    return found.astype(np.int64)


def _row_numbers(name: str, value: Any, length: int | None, count: int, of: str = "test") -> Rows:
    rows = _whole(name, value, length)
    if rows.min() < 0 or rows.max() >= count:
        raise InputError(name, f"row numbers of the {count} {of} inputs", f"{rows.min()} to {rows.max()}")
    return rows


def _truths(name: str, value: Any, length: int) -> NDArray[np.bool_]:
    found = np.asarray(value)
    if found.shape != (length,) or found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all():
        came = f"an array of {found.dtype}, shape {found.shape}"
        raise InputError(name, f"{length} truth values, or 0 and 1", came)
    return found.astype(bool)


def _plain(name: str, pattern: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name):
        raise InputError(pattern, "a name of letters, digits, '_', '-' and '.'", name)
    return name

"""The feature file: an encoder's last layer and features on disk.

A ``.npz`` archive with the arrays

- ``train_features (N, F)``, ``train_labels (N,)``, ``test_features (M, F)``, ``test_labels (M,)``;
- ``weight (D, F)`` and ``bias (D,)`` of the last layer;
- ``unknown_NAME (K, F)``, any number: inputs of another kind;
- ``harmed_KIND_LEVEL (K, F)``, any number: the test inputs in ``harmed_rows (K,)``, harmed; KIND is any word, and a
  higher level is worse;
- ``pairs_left``, ``pairs_right``, ``pairs_same``, ``pairs_fold``, each (P,), or none of them: pairs of test inputs,
  whether both are of one class, and the fold of cross-validation. With ``pairs_features (n, F)`` they are row numbers
  in these and not in the test features; ``pairs_people_in_train (P,)`` may say which pairs have an input of a class
  that training has;
- ``calibration_features (C, F)``, ``calibration_labels (C,)``, or neither: known inputs that neither trained the
  encoder nor are among the test inputs.

The labels of the test inputs may be classes that training has not seen. Features may be saved in half precision.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer.arrays import Floats
from benchmarks.transfer.content import FeatureFile, Pairs
from benchmarks.transfer.feature_folders import LAST_LAYER, load_folders
from contrastive_curvature.errors import InputError, expected

__all__ = ["FeatureFile", "Pairs", "load_features", "save_features"]

_REQUIRED = ("train_features", "train_labels", "test_features", "test_labels", "weight", "bias")
_PAIRS = ("pairs_left", "pairs_right", "pairs_same", "pairs_fold")
_MORE_PAIRS = ("pairs_features", "pairs_people_in_train")
_CALIBRATION = ("calibration_features", "calibration_labels")
_UNKNOWN, _HARMED, _ROWS = "unknown_", "harmed_", "harmed_rows"
_SMALL = 65504.0
"""The largest number in half precision."""


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
        raise InputError(expected("path", "a name that ends in .npz", str(path)))
    arrays: dict[str, Any] = {name: getattr(content, name) for name in _REQUIRED}
    arrays |= {f"{_UNKNOWN}{name}": value for name, value in content.unknown.items()}
    arrays |= {f"{_HARMED}{kind}_{level}": value for (kind, level), value in content.harmed.items()}
    arrays |= _there({name: getattr(content, name) for name in _CALIBRATION})
    if content.pairs is not None:
        names = (*_PAIRS, *_MORE_PAIRS)
        arrays |= _there({name: getattr(content.pairs, name.removeprefix("pairs_")) for name in names})
    if half:
        arrays |= {name: _halved(name, value) for name, value in arrays.items() if _is_features(name)}
    if content.harmed_rows is not None:
        arrays[_ROWS] = content.harmed_rows
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
        # mkstemp gives a file that nobody else may read; features are no secret
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_features(path: Path) -> FeatureFile:
    """Read a feature file, anybody's.

    Args:
        path: A ``.npz`` archive. Arrays with names that have no meaning here are left out, with a warning. Or a folder
            of feature folders, see :mod:`benchmarks.transfer.feature_folders`.

    Returns:
        Its content, checked.

    Raises:
        InputError: It cannot be read, an array is missing, or one does not fit the others.
    """
    if (path / LAST_LAYER).is_file():
        return load_folders(path, _read(path / LAST_LAYER))
    arrays = _read(path)
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        hint = f"It holds {', '.join(sorted(arrays)) or 'nothing'}."
        raise InputError(expected(str(path), f"the arrays {', '.join(_REQUIRED)}", f"no {', '.join(missing)}", hint))
    unknown, harmed, strange = {}, {}, []
    for name, value in arrays.items():
        if name in (*_REQUIRED, *_PAIRS, *_MORE_PAIRS, *_CALIBRATION, _ROWS):
            continue
        if found := re.fullmatch(r"unknown_(.+)", name):
            unknown[found[1]] = value
        elif found := re.fullmatch(r"harmed_(.+)_([1-9]\d*)", name):
            harmed[found[1], int(found[2])] = value
        elif name.startswith(_HARMED):
            raise InputError(expected(str(path), "harmed_KIND_LEVEL with a level from 1 at its end", name))
        else:
            strange.append(name)
    if strange:
        msg = f"{path}: {', '.join(sorted(strange))} not used; inputs of another kind are named unknown_NAME."
        warnings.warn(msg, stacklevel=2)
    some = [name for name in (*_PAIRS, *_MORE_PAIRS) if name in arrays]
    if some and not arrays.keys() >= set(_PAIRS):
        raise InputError(expected(str(path), f"all of {', '.join(_PAIRS)}, or none", f"only {', '.join(some)}"))
    pairs: list[Any] = [arrays.get(name) for name in (*_PAIRS, *_MORE_PAIRS)]
    calibration: dict[str, Any] = {name: arrays.get(name) for name in _CALIBRATION}
    try:
        return FeatureFile(
            **{name: arrays[name] for name in _REQUIRED},
            unknown=unknown,
            harmed=harmed,
            harmed_rows=arrays.get(_ROWS),
            pairs=Pairs(*pairs) if some else None,
            **calibration,
        )
    except InputError as error:
        msg = f"{path}: {error}"
        raise InputError(msg) from None


def _read(path: Path) -> Mapping[str, NDArray[Any]]:
    wanted, hint = "a .npz archive of arrays", "numpy.savez writes one."
    try:
        # An array of objects would be unpickled, which can run anything.
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                return {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(expected(str(path), wanted, f"what cannot be read ({reason})", hint)) from None
    raise InputError(expected(str(path), wanted, "a single array", hint))


def _there(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arrays.items() if value is not None}


def _is_features(name: str) -> bool:
    return name.endswith("_features") or name.startswith((_UNKNOWN, _HARMED))


def _halved(name: str, value: Floats) -> NDArray[np.float16]:
    if np.abs(value).max() > _SMALL:
        raise InputError(expected(name, f"at most {_SMALL:.0f} in half precision", f"{np.abs(value).max()}"))
    return value.astype(np.float16)

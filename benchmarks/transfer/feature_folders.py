"""Feature folders in the place of a feature file: what ``contrastive_curvature.features`` wrote, and the last layer.

A folder with the feature folders ``train`` and ``test``, perhaps ``calibration`` and any number of ``unknown_NAME``,
all of one encoder, and the archive ``last_layer.npz`` with the arrays ``weight (D, F)`` and ``bias (D,)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from benchmarks.transfer.content import FeatureFile
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.feature_folder import FeatureFolder
from contrastive_curvature.io.feature_folder.header import HEADER, read_header

__all__ = ["LAST_LAYER", "files_of", "load_folders"]

LAST_LAYER = "last_layer.npz"

_UNKNOWN = "unknown_"


def load_folders(path: Path, last_layer: Mapping[str, NDArray[Any]]) -> FeatureFile:
    """Read the feature folders in a folder, all of them into memory.

    Args:
        path: The folder.
        last_layer: Arrays of :data:`LAST_LAYER`.

    Raises:
        InputError: One is missing, damaged, or of another encoder than the others; or an array does not fit.
    """
    missing = [name for name in ("weight", "bias") if name not in last_layer]
    if missing:
        raise InputError(expected(str(path / LAST_LAYER), "the arrays weight and bias", f"no {', '.join(missing)}"))
    found = {inner.parent.name: FeatureFolder(inner.parent) for inner in sorted(path.glob(f"*/{HEADER}"))}
    absent = [name for name in ("train", "test") if name not in found]
    if absent:
        hint = "contrastive_curvature.features(encoder, loader, path) writes one."
        raise InputError(expected(str(path), "the feature folders train and test", f"no {', '.join(absent)}", hint))
    sources = {name: read_header(folder.path).source for name, folder in found.items()}
    for name, source in sources.items():
        if (source.last_layer, source.trunk) != (sources["train"].last_layer, sources["train"].trunk):
            raise InputError(expected(str(path / name), "features of the encoder of train", "those of another"))
    calibration = found.get("calibration")
    return FeatureFile(
        found["train"].numpy(),
        found["train"].targets.numpy(),
        found["test"].numpy(),
        found["test"].targets.numpy(),
        last_layer["weight"],
        last_layer["bias"],
        unknown={
            name.removeprefix(_UNKNOWN): folder.numpy() for name, folder in found.items() if name.startswith(_UNKNOWN)
        },
        calibration_features=None if calibration is None else calibration.numpy(),
        calibration_labels=None if calibration is None else calibration.targets.numpy(),
    )


def files_of(path: Path) -> list[Path]:
    """The files that tell features apart: the feature file itself, or headers, which have checksums of the others."""
    return [*sorted(path.glob(f"*/{HEADER}")), path / LAST_LAYER] if path.is_dir() else [path]

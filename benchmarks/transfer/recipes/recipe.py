"""What a recipe is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.transfer.feature_file import FeatureFile


@dataclass(frozen=True)
class Recipe:
    """How to make the feature file of one encoder.

    Args:
        name: Of the feature file, without its ending.
        title: As in a table.
        make: Called with the data root, a folder for what is worth keeping between encoders, and a seed. Gives the same
            features for the same seed on the same machine.
    """

    name: str
    title: str
    make: Callable[[Path, Path, int], FeatureFile]

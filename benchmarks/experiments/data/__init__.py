"""The data sets of the benchmarks: images to train with, to retrieve, and out of distribution.

:func:`load_data` reads one by name; :mod:`benchmarks.experiments.data.split` says what comes back.
"""

from __future__ import annotations

from benchmarks.experiments.data.load import load_data
from benchmarks.experiments.data.registry import DATASETS, DatasetEntry
from benchmarks.experiments.data.split import FileSplit, RetrievalData, Split, TensorSplit, loader

__all__ = ["DATASETS", "DatasetEntry", "FileSplit", "RetrievalData", "Split", "TensorSplit", "load_data", "loader"]

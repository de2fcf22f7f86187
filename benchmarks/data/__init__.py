"""The data sets of the benchmarks: images to train with, to retrieve, and out of distribution.

:func:`load_data` reads one by name; :mod:`benchmarks.data.split` says what comes back.
"""

from __future__ import annotations

from benchmarks.data.load import DATASETS, DatasetEntry, load_data
from benchmarks.data.split import FileSplit, RetrievalData, Split, TensorSplit, loader

__all__ = ["DATASETS", "DatasetEntry", "FileSplit", "RetrievalData", "Split", "TensorSplit", "load_data", "loader"]

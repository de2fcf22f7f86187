"""scikit-learn's handwritten digits, for quick runs and tests; there is no such table in the paper."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import RetrievalData, TensorSplit

_TEST = 600
_WHITE = 16


def load_digits_data(_root: Path, _options: LoadOptions) -> RetrievalData:
    """A fixed split with as many test images of each class.

    Args:
        _root: Has no part in it: the images come with scikit-learn.
        _options: Neither have they.

    Returns:
        1197 and 600 images (1, 8, 8) of ten classes.
    """
    from sklearn.datasets import load_digits  # costs a second; the other data sets do without
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels, classes, test_size=_TEST, stratify=classes, random_state=0)
    train_x, test_x = (torch.from_numpy(part).to(torch.uint8).view(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.from_numpy(part).long() for part in parts[2:])
    return RetrievalData(
        name="digits",
        title="Digits",
        ood_title="",
        train=TensorSplit(train_x, train_y, _WHITE),
        test=TensorSplit(test_x, test_y, _WHITE),
        classes=tuple(str(digit) for digit in range(10)),
    )

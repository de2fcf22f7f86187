"""Observers of a fit: they collect data on its points while their curvature is summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.fit.class_centres import TYPICAL, CentreCollector
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import RowCollector, content_numbers
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.finite import check_finite, sum_is_finite

FEATURES = "features"
"""Name of the kept features."""


class Observer(Protocol):
    """Observer of all parts for one set of parameters."""

    def add(self, part: Part, term: Structure) -> None:
        """Observe a part; ``term`` is the curvature of its points."""

    def noted(self, total: Total) -> Total:
        """Return the sum over all parts with the collected data."""


class FiniteCheck:
    """Refuses a curvature with NaN or infinity; once in the sum, they stay there."""

    def __init__(self, pullback: Pullback) -> None:
        self._pullback = pullback
        self._finite = torch.tensor(True, device="cpu")
        self._batches: Tensor | int = 0
        """Number of batches before the first one that is not finite."""

    def add(self, part: Part, term: Structure) -> None:
        """Record whether the sum is still finite."""
        del part
        # The result is read once at the end, because reading from the device in every batch would stall it.
        finite = sum_is_finite(term.tensors())
        self._finite = self._finite.to(finite.device) & finite
        self._batches = self._batches + self._finite

    def noted(self, total: Total) -> Total:
        """Refuse a sum that is not finite, and name the layer and the batch."""
        if not bool(self._finite) and total.curvature is not None:
            where = f"batch {int(self._batches)} (counted from 0)"
            check_finite(total.curvature.plain(), self._pullback, where)
        return total


class FeatureSample:
    """Keeps a sample of the features of a last layer, with class labels if all points have one."""

    def __init__(self, pullback: LastLayerPullback) -> None:
        width = pullback.encoder.require_last_layer().in_features
        # At most 2,000 rows and 2^24 numbers, but at least 200 rows, to have some of each class.
        self._rows = RowCollector(max(200, min(2000, 2**24 // max(1, width))))

    def add(self, part: Part, term: Structure) -> None:
        """Keep some of the features of a part."""
        del term
        classes = {} if part.classes is None else {"classes": waiting.sent(part.classes, part.z.device)}
        self._rows.add(content_numbers(part.z), {"features": part.context} | classes)

    def noted(self, total: Total) -> Total:
        """Return the sum with the features."""
        return replace(total, kept={**total.kept, FEATURES: self._rows.rows()})


class ClassSums:
    """Sums the embeddings of every class, if all points have a class label."""

    def __init__(self) -> None:
        self._classes: CentreCollector | None = CentreCollector()

    def add(self, part: Part, term: Structure) -> None:
        """Add the embeddings of a part."""
        del term
        if part.classes is None:
            self._classes = None
        elif self._classes is not None:
            self._classes.add(part.z, part.classes)

    def noted(self, total: Total) -> Total:
        """Return the sum with counts and sums by class."""
        if self._classes is None:
            return total
        table, typical = self._classes.found()
        return replace(total, classes=table, kept={**total.kept, TYPICAL: typical})

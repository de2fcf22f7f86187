"""What a fit notes of its points while their curvature is summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

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
    """Sees the parts of one set of parameters pass by."""

    def add(self, part: Part, term: Structure) -> None:
        """Note a part, whose points have a curvature of their own, the term."""

    def noted(self, total: Total) -> Total:
        """Return the sum over all parts with what was noted."""


class FiniteCheck:
    """Refuses a curvature with NaN or infinity, which no further batch takes out of the sum."""

    def __init__(self, pullback: Pullback) -> None:
        self._pullback = pullback
        self._finite = torch.tensor(True)
        self._batches: Tensor | int = 0
        """Number of batches before the first one that is not finite."""

    def add(self, part: Part, term: Structure) -> None:
        """Note whether the sum is still finite."""
        del part
        # Read once at the end: a look at the device in every batch would keep it waiting.
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
    """Keeps some features of a last layer, with class labels where all points have one."""

    def __init__(self, pullback: LastLayerPullback) -> None:
        width = pullback.encoder.require_last_layer().in_features
        # 2,000 rows and 2^24 numbers at most, but 200 rows of any width: some of each class.
        self._rows = RowCollector(max(200, min(2000, 2**24 // max(1, width))))

    def add(self, part: Part, term: Structure) -> None:
        """Keep some of the features of a part."""
        del term
        classes = {} if part.classes is None else {"classes": part.classes}
        self._rows.add(content_numbers(part.z), {"features": part.context} | classes)

    def noted(self, total: Total) -> Total:
        """Return the sum with the features."""
        return replace(total, kept={**total.kept, FEATURES: self._rows.rows()})


class ClassSums:
    """Sums the embeddings of every class, where all points have a class label."""

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
        """Return the sum with numbers and sums of the classes."""
        if self._classes is None:
            return total
        table, typical = self._classes.found()
        return replace(total, classes=table, kept={**total.kept, TYPICAL: typical})

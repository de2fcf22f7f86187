"""Sums of the embeddings of every class, taken while batches pass by."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.class_centres import MOST_NUMBERS, ClassCentres, add_sums, class_sums
from contrastive_curvature.ggn.feature_sample import FeatureSample

__all__ = ["ClassSums"]


class ClassSums:
    """Makes the :class:`ClassCentres` of a stream of labelled outputs; they need not be in memory together."""

    def __init__(self) -> None:
        self._found: tuple[Tensor, Tensor] | None = None
        self._sample: FeatureSample | None = None
        self._n = 0
        self._too_many = False

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Take raw outputs (B, D) with class labels (B,) into account."""
        if self._too_many:
            return
        new = class_sums(outputs, labels)
        self._found = new if self._found is None else add_sums(self._found, new)
        # More classes only follow.
        self._too_many = self._found[1].numel() > MOST_NUMBERS
        if self._sample is None:
            self._sample = FeatureSample(outputs.shape[1])
        self._sample.add(outputs)
        self._n += len(outputs)

    def centres(self) -> ClassCentres | None:
        """The centres, or ``None``, see :meth:`ClassCentres.of`."""
        if self._found is None or self._sample is None or self._too_many:
            return None
        return ClassCentres.from_sums(*self._found, self._sample.rows, self._n)

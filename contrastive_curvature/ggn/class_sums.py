"""Sums of the embeddings of every class, taken while batches pass by."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.class_centres import MOST_NUMBERS, ClassCentres, add_sums, class_sums
from contrastive_curvature.ggn.feature_sample import FeatureSample

__all__ = ["ClassSums"]

_WAITING = 2**16
"""Numbers that wait at least, before they are added to the sums."""


class ClassSums:
    """Makes the :class:`ClassCentres` of a stream of labelled outputs; they need not be in memory together."""

    def __init__(self) -> None:
        self._found: tuple[Tensor, Tensor] | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._sample: FeatureSample | None = None
        self._of = FeatureSample(1)
        self._n = 0
        self._too_many = False

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Take raw outputs (B, D) with class labels (B,) into account."""
        if self._too_many:
            return
        self._waiting.append(class_sums(outputs, labels))
        # As many as there are sums already, or every batch would go over all classes.
        enough = _WAITING if self._found is None else max(_WAITING, self._found[1].numel())
        if sum(sums.numel() for _, sums in self._waiting) >= enough:
            self._take()
        if self._sample is None:
            self._sample, self._of = FeatureSample(outputs.shape[1]), FeatureSample(1)
            # Of one size and one seed, both draw the same rows.
            self._of.size = self._sample.size
        self._sample.add(outputs)
        self._of.add(labels.unsqueeze(1))
        self._n += len(outputs)

    def centres(self) -> ClassCentres | None:
        """The centres, or ``None``, see :meth:`ClassCentres.of`."""
        self._take()
        if self._found is None or self._sample is None or self._too_many:
            return None
        return ClassCentres.from_sums(*self._found, self._sample.rows, self._of.rows.squeeze(1), self._n)

    def _take(self) -> None:
        parts = [*([] if self._found is None else [self._found]), *self._waiting]
        if parts:
            self._found, self._waiting = add_sums(parts), []
            # More classes only follow.
            self._too_many = self._found[1].numel() > MOST_NUMBERS

"""A random sample of the features of a data set, drawn while they pass by."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.parts.rows import KEYS, Rows, point_keys

__all__ = ["FeatureSample"]

_MOST_POINTS = 2000
_MOST_NUMBERS = 2**22
_LEAST_POINTS = 200


class FeatureSample:
    """Rows drawn uniformly and without replacement from a stream of unknown length: those with the smallest keys.

    At most 2,000 rows and 2^22 numbers, but 200 rows of any width. The keys follow from the numbers of the points where
    they are given, or come from a generator of its own; so the draw neither depends on torch's nor changes it.

    Args:
        width: Number F of features.

    Attributes:
        size: Number of rows that are kept of a long stream.
    """

    def __init__(self, width: int) -> None:
        self.size = max(_LEAST_POINTS, min(_MOST_POINTS, _MOST_NUMBERS // max(1, width)))
        self._generator = torch.Generator().manual_seed(0)
        self._keys = torch.empty(0, dtype=torch.float64)
        self._store: Tensor | None = None

    @classmethod
    def of(cls, pullback: Pullback) -> FeatureSample | None:
        """An empty sample for the features that a pullback sees; ``None`` where it sees none."""
        if not isinstance(pullback, LastLayerPullback):
            return None
        return cls(pullback.encoder.require_last_layer().in_features)

    def __len__(self) -> int:
        """Number m of rows so far."""
        return len(self._keys)

    @property
    def rows(self) -> Tensor:
        """The rows, shape (m, F).

        Raises:
            RuntimeError: Nothing was added.
        """
        if self._store is None:
            msg = "no features were added"
            raise RuntimeError(msg)
        return self._store[: len(self)]

    def add(self, rows: Tensor, numbers: Tensor | None = None) -> None:
        """Take a batch of features into account.

        Args:
            rows: Shape (B, F).
            numbers: Of the points, shape (B,), so that the sample does not depend on how the data is divided; ``None``
                draws keys.
        """
        rows = rows.detach()
        if numbers is None:
            keys = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        else:
            keys = 0.5 + point_keys(numbers).double() / 2.0**64
        self._add(rows, keys)

    def kept(self) -> Rows:
        """The rows with their keys, as states of parts have them."""
        # Keys of 53 bits, as whole numbers that come back without rounding.
        return Rows(self.size, (self._keys * 2.0**53).round().to(torch.int64), {"rows": self.rows}, KEYS)

    @classmethod
    def of_kept(cls, kept: Rows) -> FeatureSample:
        """The sample of what :meth:`kept` gave, perhaps of several parts."""
        rows = kept.columns["rows"]
        out = cls(rows.shape[1])
        out._add(rows, kept.numbers.double() / 2.0**53)
        return out

    def merged(self, other: FeatureSample) -> FeatureSample:
        """A sample of the two streams together; every row of both was as likely to be drawn."""
        out = FeatureSample(self.rows.shape[1])
        for part in (self, other):
            out._add(part.rows.to(self.rows), part._keys)
        return out

    def _add(self, rows: Tensor, keys: Tensor) -> None:
        room = self.size - len(self)
        if room > 0:
            self._append(rows[:room], keys[:room])
            rows, keys = rows[room:], keys[room:]
        if not len(rows) or not bool((keys < self._keys.max()).any()):
            return
        both = torch.cat([self._keys, keys])
        kept = torch.zeros(len(both), dtype=torch.bool)
        kept[both.topk(self.size, largest=False).indices] = True
        # Few rows change in a long stream, so they are replaced where they stand.
        leaving, coming = (~kept[: self.size]).nonzero().flatten(), kept[self.size :].nonzero().flatten()
        self._keys[leaving] = keys[coming]
        self.rows[leaving.to(rows.device)] = rows[coming.to(rows.device)]

    def _append(self, rows: Tensor, keys: Tensor) -> None:
        filled, needed = len(self), len(self) + len(rows)
        if self._store is None or needed > len(self._store):
            # Doubled, so that many small batches are not copied again for each of them.
            store = rows.new_empty(min(self.size, max(needed, 2 * filled)), rows.shape[1])
            if self._store is not None:
                store[:filled] = self._store[:filled]
            self._store = store
        self._store[filled:needed] = rows
        self._keys = torch.cat([self._keys, keys])

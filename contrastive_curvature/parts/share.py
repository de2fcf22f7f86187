"""One process's share of a data set: which number every point of a loader has, and which points are padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.loader import loader_parts

__all__ = ["Share"]

_FAR = 2**40
"""Distance between the numbers of the points of two shares whose loaders say nothing about them."""


class Share:
    """The batches of a loader with the numbers of their points, and without padding.

    A loader with a ``DistributedSampler`` gives the numbers of its data set; one with the attribute ``numbers`` those.
    Any other one counts its points, from a place of its own for every share.

    Args:
        loader: Gives the same points in every pass.
        index: Of the share.

    Attributes:
        loader: The same.

    Raises:
        UnsupportedError: The loader divides the data in a way that does not say which points are padding.
    """

    def __init__(self, loader: Any, index: int = 0) -> None:
        self.loader, self._start = loader, index * _FAR
        self._numbers: Tensor | None = None
        self._real: Tensor | None = None
        given = getattr(loader, "numbers", None)
        if isinstance(given, Tensor):
            self._numbers = given
        for part in loader_parts(loader):
            if isinstance(part, DistributedSampler):
                self._numbers = torch.tensor(list(part), dtype=torch.int64)
                # Every replica takes every num_replicas-th of a list whose end repeats its beginning.
                place = part.rank + part.num_replicas * torch.arange(len(self._numbers))
                self._real = place < len(part.dataset)  # type: ignore[arg-type]
                return
        if type(loader).__module__.startswith("accelerate"):
            msg = (
                f"train_loader: {type(loader).__name__} does not say which points only fill up a batch. Give every "
                "process a DataLoader with sampler=torch.utils.data.DistributedSampler(dataset, shuffle=False)."
            )
            raise UnsupportedError(msg)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Batches and the numbers of their points, int64, shape (B,); of a batch of padding alone nothing."""
        start = 0
        for batch in self.loader:
            count = _length(batch) or 0
            if self._numbers is None:
                first = self._start + start
                yield batch, torch.arange(first, first + count)
                start += count
                continue
            numbers = self._numbers[start : start + count]
            real = None if self._real is None else self._real[start : start + count]
            start += count
            if real is None or bool(real.all()):
                yield batch, numbers
            elif bool(real.any()):
                yield _selected(batch, real), numbers[real]


def _length(batch: Any) -> int | None:
    """Number of points of a batch as a loader gives it: that of its first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for n in map(_length, parts) if n is not None), None)


def _selected(batch: Any, rows: Tensor) -> Any:
    """Some points of a batch, ``rows`` (B,) boolean."""
    if isinstance(batch, Tensor):
        return batch[rows.to(batch.device)] if batch.ndim and batch.shape[0] == len(rows) else batch
    if isinstance(batch, Mapping):
        return {key: _selected(part, rows) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_selected(part, rows) for part in batch]
    return batch

"""One process's share of a data set: the number of every point of a loader, and the points that are padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.network.inputs import is_texts
from contrastive_curvature.network.loader import loader_parts

_FAR = 2**40
"""Distance between the numbers of the points of two shares whose loaders say nothing about them."""


class Share:
    """The batches of a loader with the numbers of their points, and without padding.

    A loader with a ``DistributedSampler`` has the numbers of its data set; a loader with the attribute ``numbers`` has
    these numbers. For any other loader points are counted, with another start for every share. The order of a loader is
    a matter of :func:`~contrastive_curvature.network.loader.in_fixed_order`.

    Args:
        loader: Loader that gives the same points in every pass.
        index: Index of the share.

    Attributes:
        loader: The loader.

    Raises:
        UnsupportedError: The loader divides the data, but does not show which points are padding.
    """

    def __init__(self, loader: Any, index: int = 0) -> None:
        self.loader, self.start = loader, index * _FAR
        self._numbers: Tensor | None = None
        numbers = getattr(loader, "numbers", None)
        if numbers is not None:
            self._numbers = _whole_numbers(numbers)
            self._real = torch.ones(len(self._numbers), dtype=torch.bool, device="cpu")
        parts = loader_parts(loader)
        sampler = next((part for part in parts if isinstance(part, DistributedSampler)), None)
        if sampler is not None:
            self._take_numbers(sampler, parts)
        elif any(_divides(part) for part in parts):
            raise UnsupportedError(
                f"train_loader: {type(loader).__name__} does not say which points only fill up a batch. Give every "
                "process a DataLoader with sampler=torch.utils.data.DistributedSampler(dataset, shuffle=False)."
            )

    def _take_numbers(self, sampler: DistributedSampler[Any], parts: list[Any]) -> None:
        points = len(sampler.dataset)  # type: ignore[arg-type]
        if not _keeps_order(sampler, parts):
            if sampler.drop_last or points % sampler.num_replicas == 0:
                return
            raise UnsupportedError(
                f"train_loader: its DistributedSampler repeats points, as {points} points are no multiple of "
                f"{sampler.num_replicas} processes, and the batch sampler around it does not say which ones. Use a "
                "DataLoader(dataset, batch_size=..., sampler=sampler), or drop_last=True in the sampler."
            )
        self._numbers = torch.tensor(list(sampler), dtype=torch.int64, device="cpu")
        # Every replica takes each num_replicas-th entry of a list whose end repeats its beginning.
        self._real = sampler.rank + sampler.num_replicas * torch.arange(len(self._numbers), device="cpu") < points

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield batches and the numbers of their points, int64, shape (B,); skip batches that are only padding."""
        start = 0
        for batch in self.loader:
            count = _length(batch) or 0
            rows = slice(start, start + count)
            start = rows.stop
            if self._numbers is None:
                yield batch, self.start + torch.arange(rows.start, rows.stop, device="cpu")
                continue
            numbers, real = self._numbers[rows], self._real[rows]
            if len(numbers) < count:
                hint = "Which of them are padding is unknown. Give batches with one row for each point of the sampler."
                wanted = f"the {len(self._numbers)} points of its sampler"
                raise InputError("train_loader", wanted, f"{start} or more", hint)
            if bool(real.all()):
                yield batch, numbers
            elif bool(real.any()):
                yield _selected(batch, real), numbers[real]


class Rest:
    """The batches of a loader without some of its points; a batch without any point left is skipped.

    Args:
        loader: Loader that gives the same points in the same order in every pass.
        gone: Numbers of the removed points as a fit counts them, whole numbers, shape (M,).

    Attributes:
        count: Number of points of the loader, after a pass.

    Raises:
        InputError: ``gone`` is not such a tensor; or, after a pass, a number is not in the loader, or belonged to
            another point in an earlier pass.
    """

    def __init__(self, loader: Any, gone: Any) -> None:
        numbers = torch.as_tensor(gone, device="cpu")
        if numbers.ndim != 1 or numbers.is_floating_point() or numbers.dtype == torch.bool:
            got = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
            raise InputError("gone", "positions of points, whole numbers (M,)", got, "Of a mask: mask.nonzero()[:, 0].")
        self.loader, self.gone, self.count = loader, numbers.unique(), 0
        self._removed: list[Any] | None = None

    def kept(self, numbers: Tensor) -> Tensor:
        """Return which points stay, boolean (B,), by their numbers (B,)."""
        return ~torch.isin(numbers, self.gone)

    def __iter__(self) -> Iterator[Any]:
        count, left, removed = 0, self.gone, []
        for batch, numbers in Share(self.loader):
            count, left = count + len(numbers), left[~torch.isin(left, numbers)]
            keep = self.kept(numbers)
            if not bool(keep.all()):
                removed.append(_selected(batch, ~keep))
            if bool(keep.any()):
                yield _selected(batch, keep)
        if len(left):
            raise InputError("gone", f"positions among the {count} points of the loader", left[:5].tolist())
        if self._removed is not None and not _equal(self._removed, removed):
            hint = "Pass a loader that gives the same points in the same order in every pass, without augmentation."
            raise InputError("train_loader", "the same points at the positions of gone", "other ones", hint)
        self.count, self._removed = count, removed


def _whole_numbers(source: Any) -> Tensor:
    """Return the numbers of points that a loader has as an attribute, int64, shape (N,)."""
    numbers = source if isinstance(source, Tensor) else torch.as_tensor(list(source), device="cpu")
    if numbers.ndim != 1 or (numbers.is_floating_point() and len(numbers)):
        wanted = "whole numbers, one for each point in its order"
        raise InputError("loader.numbers", wanted, f"{numbers.dtype} of shape {tuple(numbers.shape)}")
    return numbers.to("cpu", torch.int64)


def _keeps_order(sampler: DistributedSampler[Any], parts: list[Any]) -> bool:
    """Return whether points come in the order of the sampler."""
    loaders = [
        part
        for part in parts
        if isinstance(part, DataLoader)
        and (part.sampler is sampler or getattr(part.batch_sampler, "sampler", None) is sampler)
    ]
    return bool(loaders) and all(
        type(loader.batch_sampler) in (BatchSampler, type(None)) and getattr(loader, "in_order", True)
        for loader in loaders
    )


def _divides(part: Any) -> bool:
    """Return whether this is one of Accelerate's shards of several processes."""
    several = getattr(part, "num_processes", 1)
    return type(part).__module__.startswith("accelerate") and isinstance(several, int) and several > 1


def _length(batch: Any) -> int | None:
    """Return the number of points of a loader's batch: the length of its first tensor or list of texts."""
    if is_texts(batch):
        return len(batch)
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for n in map(_length, parts) if n is not None), None)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two batches are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return all(_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _selected(batch: Any, rows: Tensor) -> Any:
    """Return some points of a batch, ``rows`` (B,) boolean."""
    if is_texts(batch):
        return [text for text, wanted in zip(batch, rows.tolist(), strict=True) if wanted]
    if isinstance(batch, Tensor):
        return batch[rows.to(batch.device)] if batch.ndim and batch.shape[0] == len(rows) else batch
    if isinstance(batch, Mapping):
        return {key: _selected(part, rows) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_selected(part, rows) for part in batch]
    return batch

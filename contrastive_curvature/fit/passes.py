"""The passes of a fit over its data, which must see the same outputs with the same targets, in any order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.part_state import Origin
from contrastive_curvature.fit.readers import Batch
from contrastive_curvature.hessian.blocks import UnrepresentableError, holds_curvature
from contrastive_curvature.hessian.sphere import check_outputs, norms
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import point_keys
from contrastive_curvature.progress import Progress

_EXTREMES = 16
"""Lowest and highest numbers of a pass that its summary keeps."""


class PassRecord:
    """A summary of every point of a pass: key of its target, norm of its output, and output along one direction.

    Outputs are rounded differently in batches of another composition, so points cannot be compared exactly. But after
    sorting within each target, the numbers of two passes over the same data agree up to the rounding of a single
    output, while one point with another target or another output shifts the sorted numbers.
    """

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self._coarse: list[Tensor] = []

    def add(self, z: Tensor, targets: Tensor) -> None:
        """Record a batch."""
        wide = z.detach().double()
        along = wide @ _direction(z.shape[1], z.device)
        # Outputs that half precision represents exactly were computed in half precision.
        self._coarse.append((z.detach().bfloat16() == z).all() | (z.detach().half() == z).all())
        self._targets.append(_target_keys(targets))
        self._numbers.append(torch.stack([along, wide.norm(dim=1)], dim=1))

    def check_same(self, again: PassRecord) -> None:
        """Refuse a later pass over other data; if this pass recorded only targets, over other targets."""
        targets, numbers = self._joined()
        other_targets, other_numbers = again._joined()
        equal = torch.zeros_like(targets)
        if len(targets) != len(other_targets):
            got = f"{len(targets)} points in the first pass and {len(other_targets)} in a later one"
        elif not len(numbers):
            if torch.equal(targets.sort().values, other_targets.to(targets.device).sort().values):
                return
            got = "other targets"
        elif _agree(targets, numbers, other_targets, other_numbers, self._rounding(numbers)):
            return
        elif _agree(equal, numbers, equal, other_numbers, self._rounding(numbers)):
            got = "the same outputs with other targets, so inputs and labels are not paired in the same way"
        else:
            got = "different outputs"
        hint = (
            "Turn random augmentation and drop_last off (shuffling is fine). pairs='batch' allows augmentation: it "
            "compares targets alone."
        )
        raise InputError("train_loader", "the same data in every pass", got, hint)

    def add_targets(self, targets: Tensor) -> None:
        """Record the targets of a batch, shape (B, ...), without outputs."""
        self._targets.append(_target_keys(targets))

    def origin(self) -> Origin:
        """Return a summary of the pass in a few numbers."""
        targets, numbers = self._joined()
        along, norm = numbers.sum(0).tolist()
        k = min(_EXTREMES, len(numbers))
        extremes = torch.cat([numbers.topk(k, 0, largest=largest).values.flatten() for largest in (False, True)])
        # Sum keys, because sums of labels agree too easily; the sum wraps around.
        keys = point_keys(targets)
        bound = float(numbers[:, 0].cpu() @ (keys.double() / 2.0**63)) if len(numbers) == len(keys) else 0.0
        extreme = tuple(extremes.tolist())
        return Origin(len(targets), int(keys.sum()), along, norm, bound, extreme, self._rounding(numbers))

    def _rounding(self, numbers: Tensor) -> float:
        """Return the tolerance: relative difference of one number in batches of different sizes."""
        # It depends on the precision: 10 bits for float32 convolutions on a GPU (TF32), 7 under autocast.
        coarse = bool(torch.stack(self._coarse).all()) if self._coarse else True
        return 1e-3 if numbers.device.type == "cpu" and not coarse else 1e-2

    def _joined(self) -> tuple[Tensor, Tensor]:
        numbers = torch.cat(self._numbers) if self._numbers else torch.zeros(0, 2, dtype=torch.float64, device="cpu")
        targets = torch.cat(self._targets) if self._targets else torch.zeros(0, dtype=torch.int64, device="cpu")
        return targets.to(numbers.device), numbers


@dataclass
class Passes:
    """The passes of one fit over its data.

    Args:
        reader: A :class:`~.readers.Reader` of the batches; for two towers, a ``TowerReader``.
        encoder: The analysed encoder, in evaluation mode.
        pullback: Pullback to the encoder's parameters.
        records: Whether :meth:`origin` is needed, even for a fit with one pass.
        first: Record of the first pass, if this process has run it.
        latest: Record of the latest pass.
        cached: Batches with outputs and features, so that later passes need not run the encoder again.
    """

    reader: Any
    encoder: Encoder
    pullback: Pullback
    records: bool = False
    first: PassRecord | None = None
    latest: PassRecord | None = None
    cached: list[tuple[Batch, Tensor, Any]] = field(default_factory=list)

    def embedded(self, progress: Progress) -> Iterator[tuple[Batch, Tensor, Tensor | None]]:
        """Run the encoder; yield every batch with its raw outputs (n, D) and, for a last layer, its features (n, F)."""
        last_layer = isinstance(self.pullback, LastLayerPullback)
        batches: Iterable[Batch] = progress.over(self.reader, "[embedding]", last=False)
        for number, batch in enumerate(batches):
            z, features = self.encoder.forward_with_features(batch.x) if last_layer else (self.encoder(batch.x), None)
            yield batch, check_batch(z, "model(x)", number), features

    def again(self, progress: Progress, title: str) -> Iterator[tuple[Batch, Tensor, Any]]:
        """Yield every batch with its raw outputs (n, D) and context; refuse other data than in the first pass."""
        if self.cached:
            yield from progress.over(self.cached, title)
            return
        record = PassRecord() if self.records or self.first is not None else None
        for number, batch in enumerate(progress.over(self.reader, title)):
            z, context = self.pullback.forward(batch.x)
            check_batch(z, "model(x)", number)
            if record is not None:
                record.add(z, batch.labels)
            yield batch, z, context
        if record is not None and self.first is not None:
            self.first.check_same(record)
        self.latest = record

    def origin(self) -> Origin:
        """Return a summary of the points of the latest pass in a few numbers."""
        return Origin(0, 0, 0.0, 0.0) if self.latest is None else self.latest.origin()


def check_batch(z: Tensor, outputs: str, number: int) -> Tensor:
    """Return raw outputs (n, D) of a batch in at least float32; refuse unusable ones, and name the batch."""
    outputs = f"{outputs} of batch {number} (counted from 0)"
    z = check_outputs(z, outputs)
    n = norms(z.detach())
    held = holds_curvature(n)
    waiting.require(held.all(), partial(UnrepresentableError.at, n, held, outputs))
    return z


@functools.cache
def _direction(dim: int, device: torch.device) -> Tensor:
    """Return a unit vector (D,), the same in every process."""
    direction = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    return (direction / direction.norm()).to(device)


def _agree(targets: Tensor, numbers: Tensor, other_targets: Tensor, other_numbers: Tensor, tolerance: float) -> bool:
    # Relative to the norm of the point plus a typical norm, so that one huge point does not hide changes of others.
    typical = numbers[:, 1].median() if len(numbers) else numbers.new_zeros(())
    for column in range(numbers.shape[1]):
        first, second = _order(targets, numbers[:, column]), _order(other_targets, other_numbers[:, column])
        if not torch.equal(targets[first], other_targets[second]):
            return False
        a, b = numbers[first], other_numbers[second]
        allowed = tolerance * (torch.maximum(a[:, 1], b[:, 1]) + typical)
        if not bool(((a[:, column] - b[:, column]).abs() <= allowed).all()):
            return False
    return True


def _order(targets: Tensor, numbers: Tensor) -> Tensor:
    """Return positions sorted by target, and by number within a target."""
    by_number = numbers.argsort()
    return by_number[targets[by_number].argsort(stable=True)]


def _target_keys(targets: Tensor) -> Tensor:
    """Return one integer per target, shape (B,): equal for equal targets, almost surely different for others."""
    if targets.is_complex():
        targets = torch.view_as_real(targets)
    flat = targets.detach().reshape(targets.shape[0], -1)
    whole = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    return (whole * _odd_factors(flat.shape[1], whole.device)).sum(1)


@functools.cache
def _odd_factors(columns: int, device: torch.device) -> Tensor:
    """Return odd numbers, the same in every process.

    Multiplication with an odd number is injective modulo 2^64: different values of one column give different keys.
    """
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (columns,), generator=generator, device="cpu") * 2 + 1).to(device)

"""Whether two passes over a loader saw the same points: outputs bound to targets, in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

__all__ = ["PassRecord"]


class PassRecord:
    """What is kept of every point of a pass: a number for its target, its length, and its output along one direction.

    Batches of another composition round outputs differently, so points cannot be recognised to the last bit. Sorted
    within their targets, though, the numbers of two passes agree one by one up to the rounding of a single output, and
    a single point with another target or another output shifts them.
    """

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self._coarse = True

    def add(self, z: Tensor, targets: Tensor) -> None:
        """Take in a batch.

        Args:
            z: Raw outputs, shape (B, D).
            targets: Their targets, shape (B, ...).
        """
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(z.shape[1], generator=generator, dtype=torch.float64).to(z.device)
        wide = z.detach().double()
        along = wide @ (direction / direction.norm())
        # Numbers that half precision holds without loss came out of it.
        self._coarse &= bool((z.detach().bfloat16() == z).all()) or bool((z.detach().half() == z).all())
        self._targets.append(_target_keys(targets))
        self._numbers.append(torch.stack([along, wide.norm(dim=1)], dim=1))

    def check_same(self, again: PassRecord) -> None:
        """Refuse a later pass that saw something else.

        Args:
            again: The later pass, finished.

        Raises:
            InputError: It had another number of points, other outputs, or other targets for the same outputs.
        """
        targets, numbers = self._whole()
        others, found = again._whole()
        if len(targets) != len(others):
            came = f"{len(targets)} points in the first pass and {len(others)} in a later one"
            raise _differ(came)
        if _agree(targets, numbers, others, found, self._coarse):
            return
        alike = torch.zeros_like(targets)
        joined = "the same outputs with other targets, so inputs and labels are not joined in the same way"
        came = joined if _agree(alike, numbers, alike, found, self._coarse) else "different outputs"
        raise _differ(came)

    def check_same_targets(self, again: PassRecord) -> None:
        """Refuse a later pass whose targets are others, whatever its outputs.

        Raises:
            InputError: The targets, counted, are not the same.
        """
        mine, others = (torch.cat(record._targets or [torch.zeros(0)]).sort().values for record in (self, again))
        if not torch.equal(mine, others):
            came = "other targets"
            raise _differ(came)

    def add_targets(self, targets: Tensor) -> None:
        """Take in the targets of a batch, shape (B, ...), without outputs: for :meth:`check_same_targets`."""
        self._targets.append(_target_keys(targets))

    def _whole(self) -> tuple[Tensor, Tensor]:
        if not self._targets:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.float64)
        return torch.cat(self._targets), torch.cat(self._numbers)


def _differ(came: str) -> InputError:
    hint = "Turn random augmentation and drop_last off (shuffling is fine), or use pairs='batch': it needs one pass."
    return InputError(expected("train_loader", "the same data in every pass", came, hint))


def _agree(targets: Tensor, numbers: Tensor, others: Tensor, found: Tensor, coarse: bool) -> bool:
    # On a GPU, convolutions of float32 are computed with 10 bits (TF32), under autocast a network with 7, and in
    # batches of other sizes they round differently.
    tolerance = 1e-3 if numbers.device.type == "cpu" and not coarse else 1e-2
    # Of the point itself and of a usual one: a single huge point must not make room for changes of all others.
    typical = numbers[:, 1].median() if len(numbers) else numbers.new_zeros(())
    for column in range(numbers.shape[1]):
        first, second = _order(targets, numbers[:, column]), _order(others, found[:, column])
        if not torch.equal(targets[first], others[second]):
            return False
        a, b = numbers[first], found[second]
        room = tolerance * (torch.maximum(a[:, 1], b[:, 1]) + typical)
        if not bool(((a[:, column] - b[:, column]).abs() <= room).all()):
            return False
    return True


def _order(targets: Tensor, numbers: Tensor) -> Tensor:
    """Positions sorted by target, and by number within a target."""
    by_number = numbers.argsort()
    return by_number[targets[by_number].argsort(stable=True)]


def _target_keys(targets: Tensor) -> Tensor:
    """One integer for every target, shape (B,): equal for equal targets, and practically never for others."""
    if targets.is_complex():
        targets = torch.view_as_real(targets)
    flat = targets.detach().reshape(targets.shape[0], -1)
    whole = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    # Odd multipliers: one column keeps all its values apart, and overflow wraps round.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator) * 2 + 1
    return (whole * factors.to(whole.device)).sum(1)

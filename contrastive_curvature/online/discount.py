"""The curvature of an online Laplace posterior: a discounted sum over training steps (paper, Eq. 80)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.structures import Structure

_NORMS_FORGET = 0.01
"""What a step forgets of the norms of the outputs at least."""


class DiscountedCurvature(nn.Module):
    """``R_{t+1} = (1 - alpha) R_t + h_t`` for clamped batch curvatures ``h_t``, and discounted sums of other numbers.

    All sums are buffers, so that moving or saving a module that contains this one moves and saves the sums. ``points``
    is the discounted number ``w`` of points. ``remembered`` is the discounted number of steps, which grows towards
    ``1 / alpha``. ``value`` and ``cost`` are the discounted loss and non-negative loss. ``norms`` is the discounted sum
    of the norms of the raw outputs, and ``normed`` the number of points in this sum. ``norms`` and ``normed`` forget at
    least 1 % per step, because norms change during training.

    Args:
        empty: The curvature of no pairs, which gives the structure and the shapes.
        memory_factor: The discount ``alpha``.
    """

    points: Tensor
    remembered: Tensor
    norms: Tensor
    normed: Tensor
    cost: Tensor
    value: Tensor
    steps: Tensor
    positive: Tensor

    def __init__(self, empty: Structure, memory_factor: float) -> None:
        super().__init__()
        self.memory_factor = memory_factor
        self._empty = empty
        for number, tensor in enumerate(empty.tensors()):
            self.register_buffer(f"curvature_{number}", torch.zeros_like(tensor))
        like = self.get_buffer("curvature_0")
        for name in ("points", "remembered", "norms", "normed", "cost", "value"):
            self.register_buffer(name, like.new_zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=like.device))
        self.register_buffer("positive", torch.zeros((), dtype=torch.bool, device=like.device))
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda module, state, prefix, *_: module.check_state(state, prefix)
        )

    def check_state(self, state: Mapping[str, Any], prefix: str) -> None:
        """Refuse a saved state whose sums have another shape or are not finite; torch reports missing sums."""
        for name, buffer in self.named_buffers():
            key = f"{prefix}{name}"
            if buffer.is_floating_point() and key in state:
                validate.tensor(f"state_dict[{key!r}]", state[key], tuple(buffer.shape))

    def add(self, terms: list[DatasetCurvature]) -> None:
        """Add the curvature of one step; with several processes (``torch.distributed``), the sum over all of them.

        Args:
            terms: Unclamped curvature, loss and non-negative loss of the same B points for each sampled network.
        """
        # For the usual single network, the mean would only copy the tensors at every step.
        batch = [
            parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
            for parts in zip(*map(_numbers, terms), strict=True)
        ]
        *curvature, norms, cost, value = batch
        scalars = torch.stack([self.points.new_full((), float(terms[0].n)), norms, cost, value])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # The processes have different data and share one posterior, so the curvatures are summed, not averaged.
            for tensor in (*curvature, scalars):
                torch.distributed.all_reduce(tensor)
        points, norms, cost, value = scalars
        named = {f"curvature_{number}": tensor for number, tensor in enumerate(curvature)}
        added = {**named, "points": points, "cost": cost, "value": value}
        keep = 1 - self.memory_factor
        for name, tensor in added.items():
            getattr(self, name).mul_(keep).add_(tensor)
        for name, tensor in (("normed", points), ("norms", norms)):
            getattr(self, name).mul_(min(keep, 1 - _NORMS_FORGET)).add_(tensor)
        self.remembered.mul_(keep).add_(1)
        self.steps.add_(1)
        self.positive.logical_or_((self._curvature().traces() > 0).any())

    def at_scale(self, n_data: int) -> DatasetCurvature:
        """Return the discounted curvature, rescaled to a data set.

        Args:
            n_data: Number N of points of the data set.

        Returns:
            The curvature ``(N / w) R``, and both losses rescaled in the same way.
        """
        scale = n_data / self.points
        curvature = self._curvature().scaled(scale)
        value, cost, norm = scale * self.value, scale * self.cost, self.norms / self.normed
        return DatasetCurvature(curvature, value, cost, n_data, typical_norm=norm)

    def _curvature(self) -> Structure:
        return self._empty.with_tensors(getattr(self, f"curvature_{k}") for k in range(len(self._empty.tensors())))


def _numbers(term: DatasetCurvature) -> list[Tensor]:
    """Return clamped curvature tensors, sum of output norms, non-negative loss and loss of one sampled network.

    Each step is clamped separately, because each enters the moving average separately (docs/recipes/training.md).
    """
    flat = term.curvature.positive().tensors()
    assert term.typical_norm is not None
    norms = term.n * term.typical_norm
    return [*flat, *(number.to(flat[0]) for number in (norms, term.cost, term.loss))]

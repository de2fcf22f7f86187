"""The curvature of an online Laplace posterior: a discounted sum over training steps (paper, Eq. 80)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.finite import clamp_curvature, clamp_factors
from contrastive_curvature.fit.loop import DatasetCurvature

__all__ = ["DiscountedCurvature"]

_NORMS_FORGET = 0.01
"""What a step forgets of the norms of the outputs at least."""


class DiscountedCurvature(nn.Module):
    """``R_{t+1} = (1 - alpha) R_t + h_t`` for clamped batch curvatures ``h_t``, and discounted sums of other numbers.

    All sums are buffers, so that moving or saving a module that contains this one moves and saves the sums. ``points``
    is the discounted number ``w`` of points. ``remembered`` is the discounted number of steps, which grows towards ``1
    / alpha``. ``value`` and ``cost`` are the discounted loss and non-negative loss, ``norms`` that sum of the norms of
    the raw outputs and ``normed`` the number of points behind it. These two forget at least 1 % a step, as norms change
    while an encoder is trained.

    Args:
        empty: The curvature of no pairs, which gives the shape: (P,), (P, P), or Kronecker factors whose input factors,
            or sketches of them, are sums over points.
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

    def __init__(self, empty: Any, memory_factor: float) -> None:
        super().__init__()
        self.memory_factor = memory_factor
        self._group_sizes = None if isinstance(empty, Tensor) else [len(factors) for factors in empty]
        flat = [empty] if isinstance(empty, Tensor) else [f for factors in empty for f in factors]
        self._names = [f"curvature_{number}" for number in range(len(flat))]
        starts = [0, *accumulate(self._group_sizes or [])][: len(self._group_sizes or [0])]
        self._curvature_factors = [self._names[start] for start in starts]
        for name, tensor in zip(self._names, flat, strict=True):
            self.register_buffer(name, torch.zeros_like(tensor))
        for name in ("points", "remembered", "norms", "normed", "cost", "value"):
            self.register_buffer(name, flat[0].new_zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=flat[0].device))
        self.register_buffer("positive", torch.zeros((), dtype=torch.bool, device=flat[0].device))

    def add(self, terms: list[DatasetCurvature]) -> None:
        """Add the curvature of one step; with several processes (``torch.distributed``), the sum over all of them.

        Args:
            terms: Unclamped curvature, loss and non-negative loss of the same B points for each sampled network.
        """
        # For the usual single network, the mean would only copy the tensors at every step.
        batch = [
            parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
            for parts in zip(*map(_clamped, terms), strict=True)
        ]
        scalars = torch.stack([self.points.new_tensor(float(terms[0].n)), *batch[-3:]])
        new = [*batch[:-3], scalars]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # The processes have different data and share one posterior, so the curvatures are summed, not averaged.
            for tensor in new:
                torch.distributed.all_reduce(tensor)
        keep = 1 - self.memory_factor
        for name, tensor in zip(self._names, new, strict=False):
            getattr(self, name).mul_(keep).add_(tensor)
        points, norms, cost, value = scalars
        for mine, tensor in ((self.points, points), (self.cost, cost), (self.value, value)):
            mine.mul_(keep).add_(tensor)
        for mine, tensor in ((self.normed, points), (self.norms, norms)):
            mine.mul_(min(keep, 1 - _NORMS_FORGET)).add_(tensor)
        self.remembered.mul_(keep).add_(1)
        self.steps.add_(1)
        # Of Kronecker pairs only the first factor counts: the input factor is positive even without pairs.
        for name in self._curvature_factors:
            self.positive.logical_or_((getattr(self, name) > 0).any())

    def at_scale(self, n_data: int) -> DatasetCurvature:
        """The discounted curvature, rescaled to a data set.

        Args:
            n_data: Number N of points of the data set.

        Returns:
            The curvature ``(N / w) R``, and both losses rescaled in the same way. Input factors of Kronecker pairs are
            means, ``R / w``.
        """
        scale = n_data / self.points
        tensors = [getattr(self, name) for name in self._names]
        if self._group_sizes is None:
            curvature: Any = scale * tensors[0]
        else:
            curvature, rest = [], iter(tensors)
            for length in self._group_sizes:
                first, *others = (next(rest) for _ in range(length))
                curvature.append([scale * first, *(other / self.points for other in others)])
        return DatasetCurvature(
            curvature, scale * self.value, scale * self.cost, n_data, typical_norm=self.norms / self.normed
        )

    def check_state(self, state: Mapping[str, Any], prefix: str) -> None:
        """Check that training steps can have produced a saved state.

        Args:
            state: A ``state_dict`` of this module or of a module that contains it. Missing entries are no error here:
                torch reports them.
            prefix: Prefix of the names of the buffers in ``state``.

        Raises:
            InputError: A buffer has another shape or dtype, a number is not finite or out of range, or the numbers
                contradict each other.
        """
        given = {name: state[f"{prefix}{name}"] for name, _ in self.named_buffers() if f"{prefix}{name}" in state}
        for name, value in given.items():
            self._check_buffer(f"state_dict[{f'{prefix}{name}'!r}]", name, value)
        if len(given) < len(list(self.named_buffers())):
            return
        steps, remembered = int(given["steps"]), float(given["remembered"])
        # ``remembered`` is a sum of ``steps`` discount factors, the last of which is 1 and none larger.
        if not min(steps, 1) <= remembered <= 1.01 * steps:
            received = f"{remembered:g} steps remembered of {steps}"
            raise InputError(expected(f"state_dict[{f'{prefix}remembered'!r}]", f"1 to {steps} of {steps}", received))
        some = any(bool((given[name] > 0).any()) for name in self._curvature_factors)
        if some and not (bool(given["positive"]) and steps and float(given["points"]) > 0):
            received = f"{steps} steps, {float(given['points']):g} points and positive = {bool(given['positive'])}"
            name = f"state_dict[{f'{prefix}positive'!r}]"
            raise InputError(expected(name, "steps and points that explain the positive curvature", received))

    def _check_buffer(self, where: str, name: str, value: Any) -> None:
        mine = getattr(self, name)
        kind = "floating-point numbers" if mine.is_floating_point() else f"{mine.dtype}"
        fits = isinstance(value, Tensor) and value.shape == mine.shape and value.layout is torch.strided
        if not fits or (not value.is_floating_point() if mine.is_floating_point() else value.dtype != mine.dtype):
            received = f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else value
            raise InputError(expected(where, f"a tensor {tuple(mine.shape)} of {kind}", received))
        if not bool(value.isfinite().all()):
            raise InputError(expected(where, "finite numbers", f"{int((~value.isfinite()).sum())} that are not"))
        if name in ("cost", "value", "positive"):
            return
        if value.dim() != 2:
            if bool((value < 0).any()):
                raise InputError(expected(where, "numbers of at least 0", f"{float(value.min()):g}"))
            return
        if value.shape[0] != value.shape[1]:
            # A sketch has entries of both signs.
            return
        # Rounding may leave small negative diagonal entries and small asymmetries.
        small = 1e-4 * value.abs().max() if value.numel() else 0.0
        if bool((value.diagonal() < -small).any()):
            received = f"{float(value.diagonal().min()):g}"
            raise InputError(expected(where, "numbers of at least 0 on the diagonal", received))
        if bool(((value - value.T).abs() > small).any()):
            raise InputError(expected(where, "a symmetric matrix", "one that is not"))


def _clamped(term: DatasetCurvature) -> list[Tensor]:
    """Clamped curvature tensors, sum of output norms, non-negative loss and loss of one sampled network.

    Each step is clamped separately, because each enters the moving average separately (docs/curvature.md).
    """
    if isinstance(term.curvature, Tensor):
        flat = [clamp_curvature(term.curvature)]
    else:
        flat = [f for factors in clamp_factors(term.curvature) for f in factors]
    norms = 0.0 if term.typical_norm is None else term.n * term.typical_norm
    return [*flat, *(torch.as_tensor(number).to(flat[0]) for number in (norms, term.cost, term.loss))]

"""The output Hessian of some points of a data set that stand for all of it, for posteriors in function space.

For fixes whose Hessian is block-diagonal, each chosen point keeps its block over ALL pairs of the data, times N / M;
for coupled ones the pairs among the chosen points stand for the others (as in Proposition B.1). With M = N both are the
Hessian of the data set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.dataset import BatchReader, DatasetPoints, check_targets
from contrastive_curvature.ggn.passes import PassRecord
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.progress import Progress

__all__ = ["HessianSubset", "subset_hessian"]


@dataclass(frozen=True)
class HessianSubset:
    """M points of a data set and a square root of their output Hessian.

    Args:
        inputs: The points, a tensor or a mapping of tensors.
        factor: Block-diagonal fixes: ``S_i`` (M, D, D) with ``H_ii = S_i S_i^T``. Coupled ones: (M, D, R) with
            ``H_ij = S_i S_j^T``.
        coupled: Which of the two.
    """

    inputs: Inputs
    factor: Tensor
    coupled: bool

    @property
    def columns(self) -> int:
        """Number of columns of ``S``."""
        return self.factor.shape[2] if self.coupled else self.factor.shape[0] * self.factor.shape[2]

    def project(self, k: Tensor) -> Tensor:
        """``k S`` for ``k`` of shape (..., M, D); the result has shape (..., R), or (..., M D) without coupling."""
        if self.coupled:
            return torch.einsum("...md,mdr->...r", k, self.factor)
        return torch.einsum("...md,mdr->...mr", k, self.factor).flatten(-2)

    def lift(self, c: Tensor) -> Tensor:
        """``S c`` for ``c`` of shape (..., R) or (..., M D); the result has shape (..., M, D)."""
        if self.coupled:
            return torch.einsum("...r,mdr->...md", c, self.factor)
        return torch.einsum("...mr,mdr->...md", c.unflatten(-1, self.factor.shape[::2]), self.factor)


def subset_hessian(
    encoder: Encoder,
    loader: Iterable[Any],
    read: BatchReader,
    points: DatasetPoints,
    size: int,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> HessianSubset:
    """Draw points without replacement, and take the square root of their Hessian.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: The same data as in the first pass, in any order.
        read: Takes a batch apart.
        points: What the first pass left.
        size: Number M of points.
        seed: Of the draw.
        progress: Of the fit that this is part of.

    Returns:
        The points and the factor, times the square root of N / M.

    Raises:
        InputError: More points than there are, or the loader gave other data than in the first pass.
        UnsupportedError: The Hessian is not positive semidefinite.
    """
    if size > points.n:
        raise InputError(expected("n_subset", f"at most the {points.n} points of the data", size))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(points.n, dtype=torch.bool)
    chosen[torch.randperm(points.n, generator=generator)[:size]] = True
    hessian = points.hessian
    parts, outputs, targets, start = [], [], [], 0
    record = PassRecord()
    for batch in Progress.of(progress).over(loader, "[inducing points]"):
        x, y = read(batch)
        y = check_targets(y, input_length(x), points.function)
        z = check_outputs(encoder(x), "model(x)")
        record.add(z, y)
        mine = chosen[start : start + input_length(x)].to(y.device)
        start += input_length(x)
        if len(mine) == len(z) and bool(mine.any()):
            parts.append(_select(x, mine))
            outputs.append(z[mine])
            targets.append(y[mine])
    points.record.check_same(record)
    inputs, z, y = _join(parts), torch.cat(outputs), torch.cat(targets)
    factor = hessian.among(z, y).factor() if hessian.coupled else hessian.at(z, y).blocks.factor()
    return HessianSubset(inputs, (points.n / size) ** 0.5 * factor, hessian.coupled)


def _select(x: Inputs, rows: Tensor) -> Inputs:
    if isinstance(x, Tensor):
        return x[rows]
    n = input_length(x)
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in x.items()}


def _join(parts: list[Inputs]) -> Inputs:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    n = input_length(first)
    batched = {k for k, v in first.items() if isinstance(v, Tensor) and v.ndim and v.shape[0] == n}
    return {k: torch.cat([part[k] for part in parts]) if k in batched else v for k, v in first.items()}  # type: ignore[index]

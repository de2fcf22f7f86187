"""The output Hessian of a random subset of a data set, as an estimate for the whole, for posteriors in function space.

If the Hessian is block-diagonal, each chosen point keeps its block over ALL pairs of the data set, times N / M. If it
is coupled, the estimate is computed from the pairs among the chosen points (as in Proposition B.1). With M = N both are
the Hessian of the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.fit.dataset import BatchReader, DatasetPoints, check_targets
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length, same_tokens
from contrastive_curvature.progress import Progress

__all__ = ["HessianSubset", "concatenated", "selected_rows", "subset_hessian"]


@dataclass(frozen=True)
class HessianSubset:
    """M points of a data set and a square root of their output Hessian.

    Args:
        inputs: The M points, a tensor or a mapping of tensors.
        factor: For block-diagonal fixes ``S_i`` (M, D, D) with ``H_ii = S_i S_i^T``; for coupled fixes ``S_i`` (M, D,
            R) with ``H_ij = S_i S_j^T``.
        coupled: Whether the fix is coupled.
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
    """Draw points without replacement, and compute a square root of their Hessian.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        loader: The same data as in the first pass, in any order.
        read: Converts what the loader yields into inputs and targets.
        points: Result of the first pass.
        size: Number M of points.
        seed: Seed of the random draw.
        progress: Progress of the whole fit, or whether to show progress.

    Returns:
        The points, and the factor times the square root of N / M.

    Raises:
        InputError: The data set has fewer than M points, or the loader gave other data than in the first pass.
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
        in_subset = chosen[start : start + input_length(x)].to(y.device)
        start += input_length(x)
        if len(in_subset) == len(z) and bool(in_subset.any()):
            parts.append(selected_rows(x, in_subset))
            outputs.append(z[in_subset])
            targets.append(y[in_subset])
    points.check_same(record)
    inputs, z, y = concatenated(parts), torch.cat(outputs), torch.cat(targets)
    if hessian.coupled:
        return HessianSubset(inputs, hessian.among(z, y).factor(), coupled=True)
    return HessianSubset(inputs, (points.n / size) ** 0.5 * hessian.at(z, y).blocks.factor(), coupled=False)


def selected_rows(x: Inputs, rows: Tensor) -> Inputs:
    """The points of a batch where ``rows`` (B,) is true."""
    if isinstance(x, Tensor):
        return x[rows]
    n = input_length(x)
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in x.items()}


def concatenated(parts: list[Inputs]) -> Inputs:
    """Batches after each other, of texts with one padding.

    Raises:
        InputError: They have other shapes.
    """
    parts = same_tokens(parts)
    first = parts[0]
    _check_alike(parts)
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    n = input_length(first)
    batched = {k for k, v in first.items() if isinstance(v, Tensor) and v.ndim and v.shape[0] == n}
    return {k: torch.cat([part[k] for part in parts]) if k in batched else v for k, v in first.items()}  # type: ignore[index]


def _check_alike(parts: list[Inputs]) -> None:
    def shapes(x: Inputs) -> dict[str, tuple[int, ...]]:
        named = x if isinstance(x, Mapping) else {"x": x}
        return {key: tuple(value.shape[1:]) for key, value in named.items() if isinstance(value, Tensor) and value.ndim}

    first = shapes(parts[0])
    other = next((shapes(part) for part in parts if shapes(part) != first), None)
    if other is not None:
        hint = "Pad the inputs of all batches to one shape; mappings with an 'attention_mask' are padded here."
        raise InputError(expected("train_loader", f"points of the shapes {first} in every batch", str(other), hint))

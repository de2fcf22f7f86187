"""The output Hessian of a random subset of a data set, as an estimate for all data, for posteriors in function space.

If the Hessian is block-diagonal, each chosen point keeps its block over ALL pairs of the data set, times N / M. If it
is coupled, the estimate is computed from the pairs among the chosen points (as in Proposition B.1). With M = N both are
equal to the Hessian of the data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit.anchors import note_skipped
from contrastive_curvature.fit.dataset import AllPairs
from contrastive_curvature.fit.loop import Fit
from contrastive_curvature.fit.passes import Passes, PassRecord
from contrastive_curvature.fit.readers import Reader
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length, same_tokens
from contrastive_curvature.progress import Progress


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
        """Return ``k S`` for ``k`` of shape (..., M, D), shape (..., R), or (..., M D) without coupling."""
        if self.coupled:
            return torch.einsum("...md,mdr->...r", k, self.factor)
        return torch.einsum("...md,mdr->...mr", k, self.factor).flatten(-2)

    def lift(self, c: Tensor) -> Tensor:
        """Return ``S c`` for ``c`` of shape (..., R) or (..., M D); the result has shape (..., M, D)."""
        if self.coupled:
            return torch.einsum("...r,mdr->...md", c, self.factor)
        return torch.einsum("...mr,mdr->...md", c.unflatten(-1, self.factor.shape[::2]), self.factor)


def subset_hessian(f: Fit, pairs: AllPairs, passes: Passes, size: int, seed: int) -> HessianSubset:
    """Draw points without replacement, and compute a square root of their Hessian."""
    chosen, hessian = _drawn(pairs.n, size, seed), pairs.hessian
    parts, outputs, targets, numbers, start = [], [], [], [], 0
    record = PassRecord()
    for batch in f.progress.over(passes.reader, "[inducing points]"):
        y: Any = batch.labels
        z = check_outputs(passes.encoder(batch.x), "model(x)")
        record.add(z, y)
        rows = chosen[start : start + len(z)]
        start += len(z)
        if len(rows) == len(z) and bool(rows.any()):
            parts.append(_selected(batch.x, rows))
            outputs.append(z[rows])
            targets.append(y[rows])
            numbers.append(batch.numbers[rows])
    if passes.first is not None:
        passes.first.check_same(record)
    inputs, points = _concatenated(parts), (torch.cat(outputs), torch.cat(targets), torch.cat(numbers))
    if hessian.coupled:
        return HessianSubset(inputs, hessian.among(*points).factor(), coupled=True)
    return HessianSubset(inputs, (pairs.n / size) ** 0.5 * hessian.at(*points).blocks.factor(), coupled=False)


def anchor_subset(
    encoder: Encoder, reader: Reader, loss: CosineLoss, size: int, seed: int, progress: Progress
) -> tuple[HessianSubset, Tensor, Tensor, int]:
    """Draw points (both views of an input together), and return a root of the Hessian of their comparisons."""
    n, by_views = 0, False
    for batch in progress.over(reader, "[targets]"):
        if batch.labels is None:
            raise UnsupportedError(
                "hessian_structure='gp': a loss of listed pairs has no subset of points. Use 'diag' or 'kron'."
            )
        n += input_length(batch.x)
        by_views = by_views or (batch.classes is None and batch.pairs is None)
    # Without labels, both views of an input are drawn together.
    views = 2 if by_views else 1
    chosen = _drawn(n, size, seed, views)
    parts, labels, relation, start = [], [], None, 0
    for batch in progress.over(reader, "[inducing points]"):
        y: Any = batch.labels
        count = input_length(batch.x)
        rows = chosen[start : start + count // views].repeat(views)
        if len(rows) != count:
            raise InputError("train_loader", "the same number of points in every pass", "others")
        if bool(rows.any()):
            parts.append(_selected(batch.x, rows))
            labels.append(y[rows] + (start if by_views else 0))
        relation, start = batch.pairs, start + count // views
    x = _concatenated(parts)
    with torch.no_grad():
        z = check_outputs(encoder(x), "model(x)")
    hessian = loss.data_hessian(z, loss.relate(z, torch.cat(labels), relation))
    note_skipped(int(hessian.derivatives.anchors), int(hessian.derivatives.skipped))
    scale = n / len(z)
    factor = hessian.factor() if hessian.coupled else hessian.blocks.factor()
    value, cost = hessian.loss_and_cost()
    return HessianSubset(x, scale**0.5 * factor, hessian.coupled), scale * value, scale * cost, n


def _drawn(n: int, size: int, seed: int, views: int = 1) -> Tensor:
    """Return which of ``n`` points are drawn, boolean; for inputs with several views, which inputs."""
    if size > n:
        raise InputError("n_subset", f"at most the {n} points of the data", size)
    chosen = torch.zeros(n // views, dtype=torch.bool)
    order = torch.randperm(n // views, generator=torch.Generator().manual_seed(seed))
    chosen[order[: max(1, size // views)]] = True
    return chosen


def _selected(x: Inputs, rows: Tensor) -> Inputs:
    """Return the points of a batch where ``rows`` (B,) is true."""
    if isinstance(x, Tensor):
        return x[rows]
    n = input_length(x)
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in x.items()}


def _concatenated(parts: list[Inputs]) -> Inputs:
    """Concatenate batches; texts get one common padding."""
    parts = same_tokens(parts)
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    n = input_length(first)
    batched = {k for k, v in first.items() if isinstance(v, Tensor) and v.ndim and v.shape[0] == n}
    return {k: torch.cat([part[k] for part in parts]) if k in batched else v for k, v in first.items()}  # type: ignore[index]

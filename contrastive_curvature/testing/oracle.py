"""The oracle: contrastive Hessians too slow and too simple to be wrong.

Pairs are walked one by one in Python, derivatives come from autograd, matrices are dense. It imports nothing that it
judges. Use it in float64 and on small cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["dense_ggn", "dense_jacobian", "dense_output_hessian", "list_pairs", "pair_loss"]

PairList = Counter[tuple[int, int, int]]
"""How often the unordered pair ``(i, j)``, ``i < j``, is listed as positive (+1) or negative (-1)."""


def list_pairs(n: int, labels: Tensor | None = None, pairs: Any = None) -> PairList:
    """List unordered pairs of distinct points.

    Args:
        n: Number of points.
        labels: Class labels (n,), or targets for a callable.
        pairs: Index tuples, two masks, or a callable, as in :func:`contrastive_curvature.ggn`.

    Returns:
        The multiplicity of every ``(i, j, sign)``.
    """
    listed: PairList = Counter()
    if callable(pairs):
        targets = torch.arange(n) if labels is None else labels
        pairs = pairs(targets, targets)
    if pairs is None:
        if labels is None:
            msg = "labels or pairs are needed"
            raise ValueError(msg)
        pairs = (labels[:, None] == labels[None, :], labels[:, None] != labels[None, :])
    if len(pairs) == 2:
        for sign, mask in zip((1, -1), pairs, strict=True):
            listed.update((i, j, sign) for i in range(n) for j in range(i + 1, n) if mask[i, j])
        return listed
    a1, p, a2, neg = pairs if len(pairs) == 4 else (pairs[0], pairs[1], pairs[0], pairs[2])
    for sign, left, right in ((1, a1, p), (-1, a2, neg)):
        for i, j in zip(left.tolist(), right.tolist(), strict=True):
            if i != j:
                listed[min(i, j), max(i, j), sign] += 1
    return listed


def pair_weights(listed: PairList, negative_weight: float, normalization: str) -> dict[tuple[int, int, int], float]:
    """Weight of every listed pair before the margin, signed."""
    totals: Counter[int] = Counter()
    at_point: Counter[tuple[int, int]] = Counter()
    for (i, j, sign), times in listed.items():
        totals[sign] += times
        at_point[i, sign] += times
        at_point[j, sign] += times
    out = {}
    for (i, j, sign), times in listed.items():
        share = {
            "sum": 1.0,
            "type": 1 / totals[sign],
            "anchor": (1 / at_point[i, sign] + 1 / at_point[j, sign]) / 2,
        }[normalization]
        out[i, j, sign] = sign * (1 - negative_weight if sign > 0 else negative_weight) * times * share
    return out


def pair_loss(
    first: Tensor,
    second: Tensor,
    weights: dict[tuple[int, int, int], float],
    margin: float | None,
    only_positive: bool = False,
) -> Tensor:
    """Sum the losses of pairs of unit vectors, one by one.

    Args:
        first: Unit vectors (N, D) where a pair's first point is looked up.
        second: Where its second point is; the same tensor, or one without a gradient.
        weights: Signed weight of every pair.
        margin: Distance below which a negative counts.
        only_positive: Whether to leave the negatives out.

    Returns:
        A scalar.
    """
    total = (first * 0).sum()
    for (i, j, sign), weight in weights.items():
        if sign < 0 and only_positive:
            continue
        distance = (first[i] - second[j]).square().sum()
        if sign > 0 or margin is None:
            total = total + weight * distance / 2
        elif margin == 2:
            # The largest distance there is: every pair counts, also where rounding puts it beyond.
            total = total - weight * (margin**2 - distance) / 2
        else:
            total = total - weight * torch.clamp(margin**2 - distance, min=0) / 2
    return total


def dense_output_hessian(
    z: Tensor,
    labels: Tensor | None = None,
    *,
    pairs: Any = None,
    distance: str = "arccos",
    pd_fix: str = "fixed",
    margin: float | None = 0.7,
    negative_weight: float = 0.5,
    normalization: str = "anchor",
) -> Tensor:
    """Hessian (N D, N D) of the pair loss with respect to raw outputs, by autograd.

    ``arccos`` differentiates through the normalisation twice. ``euclidean`` takes the Hessian with respect to the unit
    embeddings and the Jacobian of the normalisation. ``fixed`` detaches one point of a pair (paper, Eq. 110-111),
    ``psd`` clamps the eigenvalues of those blocks, ``positive`` leaves the negatives out.
    """
    n, dim = z.shape
    weights = pair_weights(list_pairs(n, labels, pairs), negative_weight, normalization)
    flipped = {(j, i, sign): weight for (i, j, sign), weight in weights.items()}
    detached = pd_fix in ("fixed", "psd")

    def loss(u: Tensor) -> Tensor:
        if detached:
            still = u.detach()
            return pair_loss(u, still, weights, margin) + pair_loss(u, still, flipped, margin)
        return pair_loss(u, u, weights, margin, only_positive=pd_fix == "positive")

    def unit(raw: Tensor) -> Tensor:
        return raw / raw.norm(dim=1, keepdim=True)

    hessian: Callable[..., Any] = torch.autograd.functional.hessian
    if distance == "arccos":
        h = hessian(lambda raw: loss(unit(raw)), z).reshape(n * dim, n * dim)
    else:
        jacobian = torch.autograd.functional.jacobian(unit, z).reshape(n * dim, n * dim)
        h = jacobian.T @ hessian(loss, unit(z)).reshape(n * dim, n * dim) @ jacobian
    if pd_fix == "psd":
        for i in range(n):
            block = slice(i * dim, (i + 1) * dim)
            values, vectors = torch.linalg.eigh(h[block, block])
            h[block, block] = vectors @ torch.diag(values.clamp(min=0)) @ vectors.T
    return h


def dense_jacobian(model: nn.Module, x: Any) -> Tensor:
    """Jacobian (N D, P) of raw outputs with respect to the trainable parameters, in their order, by autograd."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    values = dict(model.named_parameters())

    first = {id(p): name for name, p in values.items()}

    def outputs(*parameters: Tensor) -> Tensor:
        chosen = {**values, **dict(zip(names, parameters, strict=True))}
        # Every module once, every place of a tied parameter: torch's own ties damage modules that have two names.
        places = {
            f"{prefix}.{name}" if prefix else name: chosen[first[id(p)]]
            for prefix, module in model.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        return torch.func.functional_call(model, places, (x,), tie_weights=False)

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(values[name].detach() for name in names))
    return torch.cat([j.flatten(2).flatten(0, 1) for j in jacobians], dim=1)


def dense_ggn(model: nn.Module, x: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
    """``J^T H J`` (P, P) of an encoder without a normalisation at its end.

    Args:
        model: The encoder, in evaluation mode, giving raw outputs.
        x: A batch.
        labels: Class labels, or targets.
        **options: As in :func:`dense_output_hessian`.

    Returns:
        The dense matrix.
    """
    jacobian = dense_jacobian(model, x)
    h = dense_output_hessian(model(x).detach(), labels, **options)
    return jacobian.T @ h @ jacobian

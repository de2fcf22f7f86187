"""The oracle: contrastive Hessians by slow code that is too simple to be wrong.

Pairs are walked one by one in Python, derivatives come from autograd, matrices are dense. It imports nothing that it
tests. For a loss of anchors the matrix of all cosines is an explicit variable, to separate the first-order and the
second-order part. Use it in float64 and on small cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
    masks, ends = _masks_or_ends(n, labels, pairs)
    for sign, mask in zip((1, -1), masks, strict=False):
        listed.update((i, j, sign) for i in range(n) for j in range(i + 1, n) if mask[i, j])
    for sign, i, j in ends:
        listed[min(i, j), max(i, j), sign] += 1
    return listed


def masks_of(n: int, labels: Tensor | None, pairs: Any = None) -> tuple[Tensor, Tensor]:
    """Return how often each pair of points counts as positive and as negative, float64, each (N, N)."""
    positive, negative = torch.zeros(2, n, n, dtype=torch.float64, device="cpu")
    masks, ends = _masks_or_ends(n, labels, pairs)
    for out, mask in zip((positive, negative), masks, strict=False):
        out += mask.cpu().double() * (1 - torch.eye(n, dtype=torch.float64, device="cpu"))
    for sign, i, j in ends:
        for at in ((i, j), (j, i)):
            (positive if sign > 0 else negative)[at] += 1
    return positive, negative


def _masks_or_ends(n: int, labels: Tensor | None, pairs: Any) -> tuple[tuple[Tensor, ...], list[tuple[int, int, int]]]:
    """Return two masks, or the sign and the ends of every listed pair of distinct points."""
    if callable(pairs):
        targets = torch.arange(n, device="cpu") if labels is None else labels
        pairs = pairs(targets, targets)
    if pairs is None:
        if labels is None:
            raise ValueError("labels or pairs are needed")
        pairs = (labels[:, None] == labels[None, :], labels[:, None] != labels[None, :])
    if len(pairs) == 2:
        return pairs, []
    a1, p, a2, neg = pairs if len(pairs) == 4 else (pairs[0], pairs[1], pairs[0], pairs[2])
    both = ((1, a1, p), (-1, a2, neg))
    return (), [(sign, i, j) for sign, a, b in both for i, j in zip(a.tolist(), b.tolist(), strict=True) if i != j]


def pair_weights(listed: PairList, negative_weight: float, normalization: str) -> dict[tuple[int, int, int], float]:
    """Return the signed weight of every listed pair, before the margin."""
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


Curve = Callable[[Tensor, int], Tensor]
"""Loss of one pair from its squared distance (or the cosine's counterpart ``2 - 2 s``) and its sign."""


def margin_curve(margin: float | None) -> Curve:
    """Return the contrastive loss of one pair: half the squared distance, reduced by a margin."""

    def curve(distance: Tensor, sign: int) -> Tensor:
        if sign > 0:
            return distance / 2
        if margin is None:
            return -distance / 2
        if margin == 2:
            # The largest possible distance: every pair counts, even if rounding puts it beyond.
            return (margin**2 - distance) / 2
        return torch.clamp(margin**2 - distance, min=0) / 2

    return curve


def curve_of(loss: Any) -> Curve:
    """Return the loss of one pair, from the value rule of a :class:`~contrastive_curvature.losses.PairLoss`."""

    def curve(distance: Tensor, sign: int) -> Tensor:
        one, zero = torch.ones_like(distance), torch.zeros_like(distance)
        return loss._value(1 - distance / 2, *((one, zero) if sign > 0 else (zero, one)))

    return curve


def pair_loss(
    first: Tensor,
    second: Tensor,
    weights: dict[tuple[int, int, int], float],
    margin: float | None = None,
    only_positive: bool = False,
    curve: Curve | None = None,
) -> Tensor:
    """Sum the losses of pairs of unit vectors, one by one.

    Args:
        first: Unit vectors (N, D) for the first point of each pair.
        second: Unit vectors (N, D) for the second point; the same tensor, or a tensor without a gradient.
        weights: Signed weight of every pair.
        margin: Distance below which a negative counts, for the contrastive loss.
        only_positive: Whether to leave the first derivatives of the negatives out.
        curve: Another loss of one pair.

    Returns:
        A scalar.
    """
    curve = margin_curve(margin) if curve is None else curve
    total = (first * 0).sum()
    for (i, j, sign), weight in weights.items():
        distance = (first[i] - second[j]).square().sum()
        value = curve(distance, sign)
        if sign < 0 and only_positive:
            # Subtract the tangent line: the rest has the same second derivative, and a first derivative of zero.
            at = distance.detach().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(curve(at, sign), at)
            value = value - slope * distance
        total = total + abs(weight) * value
    return total


def dense_output_hessian(
    z: Tensor,
    labels: Tensor | None = None,
    *,
    pairs: Any = None,
    distance: str | None = None,
    pd_fix: str | None = None,
    margin: float | None = 0.7,
    negative_weight: float = 0.5,
    normalization: str = "anchor",
    loss: Any = None,
) -> Tensor:
    """Return the Hessian (N D, N D) of a pair loss with respect to raw outputs, by autograd.

    ``arccos`` differentiates through the normalisation twice. ``euclidean`` uses the Hessian with respect to the unit
    embeddings and the Jacobian of the normalisation. ``fixed`` detaches one point of a pair (paper, Eq. 110-111),
    ``psd`` clamps the eigenvalues of those blocks, ``positive`` leaves the first derivatives of the negatives out.
    ``ggn`` is the second derivative in the cosines between the Jacobians of the cosines, ``ggn_fixed`` its diagonal
    blocks; ``psd_parts`` adds to those the rest of the diagonal blocks, with clamped eigenvalues. ``loss`` replaces the
    contrastive loss; the oracle uses its value rule, but not its derivatives.

    Raises:
        ValueError: There is no such fix.
    """
    fixes = ("positive", "fixed", "full", "psd", "ggn", "ggn_fixed", "psd_parts")
    n, dim = z.shape
    if loss is not None:
        negative_weight, normalization = loss.negative_weight, str(loss.normalization)
        distance = str(loss.distance) if distance is None else distance
        pd_fix = str(loss.pd_fix) if pd_fix is None else pd_fix
    distance, pd_fix = distance or "arccos", str(pd_fix or "fixed")
    if pd_fix not in fixes:
        raise ValueError(f"pd_fix={pd_fix!r} is none of {fixes}")
    curve = margin_curve(margin) if loss is None else curve_of(loss)
    weights = pair_weights(list_pairs(n, labels, pairs), negative_weight, normalization)
    flipped = {(j, i, sign): weight for (i, j, sign), weight in weights.items()}
    detached = pd_fix in ("fixed", "psd")

    def value(u: Tensor) -> Tensor:
        if detached:
            still = u.detach()
            return pair_loss(u, still, weights, curve=curve) + pair_loss(u, still, flipped, curve=curve)
        return pair_loss(u, u, weights, only_positive=pd_fix == "positive", curve=curve)

    def unit(raw: Tensor) -> Tensor:
        return raw / raw.norm(dim=1, keepdim=True)

    hessian: Callable[..., Any] = torch.autograd.functional.hessian
    if distance == "arccos":
        h = hessian(lambda raw: value(unit(raw)), z).reshape(n * dim, n * dim)
    else:
        jacobian = torch.autograd.functional.jacobian(unit, z).reshape(n * dim, n * dim)
        h = jacobian.T @ hessian(value, unit(z)).reshape(n * dim, n * dim) @ jacobian
    if pd_fix == "psd":
        return diagonal_blocks(h, dim, projected=True)
    if pd_fix not in ("ggn", "ggn_fixed", "psd_parts") or not weights:
        return h

    ends = torch.tensor([key[:2] for key in weights], dtype=torch.int64, device="cpu").view(-1, 2).T

    def cosines(raw: Tensor) -> Tensor:
        u = unit(raw)
        return (u[ends[0]] * u[ends[1]]).sum(1)

    def of_cosines(s: Tensor) -> Tensor:
        values = (abs(w) * curve(2 - 2 * part, key[2]) for part, (key, w) in zip(s, weights.items(), strict=True))
        return sum(values, start=s.sum() * 0)

    spread = torch.autograd.functional.jacobian(cosines, z).reshape(-1, n * dim)
    second = spread.T @ hessian(of_cosines, cosines(z)) @ spread
    if pd_fix == "psd_parts":
        return diagonal_blocks(h - second, dim, projected=True) + diagonal_blocks(second, dim)
    return second if pd_fix == "ggn" else diagonal_blocks(second, dim)


def diagonal_blocks(matrix: Tensor, dim: int, *, projected: bool = False) -> Tensor:
    """Return the diagonal blocks; if ``projected``, with negative eigenvalues set to zero."""
    parts = []
    for k in range(0, len(matrix), dim):
        part = matrix[k : k + dim, k : k + dim]
        if projected:
            values, vectors = torch.linalg.eigh((part + part.T) / 2)
            part = (vectors * values.clamp(min=0)) @ vectors.T
        parts.append(part)
    return torch.block_diag(*parts)


def dense_jacobian(model: nn.Module, x: Any) -> Tensor:
    """Return the Jacobian (N D, P) of raw outputs in the trainable parameters, in order, by autograd."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    values = dict(model.named_parameters())

    first = {id(p): name for name, p in values.items()}

    def outputs(*parameters: Tensor) -> Tensor:
        chosen = {**values, **dict(zip(names, parameters, strict=True))}
        # Replace every place of a tied parameter, because torch's own ties damage modules that have two names.
        places = {
            f"{prefix}.{name}" if prefix else name: chosen[first[id(p)]]
            for prefix, module in model.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        return torch.func.functional_call(model, places, (x,), tie_weights=False)

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(values[name].detach() for name in names))
    return torch.cat([j.unsqueeze(-1).flatten(2).flatten(0, 1) for j in jacobians], dim=1)


def dense_ggn(model: nn.Module, x: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
    """Return ``J^T H J`` (P, P) of an encoder without a normalisation at its end.

    Args:
        model: The encoder, in evaluation mode, with raw outputs.
        x: A batch.
        labels: Class labels, or targets.
        **options: As in :func:`dense_output_hessian`.

    Returns:
        The dense matrix.
    """
    jacobian = dense_jacobian(model, x)
    h = dense_output_hessian(model(x).detach(), labels, **options)
    return jacobian.T @ h @ jacobian


def anchor_value(loss: Any, positive: Tensor, negative: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a loss of anchors as a function of (N, N) cosines, treated as independent variables.

    Args:
        loss: The loss; only its value rule is used, not its derivatives.
        positive: Mask of the positives of each anchor, shape (N, N), zero diagonal.
        negative: Mask of the negatives of each anchor, shape (N, N).
    """

    def value(cosine: Tensor) -> Tensor:
        total, terms = cosine.sum() * 0, 0.0
        for s, p, n in zip(cosine, positive, negative, strict=True):
            row = s[None], p[None], n[None]
            count = float(loss._counts_at(s[None].detach(), *row[1:]))
            if count > 0:
                total, terms = total + loss._value(*row).sum(), terms + count
        return total / terms if loss.averages and terms else total

    return value


def anchor_hessian(value: Callable[[Tensor], Tensor], z: Tensor, distance: str, pd_fix: str) -> Tensor:
    """Return the Hessian (N D, N D) of an :func:`anchor_value` with respect to raw outputs (N, D), by autograd.

    ``full`` is the Hessian of the loss. ``euclidean`` writes the cosine as ``1 - |u - v|^2 / 2`` for free vectors, and
    drops the second derivative of the normalisation. ``ggn`` is the second derivative in the cosines between the
    Jacobians of the cosines; the rest of the Hessian is linear in the first derivatives; ``positive`` keeps the first
    derivatives of attracting pairs, and ``psd_parts`` the positive eigenvalues of every block.
    """
    n, dim = z.shape
    hessian: Callable[..., Any] = torch.autograd.functional.hessian

    def unit(raw: Tensor) -> Tensor:
        return raw / raw.norm(dim=1, keepdim=True)

    def cosines(u: Tensor) -> Tensor:
        if distance == "arccos":
            return u @ u.T
        return 1 - (u.unsqueeze(1) - u.unsqueeze(0)).square().sum(2) / 2

    def of_outputs(curve: Callable[[Tensor], Tensor]) -> Tensor:
        if distance == "arccos":
            return torch.as_tensor(hessian(lambda raw: curve(cosines(unit(raw))), z), device=z.device).reshape(
                n * dim, n * dim
            )
        jacobian = torch.autograd.functional.jacobian(unit, z).reshape(n * dim, n * dim)
        inner = torch.as_tensor(hessian(lambda u: curve(cosines(u)), unit(z)), device=z.device).reshape(
            n * dim, n * dim
        )
        return jacobian.T @ inner @ jacobian

    at = (unit(z) @ unit(z).T).detach()
    spread = torch.autograd.functional.jacobian(lambda raw: unit(raw) @ unit(raw).T, z).reshape(n * n, n * dim)
    second = spread.T @ torch.as_tensor(hessian(value, at), device=z.device).reshape(n * n, n * n) @ spread
    if pd_fix in ("ggn", "ggn_fixed"):
        out = second
    elif pd_fix == "positive":
        slope = torch.autograd.functional.jacobian(value, at)
        attracting = (-(slope + slope.T)).clamp(min=0)
        out = of_outputs(lambda s: -(attracting * s).sum() / 2) + second
    else:
        out = of_outputs(value)
    if pd_fix == "psd_parts":
        return diagonal_blocks(out - second, dim, projected=True) + diagonal_blocks(second, dim)
    if pd_fix in ("fixed", "psd", "ggn_fixed"):
        return diagonal_blocks(out, dim, projected=pd_fix == "psd")
    return out

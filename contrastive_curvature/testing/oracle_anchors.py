"""The oracle for losses of anchors: dense Hessians by autograd, from the value rule of a loss alone.

The matrix of all cosines is an explicit variable, so that the first-order and the second-order part can be told apart.
Use it in float64 and on small cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.testing.oracle import dense_jacobian, diagonal_blocks

__all__ = ["AnchorCase", "anchor_ggn", "anchor_hessian", "cosine_value", "masks_of"]

Value = Callable[[Tensor], Tensor]


class AnchorCase:
    """A loss of anchors at N points, as a function of their (N, N) cosines.

    Args:
        loss: The loss; its value rule is believed, its derivatives are not.
        positive: Which candidates are positives of which anchors, shape (N, N), zero diagonal.
        negative: Which are negatives.
    """

    def __init__(self, loss: Any, positive: Tensor, negative: Tensor) -> None:
        self.loss, self.positive, self.negative = loss, positive, negative

    def __call__(self, cosine: Tensor) -> Tensor:
        """The loss at cosines (N, N) that are taken for independent of each other."""
        return cosine_value(self.loss, cosine, self.positive, self.negative)


def masks_of(n: int, labels: Tensor | None, pairs: Any = None) -> tuple[Tensor, Tensor]:
    """How often each pair of points counts as positive and as negative, float64, each (N, N)."""
    if callable(pairs):
        targets = torch.arange(n) if labels is None else labels
        pairs = pairs(targets, targets)
    elif pairs is None:
        if labels is None:
            msg = "labels or pairs are needed"
            raise ValueError(msg)
        pairs = (labels[:, None] == labels[None], labels[:, None] != labels[None])
    positive, negative = torch.zeros(2, n, n, dtype=torch.float64)
    if len(pairs) == 2:
        for out, mask in zip((positive, negative), pairs, strict=True):
            out += mask.double() * (1 - torch.eye(n, dtype=torch.float64))
        return positive, negative
    a1, p, a2, neg = pairs if len(pairs) == 4 else (pairs[0], pairs[1], pairs[0], pairs[2])
    for out, left, right in ((positive, a1, p), (negative, a2, neg)):
        for i, j in zip(left.tolist(), right.tolist(), strict=True):
            if i != j:
                out[i, j] += 1
                out[j, i] += 1
    return positive, negative


def cosine_value(loss: Any, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """The loss, anchor by anchor."""
    total, terms = cosine.sum() * 0, 0.0
    for s, p, n in zip(cosine, positive, negative, strict=True):
        row = s[None], p[None], n[None]
        count = float(loss._counts_at(s[None].detach(), *row[1:]))
        if count > 0:
            total, terms = total + loss._value(*row).sum(), terms + count
    if not loss.averages:
        return total
    return total / terms if terms else total


def anchor_hessian(case: AnchorCase, z: Tensor, distance: str, pd_fix: str) -> Tensor:
    """Hessian (N D, N D) with respect to raw outputs, by autograd.

    ``full`` is the Hessian of the loss. ``euclidean`` writes the cosine as ``1 - |u - v|^2 / 2`` of free vectors and
    leaves the second derivative of the normalisation out. ``ggn`` is the second derivative in the cosines between the
    Jacobians of the cosines; what is left of the Hessian is linear in the first derivatives, of which ``positive``
    keeps those of attracting pairs, and ``psd_parts`` the positive eigenvalues of every block.
    """
    n, dim = z.shape
    hessian: Callable[..., Any] = torch.autograd.functional.hessian

    def unit(raw: Tensor) -> Tensor:
        return raw / raw.norm(dim=1, keepdim=True)

    def cosines(u: Tensor) -> Tensor:
        if distance == "arccos":
            return u @ u.T
        return 1 - (u.unsqueeze(1) - u.unsqueeze(0)).square().sum(2) / 2

    def of_outputs(value: Value) -> Tensor:
        if distance == "arccos":
            return torch.as_tensor(hessian(lambda raw: value(cosines(unit(raw))), z)).reshape(n * dim, n * dim)
        jacobian = torch.autograd.functional.jacobian(unit, z).reshape(n * dim, n * dim)
        inner = torch.as_tensor(hessian(lambda u: value(cosines(u)), unit(z))).reshape(n * dim, n * dim)
        return jacobian.T @ inner @ jacobian

    at = (unit(z) @ unit(z).T).detach()
    spread = torch.autograd.functional.jacobian(lambda raw: unit(raw) @ unit(raw).T, z).reshape(n * n, n * dim)
    second = spread.T @ torch.as_tensor(hessian(case, at)).reshape(n * n, n * n) @ spread
    if pd_fix in ("ggn", "ggn_fixed"):
        out = second
    elif pd_fix == "positive":
        slope = torch.autograd.functional.jacobian(case, at)
        attracting = (-(slope + slope.T)).clamp(min=0)
        out = of_outputs(lambda s: -(attracting * s).sum() / 2) + second
    else:
        out = of_outputs(case)
    if pd_fix == "psd_parts":
        return diagonal_blocks(out - second, dim, projected=True) + diagonal_blocks(second, dim)
    if pd_fix in ("fixed", "psd", "ggn_fixed"):
        return diagonal_blocks(out, dim, projected=pd_fix == "psd")
    return out


def anchor_ggn(model: nn.Module, x: Tensor, case: AnchorCase, distance: str, pd_fix: str) -> Tensor:
    """``J^T H J`` (P, P) of an encoder without a normalisation at its end."""
    jacobian = dense_jacobian(model, x)
    return jacobian.T @ anchor_hessian(case, model(x).detach(), distance, pd_fix) @ jacobian

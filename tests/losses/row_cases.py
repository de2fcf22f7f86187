"""What the tests of losses of anchors share: cases, a slow value, and the output Hessian against autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import Case, close
from torch import Tensor

from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.sides import joined_towers
from contrastive_curvature.testing import list_pairs

__all__ = [
    "TEMPERATURES",
    "Anchor",
    "Towers",
    "check_ggn_is_psd",
    "check_hessian",
    "check_products",
    "check_same",
    "check_towers",
    "cosines",
    "counted",
    "numbers",
    "slow_value",
    "towers",
]

TEMPERATURES = (0.005, 0.07, 1.0, 10.0)

Anchor = tuple[list[float], list[float], list[float]]
"""Cosines of the candidates of an anchor, and how often each counts as a positive and as a negative."""


@dataclass
class Towers:
    """Points of two towers."""

    z_a: Tensor
    z_b: Tensor
    labels: tuple[Tensor, Tensor] | None = None

    def to(self, device: str) -> Towers:
        """The same on another device."""
        labels = None if self.labels is None else (self.labels[0].to(device), self.labels[1].to(device))
        return Towers(self.z_a.to(device), self.z_b.to(device), labels)


def numbers(seed: int, *shape: int) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def towers(draw: st.DrawFn, min_dim: int = 1) -> Towers:
    """Two towers that belong together point by point, or of different sizes with labels."""
    seed, dim = draw(st.integers(0, 2**16)), draw(st.integers(min_dim, 4))
    first = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return Towers(numbers(seed, first, dim), numbers(seed + 1, first, dim))
    second, classes = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(seed)
    labels = (
        torch.randint(0, classes, (first,), generator=generator),
        torch.randint(0, classes, (second,), generator=generator),
    )
    return Towers(numbers(seed, first, dim), numbers(seed + 1, second, dim), labels)


def cosines(z: Tensor) -> Tensor:
    """Cosines of all points, shape (N, N)."""
    u = z / z.norm(dim=1, keepdim=True)
    return u @ u.T


def counted(case: Case) -> tuple[Tensor, Tensor]:
    """How often every pair counts as a positive and as a negative, each (N, N)."""
    n = len(case.z)
    out = torch.zeros(2, n, n, dtype=torch.float64)
    for (i, j, sign), times in list_pairs(n, case.labels, case.pairs).items():
        kind = 0 if sign > 0 else 1
        out[kind, i, j] += times
        out[kind, j, i] += times
    return out[0], out[1]


def slow_value(case: Case, of_anchor: Callable[..., tuple[float, float]], reduction: str) -> float:
    """A loss by a loop over anchors.

    Args:
        case: Points with their pairs.
        of_anchor: From :data:`Anchor`, the sum over the terms of an anchor, and their number.
        reduction: ``"mean"`` or ``"sum"``.
    """
    s, (positive, negative) = cosines(case.z).tolist(), counted(case)
    total = terms = 0.0
    for i in range(len(s)):
        value, count = of_anchor(s[i], positive[i].tolist(), negative[i].tolist())
        if count:
            total, terms = total + value, terms + count
    return total if reduction == "sum" else total / max(terms, 1e-300)


def check_hessian(loss: RowLoss, case: Case, device: str, size: float, tolerance: float = 1e-10) -> None:
    """The output Hessian is that of autograd.

    Args:
        loss: With ``distance="arccos"``.
        case: Points with their pairs.
        device: Where to compute.
        size: Of the second derivatives in the cosines before they cancel. Errors may be 1e-4 of it, times the
            tolerance, where the truth is smaller.
        tolerance: Relative to the largest entry.
    """
    moved = case.to(device)
    truth = torch.autograd.functional.hessian(lambda z: loss(z, **moved.given), moved.z)
    truth = truth.reshape(moved.z.numel(), -1)
    times = 1 + float(counted(case)[0].sum())
    floor = 1e-4 * times * size / float(case.z.norm(dim=1).min()) ** 2
    found = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs, pd_fix="full")
    _agrees(found, truth, floor, tolerance)
    value = loss(moved.z, **moved.given)
    assert close(found.loss_and_cost()[0].reshape(1), value.reshape(1), 1.0, 1e-12)


def check_towers(make: Callable[..., RowLoss], given: Towers, device: str, size: float) -> None:
    """The same with two towers, for all directions."""
    moved = given.to(device)
    for directions in ("both", "a", "b"):
        loss = make(directions=directions)
        z, relation, first = joined_towers(moved.z_a, moved.z_b, moved.labels)
        u = z / z.norm(dim=1, keepdim=True)

        def value(z: Tensor, loss: RowLoss = loss, first: int = first) -> Tensor:
            return loss.between(z[:first], z[first:], moved.labels)

        truth = torch.autograd.functional.hessian(value, z).reshape(z.numel(), -1)
        chosen = loss.replaced(pd_fix="full")
        found = chosen.hessian_of(z, chosen.between_towers(relation, u, first))
        _agrees(found, truth, 1e-4 * size / float(z.norm(dim=1).min()) ** 2, 1e-10)


def _agrees(found: Any, truth: Tensor, floor: float, tolerance: float) -> None:
    n, dim = found.z.shape
    assert close(found.dense(), truth, floor, tolerance)
    assert close(found.diagonal().flatten(), truth.diagonal(), floor, tolerance)
    unit = torch.eye(n * dim, dtype=truth.dtype, device=truth.device).view(n, dim, n * dim)
    assert close(found.matvec(unit).reshape(n * dim, -1), truth, floor, tolerance)
    points = torch.arange(n, device=truth.device)
    total = truth.view(n, dim, n, dim)[points, :, points].sum(0)
    assert close(found.blocks.total(), total, floor, tolerance)


def check_products(loss: RowLoss, case: Case, device: str, size: float, seed: int = 0) -> None:
    """Blocks between two points, in tiles, are those of the dense Hessian."""
    moved = case.to(device)
    found = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs)
    (n, dim), dense = case.z.shape, found.dense()
    size = 1e3 * max(size, 1.0) / float(case.z.norm(dim=1).min()) ** 2
    v, w = (numbers(seed + k, n, dim, 2).to(device) for k in range(2))
    assert close(found.matvec(v).reshape(n * dim, 2), dense @ v.reshape(n * dim, 2), size, 1e-13)
    four = dense.view(n, dim, n, dim).clone()
    four[torch.arange(n), :, torch.arange(n)] = 0
    middle, everything = slice(seed % (n + 1) // 2, n), slice(0, n)
    for left, right in ((middle, everything), (middle, middle), (everything, middle)):
        cross, part = found.cross(left, right), four[left][:, :, right]
        assert close(cross.matmul(v[right]), torch.einsum("iajb,jbk->iak", part, v[right]), size, 1e-13)
        forms = torch.einsum("iak,iajb,jbk->kij", w[left], part, v[right])
        assert close(cross.forms(w[left], v[right]), forms, size, 1e-13)
        for k in range(dim):
            assert close(cross.axis(k), part[:, k, :, k], size, 1e-13)
        i, j = torch.cartesian_prod(*(torch.arange(side, device=device) for side in cross.shape)).unbind(1)
        assert close(cross.diagonals(i, j), torch.diagonal(part[i, :, j], dim1=1, dim2=2), size, 1e-13)


def check_same(ours: Tensor, theirs: Tensor, z: Tensor, tolerance: float = 1e-11) -> None:
    """Two losses have the same value and the same gradient."""
    assert close(ours.detach().reshape(1), theirs.detach().reshape(1), tolerance=tolerance)
    assert close(*(torch.autograd.grad(value, z)[0] for value in (ours, theirs)), tolerance=tolerance)


def check_ggn_is_psd(loss: RowLoss, case: Case, device: str, size: float) -> None:
    """The second-order part alone has no negative eigenvalue."""
    moved = case.to(device)
    dense = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs, pd_fix="ggn").dense()
    low = float(torch.linalg.eigvalsh(dense).min())
    assert low >= -1e-12 * max(float(dense.abs().max()), size / float(case.z.norm(dim=1).min()) ** 2)

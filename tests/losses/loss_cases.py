"""What the tests of losses share: numbers, every form of an output Hessian, and Hessians by autograd."""

from collections.abc import Callable
from typing import Any

import torch
from strategies import close
from tiny import numbers
from torch import Tensor

from contrastive_curvature.testing.oracle import diagonal_blocks

__all__ = ["check_cross_blocks", "check_hessian", "cosine_hessian", "numbers", "unit"]


def unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True)


def check_hessian(found: Any, truth: Tensor, floor: float, tolerance: float = 1e-10) -> None:
    """Compare an output Hessian with a dense one (N D, N D); errors may be the tolerance times the floor."""
    (n, dim), device = found.z.shape, found.z.device
    truth, points = truth.to(device), torch.arange(n, device=device)
    blocks = truth.view(n, dim, n, dim)[points, :, points]
    assert close(found.dense(), truth, floor, tolerance)
    assert close(found.diagonal().flatten(), truth.diagonal(), floor, tolerance)
    assert close(found.point_blocks(), blocks, floor, tolerance)
    assert close(found.blocks.total(), blocks.sum(0), floor, tolerance)
    axes = torch.eye(n * dim, dtype=truth.dtype, device=device).view(n, dim, -1)
    assert close(found.matvec(axes).reshape(n * dim, -1), truth, floor, tolerance)
    signed = found.signed_factor()
    if signed.sums_batch:
        flat = signed.columns.flatten(1)
        assert close(flat.T @ (signed.signs.unsqueeze(1) * flat), truth, floor, tolerance)
    else:
        rebuilt = torch.einsum("cnd,cn,cne->nde", signed.columns, signed.signs, signed.columns)
        assert close(rebuilt, found.point_blocks(), 1e3 * floor, 1e-12)


def check_cross_blocks(found: Any, size: float, seed: int) -> None:
    """Compare products, and blocks between some of the points, with the dense Hessian."""
    (n, dim), device, dense = found.z.shape, found.z.device, found.dense()
    v, w = (numbers(seed + k, n, dim, 2).to(device) for k in range(2))
    assert close(found.matvec(v).reshape(n * dim, 2), dense @ v.reshape(n * dim, 2), size, 1e-13)
    assert close(found.matvec(v[..., 0]), found.matvec(v)[..., 0], size, 1e-13)
    wide = numbers(seed + 2, n, dim, 7).to(device)
    assert close(found.blocks.matmul(wide), found.blocks.dense() @ wide, size, 1e-13)
    if not found.coupled:
        return
    four = dense.view(n, dim, n, dim).clone()
    four[torch.arange(n), :, torch.arange(n)] = 0
    start, stop = sorted((seed % (n + 1), seed // 7 % (n + 1)))
    some, everything = slice(start, stop), slice(0, n)
    for left, right in ((some, everything), (some, some), (everything, some), (everything, everything)):
        cross, part = found.cross(left, right), four[left][:, :, right]
        assert close(cross.matmul(v[right]), torch.einsum("iajb,jbk->iak", part, v[right]), size, 1e-13)
        forms = torch.einsum("iak,iajb,jbk->kij", w[left], part, v[right])
        assert close(cross.forms(w[left], v[right]), forms, size, 1e-13)
        for k in range(dim):
            assert close(cross.axis(k), part[:, k, :, k], size, 1e-13)
        if part.numel():
            i, j = torch.cartesian_prod(*(torch.arange(side, device=device) for side in cross.shape)).unbind(1)
            assert close(cross.diagonals(i, j), torch.diagonal(part[i, :, j], dim1=1, dim2=2), size, 1e-13)


def cosine_hessian(
    z: Tensor,
    cosine: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    repelling: Callable[[Tensor], Tensor],
    distance: str,
    fix: str,
) -> Tensor:
    """The Hessian (N D, N D) of a function of cosines as a fix and a distance want it, by autograd.

    Args:
        z: Raw outputs.
        cosine: The cosines of unit embeddings, written as the distance wants it.
        value: The loss from them.
        repelling: Which of the first derivatives "positive" leaves out.
        distance: Of no effect on the value.
        fix: Any.
    """
    (n, dim), hessian = z.shape, torch.autograd.functional.hessian
    s = cosine(unit(z)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(value(s), s)

    def without(dropped: Tensor) -> Tensor:
        # A loss minus its tangent line has no first-order part.
        def left(u: Tensor) -> Tensor:
            return value(cosine(u)) - (dropped * cosine(u)).sum()

        if distance == "arccos":
            return torch.as_tensor(hessian(lambda z: left(unit(z)), z)).reshape(n * dim, -1)
        jacobian = torch.autograd.functional.jacobian(unit, z).reshape(n * dim, -1)
        return jacobian.T @ torch.as_tensor(hessian(left, unit(z))).reshape(n * dim, -1) @ jacobian

    whole = without(torch.zeros_like(slope))
    if fix == "psd_parts":
        second = without(slope)
        return diagonal_blocks(whole - second, dim, projected=True) + diagonal_blocks(second, dim)
    if fix.startswith("ggn"):
        whole = without(slope)
    if fix == "positive":
        whole = without(slope * repelling(slope))
    return diagonal_blocks(whole, dim, projected=fix == "psd") if fix in ("fixed", "psd", "ggn_fixed") else whole

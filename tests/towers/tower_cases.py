"""What the tests of two towers share: encoders, data, and the curvature by autograd."""

from collections.abc import Callable
from typing import Any

import torch
from laplace import Laplace
from tiny import numbers
from torch import Tensor, nn

from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.siglip import SigLIPLoss
from contrastive_curvature.losses.supcon import SupConLoss
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.testing import dense_jacobian

FIXES = ("positive", "fixed", "full", "psd", "psd_parts", "ggn", "ggn_fixed")

Batch = tuple[Any, ...]
"""``(a, b)``, or ``(a, b, (labels of a, labels of b))``."""

LOSSES: dict[str, Callable[..., Any]] = {
    "infonce": lambda **o: InfoNCELoss(0.5, **o),
    "supcon": lambda **o: SupConLoss(0.5, **o),
    "siglip": lambda **o: SigLIPLoss(3.0, -1.0, **o),
}


def encoders(device: str, dim: int = 3, seed: int = 1) -> tuple[nn.Module, nn.Module]:
    """Two encoders with different inputs and weights."""
    torch.manual_seed(seed)
    a = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, dim))
    b = nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, dim, bias=False))
    return a.double().to(device), b.double().to(device)


def batches(device: str, labelled: bool = False, widths: tuple[int, int] = (4, 2)) -> list[Batch]:
    """Several batches; labelled ones have other numbers of inputs in both towers."""
    out: list[Batch] = []
    for seed, (n, m) in enumerate(((4, 3), (2, 5)) if labelled else ((4, 4), (3, 3))):
        a, b = numbers(seed, n, widths[0]).to(device), numbers(seed + 10, m, widths[1]).to(device)
        labels = torch.arange(n) % 2, torch.arange(m) % 3
        out.append((a, b, tuple(part.to(device) for part in labels)) if labelled else (a, b))
    return out


def posterior(a: nn.Module, b: nn.Module, weights: str, structure: str, loss: Any, **options: Any) -> Any:
    """Posteriors of two towers, without a curvature."""
    return Laplace(TwoTowers(a, b), "contrastive", weights, structure, backend_kwargs={"loss": loss, **options})


def data_loss(name: str, s: Tensor, positive: Tensor, directions: str) -> Tensor:
    """The loss of a batch by hand, of the cosines (N, M): a mean over its terms times its number of anchors.

    Args:
        name: Of the loss in :data:`LOSSES`.
        s: Cosines.
        positive: Which belong together, boolean.
        directions: Of the loss.
    """
    total: Any = 0.0
    terms = anchors = 0
    sides = [(s, positive)] * (directions != "b") + [(s.T, positive.T)] * (directions != "a")
    for rows, same in sides:
        for row, mine in zip(rows, same, strict=True):
            if name == "siglip":
                sign = torch.where(mine, 1.0, -1.0)
                total = total - torch.nn.functional.logsigmoid(sign * (3.0 * row - 1.0)).sum()
                terms, anchors = terms + 1, anchors + 1
                continue
            if not bool(mine.any()):
                continue
            logits, anchors = row / 0.5, anchors + 1
            if name == "supcon":
                total, terms = total + logits.logsumexp(0) - logits[mine].mean(), terms + 1
                continue
            for p in logits[mine]:
                total = total + torch.cat([p.reshape(1), logits[~mine]]).logsumexp(0) - p
                terms += 1
    return total * anchors / terms / len(sides)


def joint_hessian(
    name: str, z_a: Tensor, z_b: Tensor, positive: Tensor, fix: str, distance: str = "arccos", directions: str = "both"
) -> Tensor:
    """Hessian (N D, N D) in the outputs of both towers, from derivatives in the cosines by autograd.

    ``F`` is the Hessian of ``sum_ij g_ij s_ij(z)`` with the first derivatives ``g`` held fixed, ``K`` the second
    derivatives in the cosines between two Jacobians of the cosines.
    """
    z, first = torch.cat([z_a, z_b]), len(z_a)

    def cosines(z: Tensor) -> Tensor:
        u = z / z.norm(dim=1, keepdim=True)
        return u[:first] @ u[first:].T

    def value(s: Tensor) -> Tensor:
        return data_loss(name, s, positive, directions)

    s = cosines(z).detach()
    g = torch.autograd.functional.jacobian(value, s)
    count, (n, dim) = s.numel(), z.shape
    moved = torch.autograd.functional.jacobian(cosines, z).reshape(count, -1)
    second = moved.T @ torch.autograd.functional.hessian(value, s).reshape(count, count) @ moved
    if fix in ("ggn", "ggn_fixed"):
        return second if fix == "ggn" else _blocks(second, dim)
    if fix == "positive":
        g = g.clamp(max=0)
    first_order = torch.autograd.functional.hessian(lambda z: (g * cosines(z)).sum(), z).reshape(n * dim, n * dim)
    if distance == "euclidean":
        # Half squared distances of linearised directions: d_i P_i / n_i^2 takes the place of the diagonal blocks.
        u, degree = z / z.norm(dim=1, keepdim=True), -torch.cat([g.sum(1), g.sum(0)])
        eye = torch.eye(dim, dtype=z.dtype, device=z.device)
        blocks = (eye - u.unsqueeze(2) * u.unsqueeze(1)) * (degree / z.square().sum(1)).view(-1, 1, 1)
        first_order = first_order - _blocks(first_order, dim) + torch.block_diag(*blocks)
    if fix == "psd_parts":
        return _blocks(first_order, dim, projected=True) + _blocks(second, dim)
    out = first_order + second
    return out if fix in ("full", "positive") else _blocks(out, dim, projected=fix == "psd")


def _blocks(matrix: Tensor, dim: int, projected: bool = False) -> Tensor:
    """The diagonal blocks, with negative eigenvalues set to zero where ``projected``."""
    blocks = [matrix[k : k + dim, k : k + dim] for k in range(0, len(matrix), dim)]
    if projected:
        pairs = [torch.linalg.eigh((block + block.T) / 2) for block in blocks]
        blocks = [(vectors * values.clamp(min=0)) @ vectors.T for values, vectors in pairs]
    return torch.block_diag(*blocks)


def jacobian(model: nn.Module, x: Tensor, weights: str) -> Tensor:
    """Jacobian (N D, P) of the raw outputs; of the last layer, the last parameters of the encoder."""
    whole = dense_jacobian(model, x)
    if weights == "all":
        return whole
    return whole[:, -sum(p.numel() for p in list(model.modules())[-1].parameters()) :]


def joint_hessians(name: str, a: nn.Module, b: nn.Module, data: list[Batch], fix: str, **options: Any) -> list[Tensor]:
    """:func:`joint_hessian` of every batch."""
    out = []
    for x_a, x_b, *labels in data:
        z_a, z_b = a(x_a).detach(), b(x_b).detach()
        positive = torch.eye(len(z_a), dtype=torch.bool, device=z_a.device)
        if labels:
            positive = labels[0][0].unsqueeze(1) == labels[0][1]
        out.append(joint_hessian(name, z_a, z_b, positive, fix, **options))
    return out


def pulled_back(
    hessians: list[Tensor], a: nn.Module, b: nn.Module, data: list[Batch], weights: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``J_a^T H_aa J_a``, ``J_b^T H_bb J_b`` and ``J_a^T H_ab J_b``, summed over batches."""
    out: Any = [0.0, 0.0, 0.0]
    for h, (x_a, x_b, *_) in zip(hessians, data, strict=True):
        j_a, j_b = jacobian(a, x_a, weights), jacobian(b, x_b, weights)
        k = len(j_a)
        parts = j_a.T @ h[:k, :k] @ j_a, j_b.T @ h[k:, k:] @ j_b, j_a.T @ h[:k, k:] @ j_b
        out = [before + part for before, part in zip(out, parts, strict=True)]
    return out[0], out[1], out[2]

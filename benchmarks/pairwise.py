"""The paper's algorithm, plainly: every pair of a batch is pulled back on its own through the last linear layer.

The yardstick for time and memory, and an oracle for the values: it shares no mathematics with the library. For a pair
{a, b} of raw outputs ``z = W phi + b`` and ``L = 1/2 |u_a - u_b|^2``, ``u = z / |z|``, ``c = u_a . u_b``:

- appendix F.2 (arccos): ``H_aa = (c I + u_a u_b^T + u_b u_a^T - 3 c u_a u_a^T) / n_a^2``;
- appendix F.1 (euclidean): ``H_aa = (I - u_a u_a^T) / n_a^2``;
- both: ``H_ab = -(I - u_a u_a^T - u_b u_b^T + c u_a u_b^T) / (n_a n_b)``.

The parameter diagonal of a pair is ``H_aa + 2 H_ab + H_bb`` pulled back, ``H_ab`` with its minus sign (the released
code subtracts it once more; errata of the design notes). Like the released code this is vectorised over pairs, by
batched products that leave one parameter diagonal a pair, which are then summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pairwise_curvature(
    features: Tensor,
    z: Tensor,
    pairs: Sequence[Tensor],
    *,
    distance: str,
    pd_fix: str,
    margin: float | None,
    negative_weight: float = 0.5,
    chunk: int | None = None,
) -> Tensor:
    """Diagonal of the last layer's GGN, summed over listed pairs, unclamped.

    Args:
        features: ``phi``, what the last layer is given, shape (N, F).
        z: Raw outputs, shape (N, D).
        pairs: Index tuples ``(a, p, n)`` or ``(a1, p, a2, n)``; repeated pairs add up.
        distance: ``"arccos"`` or ``"euclidean"``.
        pd_fix: ``"fixed"``, ``"positive"`` or ``"full"``.
        margin: A negative counts while its distance is below this; ``None`` lets all count.
        negative_weight: ``w_n`` of Eq. 10.
        chunk: How many pairs are held at once; ``None``: all positives of the batch, then all negatives, as in the
            released code.

    Returns:
        Shape (D F + D,), weights before biases.
    """
    anchors_p, positives, anchors_n, negatives = pairs if len(pairs) == 4 else (pairs[0], pairs[1], pairs[0], pairs[2])
    listed = [(1 - negative_weight, anchors_p, positives)]
    if pd_fix != "positive" and negative_weight:
        squared = (_unit(z[anchors_n]) - _unit(z[negatives])).square().sum(1)
        inside = squared < (float("inf") if margin is None else margin**2)
        listed.append((-negative_weight, anchors_n[inside], negatives[inside]))
    total = features.new_zeros(z.shape[1] * (features.shape[1] + 1))
    for weight, a, b in listed:
        apart = a != b  # a point with itself is no pair
        a, b = a[apart], b[apart]
        for i, j in zip(a.split(chunk or max(1, len(a))), b.split(chunk or max(1, len(b))), strict=True):
            total += weight * _pull_back(features[i], features[j], *_blocks(z[i], z[j], distance), pd_fix)
    return total


def _unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True)


def _blocks(z_a: Tensor, z_b: Tensor, distance: str) -> tuple[Tensor, Tensor, Tensor]:
    """``H_aa``, ``H_ab`` and ``H_bb`` of K pairs, each (K, D, D)."""
    n_a, n_b = z_a.norm(dim=1).view(-1, 1, 1), z_b.norm(dim=1).view(-1, 1, 1)
    u_a, u_b = _unit(z_a), _unit(z_b)
    c = (u_a * u_b).sum(1).view(-1, 1, 1)
    eye = torch.eye(z_a.shape[1], dtype=z_a.dtype, device=z_a.device)
    aa, ab, bb = (torch.einsum("ki,kj->kij", x, y) for x, y in ((u_a, u_a), (u_a, u_b), (u_b, u_b)))
    h_ab = -(eye - aa - bb + c * ab) / (n_a * n_b)
    if distance == "euclidean":
        return (eye - aa) / n_a**2, h_ab, (eye - bb) / n_b**2
    both = c * eye + ab + ab.mT
    return (both - 3 * c * aa) / n_a**2, h_ab, (both - 3 * c * bb) / n_b**2


def _pull_back(phi_a: Tensor, phi_b: Tensor, h_aa: Tensor, h_ab: Tensor, h_bb: Tensor, pd_fix: str) -> Tensor:
    """``diag(J^T H J)`` of K pairs through the linear layer, summed."""
    if pd_fix == "fixed":  # one end of the pair is held fixed, then the other: no cross terms
        return _each_pair(h_aa, phi_a, phi_a) + _each_pair(h_bb, phi_b, phi_b)
    return _each_pair(h_aa, phi_a, phi_a) + 2 * _each_pair(h_ab, phi_a, phi_b) + _each_pair(h_bb, phi_b, phi_b)


def _each_pair(h: Tensor, phi_left: Tensor, phi_right: Tensor) -> Tensor:
    diagonal = h.diagonal(dim1=1, dim2=2)
    weights = torch.bmm(diagonal.unsqueeze(2), (phi_left * phi_right).unsqueeze(1)).flatten(1)  # (K, D F)
    return torch.cat([weights.sum(0), diagonal.sum(0)])

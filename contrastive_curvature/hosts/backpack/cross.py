"""The diagonal of the cross terms between points, layer by layer and without a gradient of any point in linear layers.

For a linear layer ``h = W a + b`` and the rows ``g_ik`` of ``A_i = P_i J_i / n_i`` with respect to ``h``, the entry
(o, f) of ``sum_ij y_ij A_i^T A_j`` is ``sum_ij M^o_ij a_if a_jf`` with ``M^o_ij = y_ij sum_k g_iko g_jko``. For R and C
points that is O(R C (D + F)) an output of the layer; the gradients of all points would take O(R C D F).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.hosts.backpack.rules import parameter_products

_CHUNK_ELEMENTS = 2**21
"""Numbers in a temporary product; more would leave the cache."""

__all__ = ["LayerSide", "layer_side", "linear_cross", "product_cross"]


@dataclass(frozen=True)
class LayerSide:
    """What one layer knows of N points.

    Args:
        columns: Rows of ``A_i`` with respect to what the layer puts out, shape (D, N, O); of linear layers.
        inputs: What the layer takes, shape (N, F); of linear layers.
        products: Rows of ``A_i`` with respect to each parameter, (D, N, p), by name; of other layers.
    """

    columns: Tensor | None
    inputs: Tensor | None
    products: dict[str, Tensor]


def layer_side(step: Any, columns: Tensor) -> LayerSide:
    """Keep what the cross terms need of a layer.

    Args:
        step: The layer, run.
        columns: Shape (D, N, *output).

    Returns:
        One side of the cross terms.
    """
    layer = step.module
    if type(layer) is nn.Linear and columns.ndim == 3:
        return LayerSide(columns, vars(layer)["input0"].detach(), {})
    products = {
        name: parameter_products(step.derivatives, step.module, name, columns, sum_batch=False).flatten(2)
        for name, _ in step.params
    }
    return LayerSide(None, None, products)


def linear_cross(left: LayerSide, right: LayerSide, y: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Diagonals of weight (O F,) and bias (O,) of a linear layer, for pair weights ``y`` (R, C)."""
    if left.columns is None or right.columns is None or left.inputs is None or right.inputs is None:
        msg = "these are not the sides of a linear layer"
        raise TypeError(msg)
    out: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    step = max(1, _CHUNK_ELEMENTS // max(1, y.numel() + left.inputs.numel()))
    for g, h in zip(left.columns.split(step, dim=2), right.columns.split(step, dim=2), strict=True):
        m = y * torch.einsum("kro,kco->orc", g, h)
        if "weight" in names:
            out["weight"].append(((m @ right.inputs) * left.inputs).sum(1))
        if "bias" in names:
            out["bias"].append(m.sum((1, 2)))
    return {name: torch.cat(parts).flatten() for name, parts in out.items() if name in names}


def product_cross(left: Tensor, right: Tensor, y: Tensor) -> Tensor:
    """Diagonal (p,) from rows of ``A_i``, (D, R, p) and (D, C, p)."""
    total = left.new_zeros(left.shape[2])
    for a, b in zip(left, right, strict=True):
        total += (a * (y @ b)).sum(0)
    return total

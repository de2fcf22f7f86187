"""What one layer contributes to the curvature, from the signed factor at its output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.network import pullback

__all__ = ["parameter_diagonal", "parameter_factor", "parameter_products"]


def parameter_products(derivatives: Any, module: Any, name: str, columns: Tensor, sum_batch: bool) -> Tensor:
    """``B^T v`` with the Jacobian ``B`` of a layer's outputs with respect to one of its parameters.

    Args:
        derivatives: BackPACK's derivatives of the layer.
        module: The layer, with its stored input and output.
        name: Of the parameter.
        columns: ``v``, shape (C, N, *output).
        sum_batch: Whether to sum over the points.

    Returns:
        Shape (C, *parameter) or (C, N, *parameter).
    """
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and name == "weight" and module.groups == 1:
        # BackPACK's own rule convolves with one group a column, point and channel, which is slow.
        x = derivatives.get_unfolded_input(module)
        found = torch.einsum(f"cnot,nkt->c{'' if sum_batch else 'n'}ok", columns.flatten(3), x)
        return found.reshape(*found.shape[:-2], *module.weight.shape)
    return derivatives.param_mjp(name, module, None, None, columns, sum_batch=sum_batch)


def parameter_diagonal(derivatives: Any, module: Any, name: str, factor: SignedFactor) -> Tensor:
    """Diagonal of the curvature of one parameter, in its shape.

    Args:
        derivatives: BackPACK's derivatives of the layer.
        module: The layer, with its stored input and output.
        name: Of the parameter.
        factor: Signed factor at the layer's output.

    Returns:
        ``sum sign (B^T v)^2``.
    """
    p: Tensor = getattr(module, name)
    columns, signs = factor.columns, factor.signs
    if isinstance(module, nn.Linear) and columns.ndim == 3 and not factor.sums_batch:
        x: Any = module.input0
        spread = torch.einsum("cn,cno->no", signs, columns.square())
        return spread.T @ x.detach().square() if name == "weight" else spread.sum(0)
    out = columns.new_zeros(p.shape)
    each = p.numel() * (1 if factor.sums_batch else columns.shape[1])
    step = max(1, pullback.JACOBIAN_ELEMENTS // max(1, each))
    for start in range(0, columns.shape[0], step):
        part = slice(start, start + step)
        moved = parameter_products(derivatives, module, name, columns[part], factor.sums_batch)
        out += torch.tensordot(signs[part], moved.square(), dims=signs.ndim)
    return out


def parameter_factor(derivatives: Any, module: Any, name: str, factor: SignedFactor) -> SignedFactor:
    """Signed factor of the curvature of one parameter.

    Args:
        derivatives: BackPACK's derivatives of the layer.
        module: The layer, with its stored input and output.
        name: Of the parameter.
        factor: Signed factor at the layer's output.

    Returns:
        Columns (R, *parameter) and signs (R,), with R = C or R = C N.
    """
    moved = parameter_products(derivatives, module, name, factor.columns, factor.sums_batch)
    rows = math.prod(factor.signs.shape)
    return SignedFactor(moved.reshape(rows, *getattr(module, name).shape), factor.signs.flatten())

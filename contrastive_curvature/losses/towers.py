"""The outputs of two towers as one set of points."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.pairs.relation import LabelRelation, check_labels

__all__ = ["joined_towers"]


def joined_towers(
    z_a: Tensor, z_b: Tensor, labels: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, LabelRelation, int]:
    """Put the outputs of two towers after each other.

    Args:
        z_a: Raw outputs of the first tower, shape (N, D).
        z_b: Of the second tower, shape (M, D).
        labels: Labels of both, (N,) and (M,); ``None`` where ``z_a[i]`` belongs to ``z_b[i]``.

    Returns:
        Outputs (N + M, D), which of them belong together, and N.

    Raises:
        InputError: The towers have another width or, without labels, another number of points.
    """
    z_a, z_b = check_outputs(z_a, "z_a"), check_outputs(z_b, "z_b")
    if z_a.shape[1] != z_b.shape[1]:
        wanted = f"as many dimensions as the first tower, {z_a.shape[1]}"
        raise InputError(expected("z_b", wanted, z_b.shape[1], "Cosines are between vectors of one space."))
    if (z_a.dtype, z_a.device) != (z_b.dtype, z_b.device):
        raise InputTypeError(expected("z_b", f"{z_a.dtype} on {z_a.device}", f"{z_b.dtype} on {z_b.device}"))
    if labels is None:
        if len(z_a) != len(z_b):
            hint = "z_a[i] belongs to z_b[i]; pass labels where that is not so."
            raise InputError(expected("z_b", f"as many points as the first tower, {len(z_a)}", len(z_b), hint))
        both = torch.arange(len(z_a), device=z_a.device).repeat(2)
    else:
        both = torch.cat([check_labels(labels[0], len(z_a)), check_labels(labels[1], len(z_b))]).to(z_a.device)
    return torch.cat([z_a, z_b]), LabelRelation(both), len(z_a)

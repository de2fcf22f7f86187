"""The rules of a loss of anchors, called and checked: a wrong one is named here, instead of failing somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss, RowTerms

__all__ = ["row_numbers", "row_terms"]


def row_terms(
    loss: RowLoss, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor, kept: Tensor
) -> RowTerms:
    """Derivatives of a block, zero for anchors that have no term.

    Args:
        loss: The loss.
        cosine: Shape (B, C).
        positive: How often a candidate counts as a positive, shape (B, C).
        negative: How often it counts as a negative, shape (B, C).
        statistics: Of the whole rows, shape (B, K).
        kept: Whether an anchor has a term, shape (B,).

    Raises:
        InputTypeError: The loss returned something else than ``RowTerms``.
        InputError: Shapes, or the number of roots, are other ones than promised.
    """
    name = f"{type(loss).__name__}._terms"
    terms = loss._terms(cosine, positive, negative, statistics)
    if not isinstance(terms, tuple) or len(terms) != 3:
        raise InputTypeError(expected(name, "RowTerms(first, second, roots)", f"a {type(terms).__name__}"))
    if (terms.second is None) != loss.linear:
        wanted = "None as second derivatives" if loss.linear else "second derivatives"
        came = "None" if terms.second is None else "a Tensor"
        raise InputError(expected(name, f"{wanted}, as linear = {loss.linear} says", came))
    if len(terms.roots) != len(loss.root_signs):
        raise InputError(expected(name, f"{len(loss.root_signs)} roots, as root_signs says", len(terms.roots)))
    for part in (terms.first, terms.second, *terms.roots):
        if part is None:
            continue
        if not isinstance(part, Tensor) or part.dtype != cosine.dtype:
            came = f"one of {part.dtype}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise InputTypeError(expected(name, f"tensors of {cosine.dtype}", came))
        if part.shape != cosine.shape:
            raise InputError(expected(name, f"tensors of shape {tuple(cosine.shape)}", f"{tuple(part.shape)}"))
    if bool(kept.all()):
        return terms
    row = kept.unsqueeze(1)

    def only(part: Tensor) -> Tensor:
        return torch.where(row, part, 0.0)

    second = None if terms.second is None else only(terms.second)
    return type(terms)(only(terms.first), second, tuple(only(root) for root in terms.roots))


def row_numbers(loss: RowLoss, rule: str, found: object, rows: int) -> Tensor:
    """What a rule gives of every anchor.

    Args:
        loss: The loss.
        rule: Name of the rule, such as ``"_value"``.
        found: What it returned.
        rows: Number B of anchors.

    Returns:
        It, shape (B,).

    Raises:
        InputTypeError: It is no tensor.
        InputError: It has another shape, or numbers that are NaN.
    """
    name, wanted = f"{type(loss).__name__}.{rule}", f"one number for each of {rows} anchors, shape ({rows},)"
    if not isinstance(found, Tensor):
        raise InputTypeError(expected(name, wanted, f"a {type(found).__name__}"))
    if tuple(found.shape) != (rows,):
        raise InputError(expected(name, wanted, f"shape {tuple(found.shape)}"))
    if bool(found.detach().isnan().any()):
        raise InputError(expected(name, "numbers", "NaN"))
    return found

"""The rules of a loss of anchors, called and checked: a wrong one is named here, instead of failing somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.hessian.derivatives import NodeSums

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss, RowTerms

__all__ = ["check_row_sums", "row_terms"]


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


def check_row_sums(loss: RowLoss, sums: NodeSums) -> NodeSums:
    """Refuse sums that are not finite, since outputs are.

    Raises:
        UnrepresentableError: A derivative of the loss is infinite or NaN; the message names the points.
    """
    finite = sums.degree.isfinite() & sums.neighbors.isfinite().all(1)
    if sums.moments is not None:
        finite &= sums.moments.bound().isfinite()
    if not bool(finite.all()):
        came = f"NaN or infinity at the points {(~finite).nonzero().flatten()[:5].tolist()}"
        wanted = f"finite derivatives in {sums.neighbors.dtype}"
        raise UnrepresentableError(expected(type(loss).__name__, wanted, came))
    return sums

"""The two rules of a loss, called and checked: a wrong one is named here, instead of failing somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.hessian.derivatives import NodeSums

if TYPE_CHECKING:
    from contrastive_curvature.losses.base import PairLoss
    from contrastive_curvature.losses.cosine import CosineLoss

__all__ = ["check_sums", "terms_of", "value_of"]


def value_of(loss: PairLoss, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
    """Value of a block of pairs; arguments as in :meth:`PairLoss._value`.

    Raises:
        InputTypeError: The loss returned no tensor.
        InputError: The loss returned more than one number.
    """
    value = loss._value(cosine, attract, repel)
    name, wanted = f"{type(loss).__name__}._value", "the sum over the block, a tensor with one number"
    if not isinstance(value, Tensor):
        raise InputTypeError(expected(name, wanted, f"a {type(value).__name__}"))
    if value.numel() != 1:
        raise InputError(expected(name, wanted, f"shape {tuple(value.shape)}"))
    return value.reshape(())


def terms_of(loss: PairLoss, cosine: Tensor, attract: Tensor, repel: Tensor) -> tuple[Tensor, Tensor | None]:
    """First and second derivatives of a block of pairs, each of the shape of ``cosine``.

    Arguments as in :meth:`PairLoss._terms`. A single zero may stand for derivatives that are all zero.

    Raises:
        InputTypeError: The loss returned something else than ``Terms``, or tensors of another type.
        InputError: The shapes are not those of the cosines, or the second derivatives contradict ``linear``.
    """
    name, terms = f"{type(loss).__name__}._terms", loss._terms(cosine, attract, repel)
    if not isinstance(terms, tuple) or len(terms) != 2:
        raise InputTypeError(expected(name, "Terms(first, second)", f"a {type(terms).__name__}"))
    first, second = terms
    if second is None and not loss.linear:
        hint = "Where they are zero, set linear = True in the class."
        raise InputError(expected(name, "second derivatives", "None", hint))
    if second is not None and loss.linear:
        hint = "With linear = True in the class they are never used."
        raise InputError(expected(name, "None as second derivatives", f"a {type(second).__name__}", hint))
    first = _like(cosine, first, f"{name}: first")
    return first, None if second is None else _like(cosine, second, f"{name}: second")


def check_sums(loss: CosineLoss, sums: NodeSums) -> NodeSums:
    """Refuse sums over neighbours that are not finite, since outputs are.

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


def _like(cosine: Tensor, value: object, name: str) -> Tensor:
    wanted = f"a tensor of {cosine.dtype} on {cosine.device}"
    if not isinstance(value, Tensor):
        raise InputTypeError(expected(name, wanted, f"a {type(value).__name__}"))
    if (value.dtype, value.device) != (cosine.dtype, cosine.device):
        raise InputTypeError(expected(name, wanted, f"one of {value.dtype} on {value.device}"))
    if value.ndim == 0 and not bool(value):
        # No pair of one kind counts, so that its weights are a single zero.
        return value.expand_as(cosine)
    if value.shape != cosine.shape:
        wanted = f"the shape of the cosines, {tuple(cosine.shape)}"
        raise InputError(expected(name, wanted, f"{tuple(value.shape)}", "Call .expand_as(cosine) if it broadcasts."))
    return value

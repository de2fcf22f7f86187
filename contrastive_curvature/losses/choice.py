"""The loss that a user chooses: an object, or the options of the contrastive loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.options import Default, Distance, Normalization, PDFix, default
from contrastive_curvature.pairs import Pairs

OF_THE_LOSS = ("margin", "negative_weight", "normalization")
"""Options of the contrastive loss; another loss brings its own."""

MARGIN: Any = default(0.7)
NEGATIVE_WEIGHT: Any = default(0.5)
NORMALIZATION: Any = default(Normalization.ANCHOR)
DISTANCE: Any = default(Distance.ARCCOS)
PD_FIX: Any = default(PDFix.FIXED)


def choose_loss(loss: CosineLoss | None = None, **options: Any) -> CosineLoss:
    """Return the loss, with another distance and fix if passed, or the contrastive loss with these options."""
    chosen = {name: value for name, value in options.items() if not isinstance(value, Default)}
    if loss is None:
        return ContrastiveLoss(**chosen)
    if not isinstance(loss, CosineLoss):
        wanted = "a loss of contrastive_curvature, a subclass of PairLoss or RowLoss, or None"
        got = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        hint = (
            "For example loss=contrastive_curvature.SupConLoss(0.1). A loss of your own has to be a function of the "
            "cosines: docs/losses.md shows how to write one."
        )
        raise InputTypeError("loss", wanted, got, hint)
    both = [name for name in OF_THE_LOSS if name in chosen]
    if both:
        hint = f"It belongs to the loss: give it to {type(loss).__name__}(...), or leave loss out."
        raise InputError(f"loss, {', '.join(both)}", "one of them", "both", hint)
    return loss.replaced(**chosen)


def output_hessian(
    z: Tensor,
    labels: Tensor | None = None,
    *,
    pairs: Pairs | None = None,
    loss: CosineLoss | None = None,
    distance: Distance | str = DISTANCE,
    pd_fix: PDFix | str = PD_FIX,
    margin: float | None = MARGIN,
    negative_weight: float = NEGATIVE_WEIGHT,
    normalization: Normalization | str = NORMALIZATION,
) -> OutputHessian:
    """Return the Hessian of a loss with respect to raw outputs.

    Args:
        z: Raw outputs, before any l2-normalisation, shape (N, D); half precision becomes float32.
        labels: Integer class labels, shape (N,).
        pairs: Instead of labels: index tuples, masks, or a callable
            (:func:`contrastive_curvature.pairs.make_relation`).
        loss: A loss; ``None`` takes the contrastive loss with ``margin``, ``negative_weight`` and ``normalization``.
        distance: See :class:`~contrastive_curvature.options.Distance`; with a ``loss``, by default its own.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`; with a ``loss``, by default its own.
        margin: See :class:`~contrastive_curvature.ContrastiveLoss`.
        negative_weight: See :class:`~contrastive_curvature.ContrastiveLoss`.
        normalization: See :class:`~contrastive_curvature.ContrastiveLoss`.

    Returns:
        The Hessian. With ``distance="arccos"`` and ``pd_fix="full"`` it is the exact Hessian of the loss.

    Raises:
        InputError: Outputs, labels, pairs or an option are malformed, or the norms of the outputs are so large or small
            that the dtype cannot hold the Hessian.
    """
    chosen = choose_loss(
        loss,
        margin=margin,
        negative_weight=negative_weight,
        normalization=normalization,
        distance=distance,
        pd_fix=pd_fix,
    )
    return chosen.output_hessian(z, labels, pairs=pairs)

"""Warnings of what is legal and rarely meant: labels of one class, a label of -1, a prior that nobody chose."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["DefaultPriorWarning", "LabelRange", "LabelWarning", "advise_on_labels", "advise_on_prior"]


class DefaultPriorWarning(UserWarning):
    """A prediction with the prior precision of an object that was just constructed, 1.0, which suits no encoder."""


class LabelWarning(UserWarning):
    """Labels of a fit are all of one class, or -1 (often "no class"); or those of an evaluation were not in the fit."""


class LabelRange:
    """Smallest and largest class label that a fit has read.

    Attributes:
        low: Smallest label, on the device of the labels; ``None`` before the first one.
        high: Largest label.
    """

    def __init__(self) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def note(self, labels: Tensor | None) -> None:
        """Take note of the labels of a batch; what are no class labels is left alone."""
        if labels is None or labels.is_floating_point() or labels.is_complex() or labels.layout != torch.strided:
            return
        if labels.ndim != 1 or not len(labels):
            return
        # Not every integer dtype has a minimum.
        labels = labels.long()
        low, high = labels.min(), labels.max()
        # Not compared here: the numbers of a GPU would have to be waited for in every batch.
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def joined(self, earlier: LabelRange) -> LabelRange:
        """That of this fit and an earlier one; without labels where one of them has none."""
        out = LabelRange()
        if self.low is not None and earlier.low is not None:
            for fit in (self, earlier):
                for label in (fit.low, fit.high):
                    out.note(None if label is None else label.reshape(1).to(self.low.device))
        return out


def advise_on_labels(seen: LabelRange, everything: LabelRange) -> None:
    """Warn of the labels of a fit; called by ``fit``.

    Args:
        seen: What it has read.
        everything: The same with what the fits that it adds to had read.
    """
    if seen.low is None:
        return
    low = int(seen.low)
    if everything.low is not None and everything.high is not None and int(everything.low) == int(everything.high):
        msg = (
            f"train_loader: all labels are {low}. Points of one class only attract each other, so nothing says which "
            "embeddings must stay apart, and uncertainties are of little use. Yield labels of two classes or more; for "
            "data without labels, yield two views of every input, (view, view), with a loss such as InfoNCELoss."
        )
        warnings.warn(msg, LabelWarning, stacklevel=3)
    elif low == -1:
        msg = (
            "train_loader: some labels are -1, which often means 'no label' or 'noise'. Here it is a class like any "
            "other, whose points belong together. Leave such points out of the loader; if it is a class, give it a "
            "number that is not negative."
        )
        warnings.warn(msg, LabelWarning, stacklevel=3)


def advise_on_prior(la: Any) -> None:
    """Warn once of a prediction with a prior precision that nobody chose; called by ``la(x)`` and by samples of it.

    Args:
        la: A fitted posterior.
    """
    if la._prior_chosen or la._advised_on_prior:
        return
    la._advised_on_prior = True
    msg = (
        "la(x): the prior precision is still 1.0, as before the fit, which suits no encoder: kappa and uncertainty may "
        "be off by orders of magnitude. Call la.optimize_prior_precision() after la.fit(loader), or set "
        "la.prior_precision yourself."
    )
    warnings.warn(msg, DefaultPriorWarning, stacklevel=3)

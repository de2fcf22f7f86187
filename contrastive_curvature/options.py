"""Options of the contrastive curvature: enumerations with the meaning of each value, and checks of numbers.

All uses of the Hessian of a pair loss have the same options, so all their checks are here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError

LARGEST_DISTANCE = 2.0
"""Largest distance of two points on the unit sphere. A margin of this size masks no pair: rounding must not change
that."""

_E = TypeVar("_E", bound=StrEnum)


class Distance(StrEnum):
    """Whether the generalised Gauss-Newton treats the l2-normalisation as loss or as network (paper, appendix F)."""

    ARCCOS = "arccos"
    """Normalisation as part of the loss: its second derivative is kept (appendix F.2)."""

    EUCLIDEAN = "euclidean"
    """Normalisation as part of the network, which is linearised: its second derivative is dropped (appendix F.1)."""


class PDFix(StrEnum):
    """How the indefinite Hessian is changed towards a positive definite one (paper, appendix F.3)."""

    POSITIVE = "positive"
    """Only positive (attracting) pairs; cross terms are kept (Eq. 109; ``pos`` in the authors' code)."""

    FIXED = "fixed"
    """All pairs inside the margin, each with one of its points held fixed, so without cross terms (Eq. 110-112;
    ``fix``)."""

    FULL = "full"
    """All pairs inside the margin; cross terms are kept, and the parameter curvature is clamped (Eq. 108)."""

    PSD = "psd"
    """As ``fixed``, with every point's block projected onto the positive semidefinite matrices. Not in the paper."""

    GGN = "ggn"
    """Only the second derivatives of the loss in the cosines, cross terms among them: the generalised Gauss-Newton of
    a loss of cosines, positive semidefinite for every loss that is convex in them. Not in the paper; refused for losses
    that are piecewise linear in the cosines, where it is zero."""

    GGN_FIXED = "ggn_fixed"
    """As ``ggn``, without cross terms: cheaper, and for every structure and host. Not in the paper."""

    PSD_PARTS = "psd_parts"
    """As ``psd``, with the first-order part of every block projected alone, in closed form, and the second-order part
    added: positive semidefinite for losses that are convex in the cosines, in O(D) a point where ``psd`` decomposes
    matrices. Without second derivatives it is ``psd``. Not in the paper."""

    @property
    def coupled(self) -> bool:
        """Whether the Hessian has cross terms between two points."""
        return self in (PDFix.POSITIVE, PDFix.FULL, PDFix.GGN)

    @property
    def second_only(self) -> bool:
        """Whether the first-order part is left out."""
        return self in (PDFix.GGN, PDFix.GGN_FIXED)

    @property
    def attracting_only(self) -> bool:
        """Whether only the positive pairs enter the first-order part."""
        return self is PDFix.POSITIVE


class Normalization(StrEnum):
    """The number by which a pair's weight is divided."""

    SUM = "sum"
    """One: the loss is a plain sum over unordered pairs (the authors' code)."""

    TYPE = "type"
    """The number of pairs of its type: the weights of all positive pairs sum to one, and so do those of all negative
    pairs (Eq. 23 and 30)."""

    ANCHOR = "anchor"
    """The number of pairs of its type at one of its points, as anchor; a pair gets the mean of the quotients of its two
    points (Eq. 119)."""


_ALIASES = {"pos": "positive", "fix": "fixed"}


def parse_option(kind: type[_E], argument: str, value: str) -> _E:
    """Return the member of an enumeration for a string; for ``PDFix`` also from its name in the authors' code."""
    known_as = _ALIASES if kind is PDFix else {}
    try:
        return kind(known_as.get(value, value))
    except (ValueError, TypeError):
        known = ", ".join(repr(str(member)) for member in kind)
        raise InputError(argument, f"one of {known}", value) from None


class Default:
    """A default value that the library can distinguish from the same value passed by the user."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)


def default(value: object) -> Any:
    """Wrap a default in :class:`Default`, typed as ``Any`` so that it fits an argument of any type."""
    return Default(value)


def check_margin(margin: object) -> float | Tensor | None:
    """Return a margin, if it is a possible distance between unit vectors."""
    wanted = "None (every negative counts) or a number in (0, 2]"
    hint = "It is a threshold on the distance |u_i - u_j| of unit embeddings, which never exceeds 2."
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, (int, float, Tensor)):
        raise InputTypeError("margin", wanted, margin, hint)
    number = validate.hyperparameter("margin", margin) if isinstance(margin, Tensor) else margin
    if not 0 < number <= 2:
        raise InputError("margin", wanted, validate.without_graph(number), hint)
    return number


def check_negative_weight(weight: object) -> float:
    """Return a weight of the negative pairs, if it is in [0, 1] (Eq. 10)."""
    wanted = "a number in [0, 1]"
    hint = "0.5 is unbiased sampling, 0 ignores the negatives (Eq. 10)."
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise InputTypeError("negative_weight", wanted, weight, hint)
    if not 0 <= weight <= 1:
        raise InputError("negative_weight", wanted, weight, hint)
    return float(weight)

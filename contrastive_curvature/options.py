"""The closed options of the contrastive curvature, each with its meaning, and the checks of the open ones.

The Hessian of the pair loss is the same object wherever it is used, so its options are checked once, here.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, TypeVar

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected

__all__ = [
    "LARGEST_DISTANCE",
    "Default",
    "Distance",
    "KFACApprox",
    "Normalization",
    "PDFix",
    "Structure",
    "check_margin",
    "check_negative_weight",
    "default",
    "parse_kfac_approx",
    "parse_option",
]

LARGEST_DISTANCE = 2.0
"""Between two points of the unit sphere. A margin of this size masks nothing, so no rounding may decide about it."""

_E = TypeVar("_E", bound="_Option")


class _Option(StrEnum):
    """A closed set of strings that compare equal to their value."""


class Distance(_Option):
    """Where the l2-normalisation sits, which decides the split of the generalised Gauss-Newton (paper, appendix F)."""

    ARCCOS = "arccos"
    """Inside the loss: the second derivative of the normalisation is kept (appendix F.2)."""

    EUCLIDEAN = "euclidean"
    """Inside the network, which is linearised: its second derivative is dropped (appendix F.1)."""


class PDFix(_Option):
    """How the indefinite Hessian is brought towards positive definiteness (paper, appendix F.3)."""

    POSITIVE = "positive"
    """Only attracting pairs, cross terms kept (Eq. 109; ``pos`` in the authors' code)."""

    FIXED = "fixed"
    """All pairs inside the margin, one point of a pair held fixed: no cross terms (Eq. 110-112; ``fix``)."""

    FULL = "full"
    """All pairs inside the margin, cross terms kept; the parameter curvature is clamped (Eq. 108)."""

    PSD = "psd"
    """``fixed`` with every point's block projected on the positive semidefinite cone (ours): safe in any structure."""

    @property
    def coupled(self) -> bool:
        """Whether the cross terms between two points survive."""
        return self in (PDFix.POSITIVE, PDFix.FULL)

    @property
    def attracting_only(self) -> bool:
        """Whether only the positive pairs enter the first-order part."""
        return self is PDFix.POSITIVE


class Normalization(_Option):
    """What a pair's weight is divided by."""

    SUM = "sum"
    """Nothing: every unordered pair counts once (the authors' code)."""

    TYPE = "type"
    """The number of pairs of its type: positives average to one, negatives too (Eq. 23 and 30)."""

    ANCHOR = "anchor"
    """The number of pairs of its type at each of its two points, averaged over the two: each point's positives sum to
    one, its negatives too (Eq. 119)."""


class Structure(_Option):
    """What is kept of the (P, P) parameter curvature."""

    DIAG = "diag"
    FULL = "full"
    KRON = "kron"


class KFACApprox(_Option):
    """How Kronecker factors treat the two points of a pair (:mod:`contrastive_curvature.ggn.sharing`)."""

    EXPAND = "expand"
    """Each point on its own: the cross terms of coupled fixes are left out."""

    REDUCE = "reduce"
    """The two points are summed first, for coupled fixes: the cross terms enter the curvature factor."""


_ALIASES = {"pos": "positive", "fix": "fixed"}


def parse_option(kind: type[_E], argument: str, value: str) -> _E:
    """Turn a string into a member of ``kind``.

    Args:
        kind: The option's enumeration.
        argument: Name of the argument, for the error message.
        value: A member, its string, or (for ``PDFix``) the name in the authors' code.

    Returns:
        The member.

    Raises:
        InputError: The value is unknown; the message lists the known ones.
    """
    known_as = _ALIASES if kind is PDFix else {}
    try:
        return kind(known_as.get(value, value))
    except (ValueError, TypeError):
        known = ", ".join(repr(str(member)) for member in kind)
        raise InputError(expected(argument, f"one of {known}", value)) from None


class Default:
    """A default that can be told from the same value given by the user.

    Args:
        value: The default.
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)


def default(value: object) -> Any:
    """A default of an argument of any type, see :class:`Default`."""
    return Default(value)


def check_margin(margin: object) -> None:
    """Refuse a margin that no distance between unit vectors can cross.

    Raises:
        InputTypeError: Not a number.
        InputError: Outside (0, 2].
    """
    wanted = "None (every negative counts) or a number in (0, 2]"
    hint = "It is a threshold on the distance |u_i - u_j| of unit embeddings, which never exceeds 2."
    if margin is None:
        return
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise InputTypeError(expected("margin", wanted, margin, hint))
    if not (math.isfinite(margin) and 0 < margin <= 2):
        raise InputError(expected("margin", wanted, margin, hint))


def check_negative_weight(weight: object) -> None:
    """Refuse a bias correction outside [0, 1] (Eq. 10).

    Raises:
        InputTypeError: Not a number.
        InputError: Outside [0, 1].
    """
    wanted = "a number in [0, 1]"
    hint = "0.5 is unbiased sampling, 0 ignores the negatives (Eq. 10)."
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise InputTypeError(expected("negative_weight", wanted, weight, hint))
    if not 0 <= weight <= 1:
        raise InputError(expected("negative_weight", wanted, weight, hint))


def parse_kfac_approx(
    value: KFACApprox | str, pd_fix: PDFix, structure: Structure | None = Structure.KRON, pairs: str = "batch"
) -> KFACApprox:
    """Turn a string into a member, and refuse an approximation of cross terms where it has no meaning.

    Args:
        value: The approximation.
        pd_fix: The fix.
        structure: What is asked for; ``None`` for another structure than those of :class:`Structure`.
        pairs: ``"batch"``, or ``"dataset"``, whose points are never there at once.

    Returns:
        The member.

    Raises:
        UnsupportedError: The fix drops the cross terms, or the points are not there at once.
        InputError: It is unknown, or the structure has no Kronecker factors.
    """
    approx = parse_option(KFACApprox, "kfac_approx", value)
    if approx is KFACApprox.EXPAND:
        return approx
    if structure is not Structure.KRON:
        hint = "It approximates Kronecker factors. Use structure='kron', or leave it out."
        raise InputError(expected("kfac_approx", "'expand' with a structure other than 'kron'", str(approx), hint))
    if not pd_fix.coupled:
        msg = (
            f"kfac_approx={str(approx)!r} with pd_fix={str(pd_fix)!r}: this fix drops the cross terms between the two "
            "points of a pair, so there is nothing to share. Use kfac_approx='expand', or pd_fix='positive' or 'full'."
        )
        raise UnsupportedError(msg)
    if pairs == "dataset":
        msg = (
            f"kfac_approx={str(approx)!r}: over the pairs of a data set its factors need all points at once. Use "
            "pairs='batch', or kfac_approx='expand'."
        )
        raise UnsupportedError(msg)
    return approx

"""Shared parts of the thresholds: fitted attributes, a check of the sign of scores, the interval of a rate."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError, NotFittedError

_SURE = 3.1
"""Standard deviations below one half at which an AUROC counts as reversed: by chance in one case of a thousand."""


class FittedAttributes:
    """Base of objects whose annotated attributes exist only after ``fit``."""

    def __getattr__(self, name: str) -> Any:
        kind = type(self)
        if name in kind.__annotations__:
            raise NotFittedError(f"{kind.__name__}.{name}: expected a fit before it is used. Call fit(...).")
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


def refuse_reversed(argument: str, lower: NDArray[np.float64], higher: NDArray[np.float64], meaning: str) -> None:
    """Refuse scores with the wrong sign: by their labels, the higher scores are significantly lower.

    Args:
        argument: Name of the scores.
        lower: Scores that should be lower.
        higher: Scores that should be higher.
        meaning: Meaning of a higher score.
    """
    if not len(lower) or not len(higher):
        return
    ordered = np.sort(lower)
    below, upto = (np.searchsorted(ordered, higher, side=side).mean() for side in ("left", "right"))
    auroc = (below + upto) / (2 * len(lower))
    if auroc < 0.5 - _SURE * math.sqrt((len(lower) + len(higher) + 1) / (12 * len(lower) * len(higher))):
        got = f"the reverse (AUROC {auroc:.2f})"
        raise InputError(argument, f"a score that is {meaning}", got, "Negate it: pass -score.")


def one_of_each(groups: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the place of one member of each group, drawn at random, ascending."""
    places = {groups[k]: k for k in np.random.default_rng(0).permutation(len(groups)).tolist()}
    return np.sort(np.array(list(places.values()), dtype=np.int64))


def clopper_pearson(errors: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact binomial interval of a rate; the counts need not be whole numbers.

    Source: Clopper and Pearson (1934).
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(errors, trials - errors + 1, tail)) if errors > 0 else 0.0
    high = float(betaincinv(errors + 1, trials - errors, 1 - tail)) if errors < trials else 1.0
    return low, high


def percent(share: float) -> str:
    """Return a share in percent with three digits."""
    return f"{100 * share:.3g} %"

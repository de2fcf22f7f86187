"""Is an input of the kind that the encoder knows? One statistic of an embedding, and its conformal p-value.

:func:`components` and :func:`combine` alone decide what the statistic is; everything else holds for any statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected

if TYPE_CHECKING:
    from contrastive_curvature.embedding.distribution import EmbeddingDistribution

_WITH_FEATURES = ("log V/|phi|", "log V/|phi|^2", "-log n")
_WITHOUT = ("log V", "log V/n^2", "-log n")
"""Names of the components."""

NOVELTY, UNCERTAINTY = "novelty", "uncertainty"
"""Scores that p-values can be of by their name."""

BELOW = 0.5
"""Weight of the first component below its median, relative to that above. Measured: ``docs/defaults.md``."""

ROUNDING = 3e-5
"""How far the components of one input may lie apart, in float32: products of matrices round differently in batches of
another size."""

_LEAST_SPREAD = 1e-3
"""Smallest scale of a component. They are logarithms: smaller differences are of rounding, and must not decide."""

_SHARE_FOR_SCALE = 3
"""One in so many known inputs standardises the components, where no other inputs are at hand."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_TINY, _HUGE = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max


class OptimisticPValueWarning(UserWarning):
    """A p-value is relative to inputs that the encoder was trained on, so it is too small for other known inputs."""


def statistic_name(with_features: bool, score: str = NOVELTY) -> str:
    """Return the name of the statistic.

    Saved calibrations carry it, so it must change whenever the score does, such as :func:`components` or
    :func:`combine`.
    """
    if score != NOVELTY:
        return score
    names = _WITH_FEATURES if with_features else _WITHOUT
    return f"soft maximum of standardised {', '.join(names)} and minus half the first"


def components(embedding: EmbeddingDistribution, feature_norm: Tensor | None = None) -> Tensor:
    """Return K numbers for every embedding, each larger for inputs less like the known ones.

    With the tangential variance ``V = tr(P Cov P)`` of the raw outputs in their own units, the norm ``n`` of their mean
    and the norm ``|phi|`` of the features: the logarithms of ``V / |phi|``, ``V / |phi|^2`` and ``1 / n``, and without
    features those of ``V``, ``V / n^2`` and ``1 / n``. The first sees inputs with large features in unusual directions
    (strong noise), ``V / |phi|^2`` unusual directions alone (another kind of image), ``1 / n`` inputs that the encoder
    sees little in (blur, little contrast): no single one of them sees all. :func:`combine` takes the first on both
    sides: an input may have less variance than all known ones, too (strong blur).

    A ``V`` below the rounding of ``tr Cov`` counts as that rounding, and what is zero even then counts as the smallest
    normal number of float64: zero variances, outputs and features give finite components.

    The norms of the features, of shape (B,), are those of the inputs of the last layer. The result has the shape
    (B, 3), float64.
    """
    with torch.no_grad():
        _, norm, total, radial, *_ = embedding.polar()
        rounding = embedding.raw_mean.shape[1] * torch.finfo(embedding.raw_mean.dtype).eps
        spread = torch.maximum(total - radial, rounding * total)
        sizes = torch.stack([spread, norm, norm if feature_norm is None else feature_norm.double()], dim=1)
        spread, norm, features = sizes.clamp(min=_TINY, max=_HUGE).log().unbind(1)
        first = spread if feature_norm is None else spread - features
        return torch.stack([first, torch.sub(spread, features, alpha=2), -norm], dim=1)


def combine(standardised: Tensor) -> Tensor:
    """Return the statistic (B,) of components (B, K): ``log(sum_k exp(2 z_k) + exp(-z_1)) / 2``, a soft maximum.

    One unusual component is enough. The last term is the first component on its other side, ``-z_1``, with half its
    weight: inputs with too little variance are rarer than those with too much, and known inputs are not symmetric
    around their median.
    """
    below = -BELOW * standardised[:, :1]
    return torch.logsumexp(2 * torch.cat([standardised, below], dim=1), dim=1) / 2


@dataclass(frozen=True)
class Reference:
    """Known inputs that others are compared with.

    Attributes:
        location: Medians of the components, shape (K,). Location and scale must not depend on which of the known inputs
            are compared with.
        scale: Spreads of the components, positive, shape (K,).
        statistics: Scores of n known inputs, ascending, by class where there are counts; shape (n,).
        counts: How many of them are of each predicted class, in the order of the centres; ``None``: all are compared
            with.
        score: Name of the score.
    """

    location: Tensor
    scale: Tensor
    statistics: Tensor
    counts: Tensor | None = None
    score: str = NOVELTY

    @classmethod
    def of(
        cls,
        for_scale: Tensor,
        known: Tensor,
        classes: Tensor | None = None,
        n_classes: int = 1,
        scores: Tensor | None = None,
        name: str = NOVELTY,
    ) -> Reference:
        """Return the reference of components (n, K) of known inputs, standardised with those of others, (m, K).

        The scale is the median absolute deviation; where that is zero, the standard deviation. The predicted
        ``classes`` have the shape (n,), as have ``scores`` of another ``name`` than the novelty.
        """
        location = for_scale.median(0).values
        apart = (for_scale - location).abs()
        robust = _NORMAL * apart.median(0).values
        scale = torch.where(robust < _LEAST_SPREAD, apart.square().mean(0).sqrt(), robust).clamp(min=_LEAST_SPREAD)
        scores = combine((known - location) / scale) if scores is None else scores
        statistics, order = scores.sort()
        counts = None
        if classes is not None:
            classes = classes[order]
            statistics = statistics[classes.argsort(stable=True)]
            counts = classes.bincount(minlength=n_classes)
        return cls(location, scale, statistics, counts, name)

    @cached_property
    def rounding(self) -> float:
        """How far apart scores may lie that count as equal."""
        if self.score == NOVELTY:
            return ROUNDING / float(self.scale.min())
        return ROUNDING * float(self.statistics.abs().median())

    @property
    def fewest(self) -> int:
        """Number of inputs that a p-value compares with; where it depends on the class, the smallest one."""
        return len(self.statistics) if self.counts is None else int(self.counts.min())

    def novelty(self, values: Tensor) -> Tensor:
        """Return the novelty (B,) of components (B, K)."""
        return combine((values.to(self.location.device) - self.location) / self.scale).to(values.device)

    def p_value(self, scores: Tensor, classes: Tensor | None = None) -> Tensor:
        """Return conformal p-values ``(1 + #{known >= s}) / (n + 1)`` of scores (B,); float64, shape (B,).

        With ``counts``, the known inputs are those of the same predicted class, an index of shape (B,). Equal up to
        rounding counts as equal, or known inputs that repeat would be flagged all together, by chance.
        """
        least = scores.to(self.statistics.device) - self.rounding
        if self.counts is None or classes is None:
            n: int | Tensor = len(self.statistics)
            below = torch.searchsorted(self.statistics, least)
        else:
            classes = classes.to(self.statistics.device)
            n, below = self.counts[classes], torch.zeros_like(classes)
            of_class = self.statistics.split(self.counts.tolist())
            for one in classes.unique().tolist():
                below[classes == one] = torch.searchsorted(of_class[one], least[classes == one])
        return ((n + 1 - below).double() / (n + 1)).to(scores.device)


def split(known: Tensor) -> tuple[Tensor, Tensor]:
    """Return two parts of components (n, K) of known inputs: a third to standardise with, the others to compare with.

    The permutation depends on n alone, so that the others stay exchangeable with new inputs.
    """
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0)).to(known.device)
    first = _for_scale(len(known))
    return known[order[:first]], known[order[first:]]


def check_alpha(alpha: object, n: int | None = None, splits: bool = False, by_class: bool = False) -> float:
    """Return the share of known inputs that may be flagged, in (0, 1), if ``n`` of them can give so small a p-value.

    ``splits`` says whether :func:`split` would take some of further ones away; ``by_class``, whether ``n`` is of the
    class with the fewest.
    """
    share = validate.fraction("alpha", alpha)
    if n is not None and share < 1 / (n + 1):
        of_class = " of the class with the fewest" if by_class else ""
        wanted = f"at least {1 / (n + 1):.2g}, the smallest p-value that {n} known inputs{of_class} give"
        given = f"{points_needed(share, splits):,} inputs{' of each predicted class' if by_class else ''}"
        hint = f"Call la.calibrate with at least {given}, or use a larger alpha."
        raise InputError(expected("alpha", wanted, alpha, hint))
    return share


def points_needed(alpha: float, splits: bool = False) -> int:
    """Return how many known inputs give a p-value of at most ``alpha``: ``1 / (n + 1)`` of n to compare with."""
    n = max(1, math.ceil(1 / alpha) - 2)
    while 1 / (n + 1) > alpha:
        n += 1
    given = n
    while splits and given - _for_scale(given) < n:
        given += 1
    return given


def _for_scale(n: int) -> int:
    return max(1, n // _SHARE_FOR_SCALE)

"""Is an input of the kind that the encoder knows? One statistic of an embedding, and its conformal p-value.

:func:`components` and :func:`combine` alone decide what the statistic is; everything else holds for any statistic.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.spread import taken
from contrastive_curvature.errors import InputError, NotFittedError
from contrastive_curvature.pairs.rows import Rows, content_numbers, point_keys

if TYPE_CHECKING:
    from contrastive_curvature.embedding.distribution import EmbeddingDistribution
    from contrastive_curvature.embedding.score import Score

_WITH_FEATURES = ("log V/|phi| (both tails)", "log V/|phi|^2", "-log n")
_WITHOUT = ("log V (both tails)", "log V/n^2", "-log n")
_OF_TRAINING = ("log Mahalanobis distance of outputs", "relative Mahalanobis distance of features")
"""Names of the components."""

NOVELTY, UNCERTAINTY = "novelty", "uncertainty"
"""Scores that p-values can be of by their name."""

ROUNDING = 3e-5
"""How far the components of one input may lie apart, in float32: products of matrices round differently in batches of
another size."""

_LARGEST_TIE = 1e-3
"""How far apart scores of another name may lie that count as equal, over their mean distance from the median."""

_LEAST_SPREAD = 1e-3
"""Smallest scale of a component. They are logarithms, or distances over their number of dimensions: smaller differences
are of rounding, and must not decide."""

_AXES = 64
"""Axes of a covariance of features or outputs; beyond them it is isotropic."""

_FOLDS = 5
"""Parts of the training sample whose distances to the others are taken."""

_SPARE, _STEPS = 16, 3
"""Further axes, and steps, of the subspace iteration."""

_EPS = torch.finfo(torch.float32).eps

_SHARE_FOR_SCALE = 3
"""One in so many known inputs standardises the components, where no other inputs are at hand."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_CACHED = 2**17
"""Features that are converted at once."""

_AT_ONCE = 256
"""Training inputs of one prediction: a covariance for each of them has D^2 numbers."""

_TINY, _HUGE = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max


class OptimisticPValueWarning(UserWarning):
    """A p-value is relative to inputs that the encoder was trained on, so it is too small for other known inputs."""


def statistic_name(with_features: bool, score: str = NOVELTY, n_distances: int = 0) -> str:
    """Return the name of the statistic, with so many distances to training inputs.

    Saved calibrations carry it, so it must change whenever the score does, such as :func:`components` or
    :func:`combine`.
    """
    if score != NOVELTY:
        return score
    names = (*(_WITH_FEATURES if with_features else _WITHOUT), *_OF_TRAINING[:n_distances])
    return f"Fisher's combination of standardised {', '.join(names)}"


def components(embedding: EmbeddingDistribution, feature_norm: Tensor | None = None) -> Tensor:
    """Return three numbers for every embedding, each larger for inputs less like the known ones.

    With the tangential variance ``V = tr(P Cov P)`` of the raw outputs in their own units, the norm ``n`` of their mean
    and the norm ``|phi|`` of the features: the logarithms of ``V / |phi|``, ``V / |phi|^2`` and ``1 / n``, and without
    features those of ``V``, ``V / n^2`` and ``1 / n``. The first sees inputs with large features in unusual directions
    (strong noise), ``V / |phi|^2`` unusual directions alone (another kind of image), ``1 / n`` inputs that the encoder
    sees little in (blur, little contrast): no single one sees all. :class:`TrainingGaussians` gives further ones.

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


def feature_norms(phi: Tensor) -> Tensor:
    """Return the norms (B,) of features, float64."""
    # In chunks that stay in the cache; the conversion within vector_norm is several times slower.
    chunks = phi.split(max(1, _CACHED // max(1, phi.shape[1])))
    return torch.cat([torch.linalg.vector_norm(rows.double(), dim=1) for rows in chunks])


def measure(embedding: EmbeddingDistribution, phi: Tensor | None, gaussians: TrainingGaussians | None) -> Tensor:
    """Return all components (B, K) of embeddings: those of features (B, F) and of distances where these are known."""
    if phi is None:
        return components(embedding)
    values = components(embedding, feature_norms(phi))
    return values if gaussians is None else torch.cat([values, gaussians(phi, embedding.raw_mean.detach())], dim=1)


def combine(standardised: Tensor) -> Tensor:
    """Return the statistic (B,) of components (B, K), ``sqrt(2 s)`` of ``s = sum_k -log(1 - Phi(z_k)) - log Phi(z_1)``.

    Each term is the logarithm of the p-value that the component would have if it were normally distributed, so ``s``
    combines them as Fisher did. Both tails of the first count, for an input may also have too little variance; of the
    others, what is far below its median counts nothing. The root makes it a distance in standard deviations, about
    ``z`` where one component is far out, whose rounding is that of the components.

    Source: R. A. Fisher, *Statistical Methods for Research Workers*, 4th ed., 1932, section 21.1.
    """
    tails = torch.cat([standardised, -standardised[:, :1]], dim=1)
    return (-2 * torch.special.log_ndtr(-tails).sum(1)).sqrt()


@dataclass(frozen=True)
class TrainingGaussians:
    """Distances to training inputs under Gaussians that were fitted to a sample of them.

    With the squared distance ``d(x, m; S) = (x - m)^T S^-1 (x - m)``, the first is the logarithm of ``d(z, m; S)`` of
    raw outputs ``z``. The second, where classes are known, is the relative distance of the features on the unit sphere,
    ``u = phi / |phi|``, per dimension: ``(min_c d(u, m_c; Sw) - d(u, m; St)) / F``, with means ``m_c`` of the classes
    and ``m`` of all, and covariances ``Sw`` within classes and ``St`` in total. Directions in which the inputs of one
    class differ as much as those of different classes cancel. Since ``|u| = 1``, it equals
    ``(u B)^2 . s + min_c (u . a_c + k_c)``, which is what is stored.

    Source: Ren et al., "A simple fix to Mahalanobis distance for improving near-OOD detection", 2021
    (arXiv 2106.09022), for the second.

    Attributes:
        centre: Mean of the outputs, shape (D,), like all others float64.
        axes: Axes of ``S``, shape (D, Q).
        inside: Inverse variances along them, less ``outside``, shape (Q,).
        outside: Inverse variance in all other directions, shape ().
        basis: ``B``, shape (F, R); ``None`` without classes, as are all that follow.
        weights: ``s``, shape (R,).
        slopes: ``a_c``, shape (C, F).
        offsets: ``k_c``, shape (C,).
    """

    centre: Tensor
    axes: Tensor
    inside: Tensor
    outside: Tensor
    basis: Tensor | None = None
    weights: Tensor | None = None
    slopes: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, features: Tensor, outputs: Tensor, classes: Tensor | None = None) -> TrainingGaussians:
        """Return the Gaussians of features (n, F), outputs (n, D) and, if known, classes (n,)."""
        wide = outputs.double()
        centre = wide.mean(0)
        spread = _Precision.of(wide - centre, float(wide.square().sum(1).mean().sqrt()))
        of_outputs = cls(centre, spread.basis, spread.weights, wide.new_tensor(spread.rest))
        return of_outputs if classes is None else of_outputs._with_classes(features, classes)

    def _with_classes(self, features: Tensor, classes: Tensor) -> TrainingGaussians:
        """Return the same with the classes, if two of them have two inputs each.

        A class of one input says nothing about the spread in classes, and is no class to be near to.
        """
        u = _units(features)
        _, index, counts = classes.unique(return_inverse=True, return_counts=True)
        several, counts = counts > 1, counts.double()
        if int(several.sum()) < 2:
            return self
        means = u.new_zeros(len(counts), u.shape[1]).index_add_(0, index, u) / counts.unsqueeze(1)
        # The mean of a class is nearer to its inputs than to others.
        left = (u - means[index]) * (counts / (counts - 1)).sqrt()[index].unsqueeze(1)
        centre, means, width = u.mean(0), means[several], u.shape[1]
        within, total = _Precision.of(left[several[index]]), _Precision.of(u - centre)
        near, far = within(means), total(centre.unsqueeze(0))
        return replace(
            self,
            basis=torch.cat([within.basis, total.basis], dim=1),
            weights=torch.cat([within.weights, -total.weights]) / width,
            slopes=2 * (far - near) / width,
            offsets=((near * means).sum(1) - far[0] @ centre + within.rest - total.rest) / width,
        )

    @property
    def n_distances(self) -> int:
        """Number of distances."""
        return 1 if self.basis is None else 2

    def __call__(self, features: Tensor, outputs: Tensor) -> Tensor:
        """Return the distances (B, 1) or (B, 2) of features (B, F) and outputs (B, D), float64."""
        apart = outputs.to(self.centre) - self.centre
        squared = (apart @ self.axes).square() @ self.inside + self.outside * apart.square().sum(1)
        distances = [squared.clamp(min=_TINY, max=_HUGE).log()]
        if self.basis is not None:
            u = _units(features.to(self.basis.device))
            nearest = (u @ self.slopes.T + self.offsets).amin(1)  # type: ignore[union-attr, operator]
            distances.append((u @ self.basis).square() @ self.weights + nearest)  # type: ignore[operator]
        return torch.stack(distances, dim=1).to(features.device)


def held_out_distances(features: Tensor, outputs: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return the distances of each fifth of the inputs under the Gaussians of the others, shape (n, 1) or (n, 2).

    Inputs lie nearer to Gaussians that were fitted to them than other inputs of the same kind. Where the others have
    too few inputs of each class, the second distance is that under the Gaussians of all.
    """
    distances = TrainingGaussians.of(features, outputs, classes)(features, outputs)
    # By what the inputs are, so that their order does not count. The sample itself was drawn with the first seed.
    order = point_keys(content_numbers(outputs), seed=1).argsort(stable=True).to(features.device)
    folds = order.chunk(_FOLDS)
    for number, fold in enumerate(folds):
        rest = torch.cat([*folds[:number], *folds[number + 1 :]])
        gaussians = TrainingGaussians.of(features[rest], outputs[rest], None if classes is None else classes[rest])
        distances[fold, : gaussians.n_distances] = gaussians(features[fold], outputs[fold])
    return distances


@dataclass(frozen=True)
class _Precision:
    """Inverse of a covariance: ``basis diag(weights) basis^T + rest I``."""

    basis: Tensor
    weights: Tensor
    rest: float

    @classmethod
    def of(cls, rows: Tensor, length: float = 1.0) -> _Precision:
        """Return that of centred rows (n, F): the leading axes and an isotropic rest.

        ``length`` is that of the vectors before they were centred.
        """
        n, width = rows.shape
        # Half as many axes as rows: the smallest eigenvalues of so few rows are noise.
        rank = min(width, _AXES, max(1, n // 2))
        axes = torch.randn(width, min(width, rank + _SPARE), generator=torch.Generator().manual_seed(0)).to(rows)
        for _ in range(_STEPS):
            axes = torch.linalg.qr(rows.T @ (rows @ axes)).Q
        inside = rows @ axes
        values, vectors = torch.linalg.eigh(inside.T @ inside / n)
        values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
        # So that the rounding of float32 vectors moves no distance by more than ROUNDING.
        least = (2 * _EPS * max(length, _TINY**0.25) / (ROUNDING * width)) ** 2
        rest = (float(rows.square().sum()) / n - float(values.sum())) / max(1, width - rank)
        rest = 1 / max(rest, least) if rank < width else 0.0
        return cls(axes @ vectors, 1 / values.clamp(min=least) - rest, rest)

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows @ self.basis * self.weights) @ self.basis.T + self.rest * rows


def _units(features: Tensor) -> Tensor:
    """Return features (B, F) divided by their norms, float64; zero remains zero."""
    wide = features.double()
    return wide / wide.norm(dim=1, keepdim=True).clamp(min=_TINY)


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
        # The size alone would be all that tells inputs apart where a score has a large offset.
        spread = float((self.statistics - self.statistics.median()).abs().mean())
        return min(ROUNDING * float(self.statistics.abs().median()), _LARGEST_TIE * spread)

    def equals(self, other: Reference) -> bool:
        """Return whether the known inputs are the same, perhaps on another device."""
        if self is other:
            return True
        same = self.score == other.score and (self.counts is None) == (other.counts is None)
        names = ("location", "scale", "statistics", *(() if self.counts is None else ("counts",)))
        return same and all(torch.equal(getattr(self, name).cpu(), getattr(other, name).cpu()) for name in names)

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
            return conformal(self.statistics, least).to(scores.device)
        classes = classes.to(self.statistics.device)
        values, of_class = torch.empty_like(least, dtype=torch.float64), self.statistics.split(self.counts.tolist())
        for one in classes.unique().tolist():
            values[classes == one] = conformal(of_class[one], least[classes == one])
        return values.to(scores.device)


def conformal(known: Tensor, least: Tensor) -> Tensor:
    """Return ``(1 + #{known >= least}) / (n + 1)`` of known scores, ascending, (n,); float64, shape (B,)."""
    n = len(known)
    below = torch.searchsorted(known, least)
    return (n + 1 - below).double() / (n + 1)


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
        needed = f"{points_needed(share, splits):,} inputs{' of each predicted class' if by_class else ''}"
        hint = f"Call la.calibrate with at least {needed}, or use a larger alpha."
        raise InputError("alpha", wanted, alpha, hint)
    return share


def points_needed(alpha: float, splits: bool = False) -> int:
    """Return how many known inputs give a p-value of at most ``alpha``: ``1 / (n + 1)`` of n to compare with."""
    first = max(1, math.ceil(1 / alpha) - 2)
    return next(n for n in itertools.count(first) if 1 / (n - splits * _for_scale(n) + 1) <= alpha)


def _for_scale(n: int) -> int:
    return max(1, n // _SHARE_FOR_SCALE)


@dataclass(frozen=True)
class Calibration:
    """Known inputs that others are compared with.

    Attributes:
        reference: Their scores.
        fingerprint: Of the posterior that they belong to, shape (9,).
        score: What the score is.
        gaussians: Of training inputs, where there was a sample of them.
    """

    reference: Reference
    fingerprint: Tensor
    score: Score
    gaussians: TrainingGaussians | None = None


@dataclass(frozen=True)
class TrainingSample:
    """Features of some training inputs, with their classes, if any, their outputs, and a fingerprint of the encoder."""

    features: Rows
    outputs: Tensor
    encoder: Tensor

    @cached_property
    def gaussians(self) -> TrainingGaussians:
        """Their Gaussians; made when first asked for."""
        return TrainingGaussians.of(*self._numbers())

    @cached_property
    def held_out(self) -> Tensor:
        """Their distances under Gaussians of others, shape (m, 1) or (m, 2); made when first asked for."""
        return held_out_distances(*self._numbers())

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = self.features.columns
        return columns["features"], self.outputs, columns.get("classes")


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """Training inputs under one state of a posterior, which its predictions share; computed when first asked for.

    Attributes:
        sample: The inputs.
        predict: From outputs (B, D) and features (B, F) to the prediction in that state.
    """

    sample: TrainingSample
    predict: Callable[[Tensor, Tensor], EmbeddingDistribution]

    @cached_property
    def values(self) -> Tensor:
        """Their components (m, K)."""
        batches = zip(
            self.sample.features.columns["features"].split(_AT_ONCE), self.sample.outputs.split(_AT_ONCE), strict=True
        )
        with torch.no_grad():
            parts = [measure(self.predict(z, phi), phi, self.sample.gaussians) for phi, z in batches]
        return torch.cat(parts)

    @cached_property
    def scale(self) -> Reference:
        """What standardises components; its own statistics are too small, because the Gaussians know these inputs."""
        return Reference.of(self.values, self.values)

    @cached_property
    def reference(self) -> Reference:
        """The reference with distances under Gaussians of other inputs."""
        compared = torch.cat([self.values[:, :3], self.sample.held_out.to(self.values)], dim=1)
        return Reference.of(self.values, compared)


@dataclass(frozen=True, eq=False)
class Known:
    """What a prediction knows of known inputs, as of the time when it was made; it holds no posterior.

    Attributes:
        reference: Calibration inputs; ``None`` where training inputs take their place, or there are none.
        gaussians: Of training inputs, where the calibration has them.
        score: What p-values are of; ``None`` for the novelty.
        training: Training inputs, where there is no calibration.
        refusal: Why there are no p-values; without a reference and training inputs there is no novelty either.
        names: Of what can be asked without a warning.
        optimism: Warning of the first p-value that is compared with training inputs, shared by all predictions.
        splits: Whether a calibration would standardise with a part of its inputs.
        features: Features of the embeddings, shape (B, F), until nothing depends on them any more.
        values: Components (B, K) of the embeddings, once they are asked for.
        scores: What p-values are of, once they are asked for, shape (B,).
        classes: Predicted classes (B,) as floating-point numbers, where p-values are by class.
    """

    reference: Reference | None = None
    gaussians: TrainingGaussians | None = None
    score: Score | None = None
    training: TrainingInputs | None = None
    refusal: str | None = None
    names: tuple[str, ...] = ()
    optimism: list[str] = field(default_factory=list)
    splits: bool = False
    features: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    classes: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compare with."""
        return self.reference is None and self.training is None

    @property
    def compared(self) -> Reference | None:
        """The known inputs that p-values are relative to."""
        return self.reference if self.training is None else self.training.reference

    def measured(self, embedding: EmbeddingDistribution) -> Known:
        """Return the same with the components of the embedding."""
        if self.empty:
            raise NotFittedError(str(self.refusal))
        if self.values is not None:
            return self
        gaussians = self.gaussians if self.training is None else self.training.sample.gaussians
        return replace(self, values=measure(embedding, self.features, gaussians))

    def scored(self, embedding: EmbeddingDistribution) -> Known:
        """Return the same with what p-values are of."""
        if self.refusal is not None:
            raise NotFittedError(self.refusal)
        if self.scores is not None:
            return self
        score, known = self.score, self
        if score is not None:
            score.check(embedding)
        if score is None or score.name == NOVELTY:
            known = self.measured(embedding)
            scores = known.novelty()
        else:
            scores = score.of(embedding)
        return replace(known, scores=scores, classes=None if score is None else score.classes(embedding))

    def fixed(self, embedding: EmbeddingDistribution) -> Known:
        """Return the same with all numbers, so that the embedding may be rounded or saved."""
        known = self if self.empty else self.measured(embedding)
        try:
            known = known.scored(embedding)
        except NotFittedError as error:
            known = replace(known, refusal=str(error))
        return replace(known, features=None)

    def plain(self) -> Known:
        """Return what a file may hold of :meth:`fixed`: no features of training inputs, no function."""
        numbers: dict[str, Any] = {"reference": self.compared, "optimism": list(self.optimism)}
        return replace(self, **numbers, gaussians=None, score=None, training=None)

    def novelty(self) -> Tensor:
        """Return the novelty (B,), once the embedding is measured."""
        scale = self.reference if self.training is None else self.training.scale
        assert scale is not None
        assert self.values is not None
        return scale.novelty(self.values)

    def p_value(self) -> Tensor:
        """Return the p-values (B,), once the embedding is scored."""
        while self.optimism:
            warnings.warn(self.optimism.pop(), OptimisticPValueWarning, stacklevel=4)
        reference, scores = self.compared, self.scores
        assert reference is not None
        assert scores is not None
        return reference.p_value(scores, None if self.classes is None else self.classes.long())

    def check_alpha(self, alpha: float) -> None:
        """Refuse a share that is smaller than all p-values."""
        reference = self.compared
        assert reference is not None
        splits = self.splits and reference.score == NOVELTY
        check_alpha(alpha, reference.fewest, splits, reference.counts is not None)

    def of_rows(self, rows: Tensor) -> Known:
        """Return what is known of some of the embeddings; -1 is a row of NaN."""
        return self._each(lambda value: taken(value, rows.to(value.device)))

    def to(self, device: torch.device) -> Known:
        """Return the same on the device of the embedding."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Known:
        numbers: dict[str, Any] = {name: getattr(self, name) for name in ("features", "values", "scores", "classes")}
        numbers = {name: change(value) for name, value in numbers.items() if value is not None}
        return replace(self, **numbers)

    @classmethod
    def joined(cls, parts: Sequence[Known | None]) -> Known | None:
        """Return what a concatenation knows, of parts that are measured; ``None`` where they know different things."""
        first, known = parts[0], [part for part in parts if part is not None]
        if first is None or len(known) < len(parts) or not all(first._agrees(part) for part in known):
            return None

        def together(name: str) -> Any:
            values = [getattr(part, name) for part in known]
            return None if any(value is None for value in values) else torch.cat(values)

        refusal = next((part.refusal for part in known if part.refusal is not None), None)
        # Not the features of all parts, which may be of a whole data set.
        numbers: dict[str, Any] = {name: together(name) for name in ("values", "scores", "classes")}
        return replace(first, refusal=refusal, features=None, **numbers)

    def _agrees(self, other: Known) -> bool:
        """Return whether both compare with the same inputs, perhaps of two files."""
        if self.training is not other.training:
            return False
        if self.reference is None or other.reference is None:
            return self.reference is other.reference and self.refusal == other.refusal
        return self.reference.equals(other.reference)

"""Does the encoder know this kind of input? One statistic of an embedding, and its conformal p-value.

Only :func:`components` and :func:`combine` define the statistic; the rest works for any statistic.
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

_AT_ONCE = 256
"""Training inputs of one prediction: a covariance for each of them has D^2 numbers."""

_TINY, _HUGE = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max


class OptimisticPValueWarning(UserWarning):
    """A p-value is relative to inputs that the encoder was trained on, so it is too small for other known inputs."""


def statistic_name(with_features: bool, score: str = NOVELTY, n_distances: int = 0) -> str:
    """Return the name of the statistic with ``n_distances`` distances to training inputs.

    Saved calibrations carry the name, so it must change whenever :func:`components` or :func:`combine` changes.
    """
    if score != NOVELTY:
        return score
    names = (*(_WITH_FEATURES if with_features else _WITHOUT), *_OF_TRAINING[:n_distances])
    return f"Fisher's combination of standardised {', '.join(names)}"


def components(embedding: EmbeddingDistribution, feature_norm: Tensor | None = None) -> Tensor:
    """Return three numbers for every embedding, each larger for inputs less like the known ones.

    The numbers are the logarithms of ``V / |phi|``, ``V / |phi|^2`` and ``1 / n``, or without features of ``V``,
    ``V / n^2`` and ``1 / n``. ``V = tr(P Cov P)`` is the tangential variance of the raw outputs in their own units,
    ``n`` the norm of their mean and ``|phi|`` the norm of the features. ``V / |phi|`` is large for large features in
    unusual directions (strong noise), ``V / |phi|^2`` for unusual directions alone (another kind of image), and
    ``1 / n`` for inputs in which the encoder sees little (blur, little contrast); no single number detects all three.
    :class:`TrainingGaussians` adds more components.

    A ``V`` below the rounding of ``tr Cov`` is replaced by that rounding, and a zero by the smallest normal number of
    float64, so zero variances, outputs and features give finite components.

    ``feature_norm``, shape (B,), holds the norms of the inputs of the last layer. The result has the shape (B, 3),
    float64.
    """
    with torch.no_grad():
        _, norm, total, radial, *_ = embedding.polar()
        rounding = embedding.raw_mean.shape[1] * torch.finfo(embedding.raw_mean.dtype).eps
        spread = torch.maximum(total - radial, rounding * total)
        sizes = torch.stack([spread, norm, norm if feature_norm is None else feature_norm.double()], dim=1)
        spread, norm, features = sizes.clamp(min=_TINY, max=_HUGE).log().unbind(1)
        first = spread if feature_norm is None else spread - features
        return torch.stack([first, torch.sub(spread, features, alpha=2), -norm], dim=1)


def unit_features(phi: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (B, F) divided by their norms, and the norms (B,), float64; zero remains zero."""
    wide = phi.double()
    norm = torch.linalg.vector_norm(wide, dim=1)
    return wide / norm.clamp(min=_TINY).unsqueeze(1), norm


def measure(embedding: EmbeddingDistribution, phi: Tensor | None, gaussians: TrainingGaussians | None) -> Tensor:
    """Return all components (B, K) of embeddings; known features (B, F) and known Gaussians add components."""
    if phi is None:
        return components(embedding)
    units, norm = unit_features(phi)
    values = components(embedding, norm)
    return values if gaussians is None else torch.cat([values, gaussians(units, embedding.raw_mean.detach())], dim=1)


def combine(standardised: Tensor) -> Tensor:
    """Return the statistic (B,) of components (B, K), ``sqrt(2 s)`` of ``s = sum_k -log(1 - Phi(z_k)) - log Phi(z_1)``.

    Each term is the logarithm of the p-value that the component would have if it were normally distributed, so ``s``
    combines them as Fisher did. Both tails of the first component count, because an input may also have too little
    variance; of the other components only large values count. The root makes the statistic a distance in standard
    deviations: it is about ``z`` if one component is far out, with the same rounding error as the components.

    Source: R. A. Fisher, *Statistical Methods for Research Workers*, 4th ed., 1932, section 21.1.
    """
    below = torch.cat([-standardised, standardised[:, :1]], dim=1)
    return (-2 * torch.special.log_ndtr(below).sum(1)).sqrt()


@dataclass(frozen=True)
class TrainingGaussians:
    """Distances to training inputs, under Gaussians fitted to a sample of these inputs.

    With the squared distance ``d(x, m; S) = (x - m)^T S^-1 (x - m)``, the first distance is the logarithm of
    ``d(z, m; S)`` for raw outputs ``z``. The second distance, if classes are known, is the relative distance of the
    features on the unit sphere, ``u = phi / |phi|``, per dimension: ``(min_c d(u, m_c; Sw) - d(u, m; St)) / F``, with
    the class means ``m_c``, the overall mean ``m``, and the covariances ``Sw`` within classes and ``St`` in total. A
    direction cancels if inputs of one class differ in it as much as inputs of different classes. Since ``|u| = 1``, the
    second distance equals ``(u B)^2 . s + min_c (u . a_c + k_c)``; this form is stored.

    Source: Ren et al., "A simple fix to Mahalanobis distance for improving near-OOD detection", 2021 (arXiv
        2106.09022), for the second distance.

    Attributes:
        centre: Mean of the outputs, shape (D,); float64, like all other attributes.
        axes: Axes of ``S``, shape (D, Q).
        inside: Inverse variances along the axes, minus ``outside``, shape (Q,).
        outside: Inverse variance in all other directions, shape ().
        basis: ``B``, shape (F, R); this and the following are ``None`` without classes.
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
        """Fit the Gaussians to features (n, F), outputs (n, D) and, if known, classes (n,)."""
        wide = outputs.double()
        centre = wide.mean(0)
        spread = _Precision.of(wide - centre, float(wide.square().sum(1).mean().sqrt()))
        of_outputs = cls(centre, spread.basis, spread.weights, wide.new_tensor(spread.rest))
        return of_outputs if classes is None else of_outputs._with_classes(features, classes)

    def _with_classes(self, features: Tensor, classes: Tensor) -> TrainingGaussians:
        """Add the Gaussians of the classes, if at least two classes have two or more inputs.

        A class of one input says nothing about the spread within classes, and is left out.
        """
        u, _ = unit_features(features)
        _, index, counts = classes.unique(return_inverse=True, return_counts=True)
        several, counts = counts > 1, counts.double()
        if int(several.sum()) < 2:
            return self
        means = u.new_zeros(len(counts), u.shape[1]).index_add_(0, index, u) / counts.unsqueeze(1)
        # A class mean is nearer to the inputs that it was computed from than to new ones; this factor corrects it.
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

    def __call__(self, u: Tensor, outputs: Tensor) -> Tensor:
        """Return the distances (B, 1) or (B, 2) of :func:`unit_features` (B, F) and outputs (B, D), float64."""
        apart = outputs.to(self.centre) - self.centre
        squared = (apart @ self.axes).square() @ self.inside + self.outside * apart.square().sum(1)
        distances = [squared.clamp(min=_TINY, max=_HUGE).log()]
        if self.basis is not None:
            there = u.to(self.basis.device)
            nearest = (there @ self.slopes.T + self.offsets).amin(1)  # type: ignore[union-attr, operator]
            distances.append((there @ self.basis).square() @ self.weights + nearest)  # type: ignore[operator]
        return torch.stack(distances, dim=1).to(u.device)


def held_out_distances(features: Tensor, outputs: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return the distances of each fifth of the inputs under Gaussians of the other fifths, shape (n, 1) or (n, 2).

    Inputs are nearer to Gaussians that were fitted to them than other inputs of the same kind are. If the other fifths
    have too few inputs of each class, the second distance is computed under the Gaussians of all inputs.
    """
    units, _ = unit_features(features)
    distances = TrainingGaussians.of(features, outputs, classes)(units, outputs)
    # Sort by content, so that the order of the inputs does not matter. Seed 0 has already drawn the sample.
    order = point_keys(content_numbers(outputs), seed=1).argsort(stable=True).to(features.device)
    folds = order.chunk(_FOLDS)
    for number, fold in enumerate(folds):
        rest = torch.cat([*folds[:number], *folds[number + 1 :]])
        gaussians = TrainingGaussians.of(features[rest], outputs[rest], None if classes is None else classes[rest])
        distances[fold, : gaussians.n_distances] = gaussians(units[fold], outputs[fold])
    return distances


@dataclass(frozen=True)
class _Precision:
    """Inverse of a covariance: ``basis diag(weights) basis^T + rest I``."""

    basis: Tensor
    weights: Tensor
    rest: float

    @classmethod
    def of(cls, rows: Tensor, length: float = 1.0) -> _Precision:
        """Compute it from centred rows (n, F): the leading axes and an isotropic rest.

        ``length`` is the length of the vectors before they were centred.
        """
        n, width = rows.shape
        # Half as many axes as rows: the smallest eigenvalues of so few rows are noise.
        rank = min(width, _AXES, max(1, n // 2))
        axes = torch.randn(
            width, min(width, rank + _SPARE), generator=torch.Generator().manual_seed(0), device="cpu"
        ).to(rows)
        for _ in range(_STEPS):
            axes = torch.linalg.qr(rows.T @ (rows @ axes)).Q
        inside = rows @ axes
        values, vectors = torch.linalg.eigh(inside.T @ inside / n)
        values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
        # With this bound, the rounding of float32 vectors changes no distance by more than ROUNDING.
        least = (2 * _EPS * max(length, _TINY**0.25) / (ROUNDING * width)) ** 2
        rest = (float(rows.square().sum()) / n - float(values.sum())) / max(1, width - rank)
        rest = 1 / max(rest, least) if rank < width else 0.0
        return cls(axes @ vectors, 1 / values.clamp(min=least) - rest, rest)

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows @ self.basis * self.weights) @ self.basis.T + self.rest * rows


@dataclass(frozen=True)
class Reference:
    """Statistics of known inputs, which new inputs are compared with.

    Attributes:
        location: Medians of the components, shape (K,). Location and scale must not depend on which known inputs are
            compared with new ones.
        scale: Spreads of the components, positive, shape (K,).
        statistics: Scores of n known inputs, ascending (within each class if there are counts), shape (n,).
        counts: Number of these inputs by predicted class, in the order of the centres; ``None``: the class is ignored.
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
        """Build the reference from components ``known`` (n, K), standardised with the components ``for_scale`` (m, K).

        The scale is the median absolute deviation, or the standard deviation if the former is zero. The predicted
        ``classes`` have the shape (n,). ``scores``, shape (n,), replace the novelty if ``name`` is another score.
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
        """Largest difference between two scores that count as equal."""
        if self.score == NOVELTY:
            return ROUNDING / float(self.scale.min())
        # For a score with a large offset, the first number alone could be larger than all differences between inputs.
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
        """Number of inputs that a p-value compares with; by class, the number in the smallest class."""
        return len(self.statistics) if self.counts is None else int(self.counts.min())

    def novelty(self, values: Tensor) -> Tensor:
        """Return the novelty (B,) of components (B, K)."""
        return combine((values.to(self.location.device) - self.location) / self.scale).to(values.device)

    def p_value(self, scores: Tensor, classes: Tensor | None = None) -> Tensor:
        """Return conformal p-values ``(1 + #{known >= s}) / (n + 1)`` of scores (B,); float64, shape (B,).

        With ``counts``, only known inputs of the same predicted class count; ``classes`` holds their indices, shape
        (B,). Scores that are equal up to rounding count as equal; otherwise repeated known inputs could be flagged by
        rounding alone.
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
    """Split the components (n, K) of known inputs: a third to standardise with, the rest to compare with.

    The permutation depends on n alone, so the rest stays exchangeable with new inputs.
    """
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0), device="cpu").to(known.device)
    first = _for_scale(len(known))
    return known[order[:first]], known[order[first:]]


def check_alpha(alpha: object, n: int | None = None, splits: bool = False, by_class: bool = False) -> float:
    """Return ``alpha`` as a float in (0, 1); raise if ``n`` known inputs cannot give a p-value this small.

    ``splits`` says whether a new calibration would lose inputs to :func:`split`, and ``by_class`` whether ``n`` counts
    the class with the fewest inputs; both only change the message.
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
    """Return how many known inputs a p-value of ``alpha`` needs: n inputs to compare with give ``1 / (n + 1)``."""
    first = max(1, math.ceil(1 / alpha) - 2)
    return next(n for n in itertools.count(first) if 1 / (n - splits * _for_scale(n) + 1) <= alpha)


def _for_scale(n: int) -> int:
    return max(1, n // _SHARE_FOR_SCALE)


@dataclass(frozen=True)
class Calibration:
    """Statistics of known inputs, which new inputs are compared with.

    Attributes:
        reference: Scores of the known inputs.
        encoder: Fingerprint of the encoder (:class:`.Watch`), shape (4,).
        score: The score that is compared.
        gaussians: Gaussians of training inputs, if the posterior has a sample of them.
    """

    reference: Reference
    encoder: Tensor
    score: Score
    gaussians: TrainingGaussians | None = None


@dataclass(frozen=True)
class TrainingSample:
    """Some training inputs, with the columns ``features``, ``outputs`` and, with labels, ``classes``."""

    rows: Rows

    @cached_property
    def gaussians(self) -> TrainingGaussians:
        """Gaussians of the inputs; computed at first use."""
        return TrainingGaussians.of(*self._numbers())

    @cached_property
    def held_out(self) -> Tensor:
        """Distances of :func:`held_out_distances`, shape (m, 1) or (m, 2); computed at first use."""
        return held_out_distances(*self._numbers())

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = self.rows.columns
        return columns["features"], columns["outputs"], columns.get("classes")


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """Training inputs under one state of a posterior, shared by its predictions; computed at first use.

    Attributes:
        sample: The inputs.
        predict: Function that maps outputs (B, D) and features (B, F) to the prediction in that state.
    """

    sample: TrainingSample
    predict: Callable[[Tensor, Tensor], EmbeddingDistribution]

    @cached_property
    def values(self) -> Tensor:
        """Components of the inputs, shape (m, K)."""
        columns = self.sample.rows.columns
        batches = zip(columns["features"].split(_AT_ONCE), columns["outputs"].split(_AT_ONCE), strict=True)
        with torch.no_grad():
            parts = [measure(self.predict(z, phi), phi, self.sample.gaussians) for phi, z in batches]
        return torch.cat(parts)

    @cached_property
    def scale(self) -> Reference:
        """Reference for standardising; its statistics are too small: the Gaussians were fitted to these inputs."""
        return Reference.of(self.values, self.values)

    @cached_property
    def reference(self) -> Reference:
        """The reference with distances under Gaussians of other inputs."""
        compared = torch.cat([self.values[:, :3], self.sample.held_out.to(self.values)], dim=1)
        return Reference.of(self.values, compared)


@dataclass(frozen=True, eq=False)
class Known:
    """Data about known inputs under one state of a posterior; it holds no posterior.

    Attributes:
        reference: Calibration inputs; ``None`` if training inputs replace them, or if there are none.
        gaussians: Gaussians of training inputs, if the calibration has them.
        score: The score that p-values compare; ``None`` for the novelty.
        training: Training inputs, if there is no calibration.
        refusal: Reason why there are no p-values; without a reference and training inputs there is also no novelty.
        names: Names of the attributes that give no warning.
        optimism: List with the warning for the first p-value against training inputs; all predictions share it.
        splits: Whether a calibration would standardise with a part of its inputs.
    """

    reference: Reference | None = None
    gaussians: TrainingGaussians | None = None
    score: Score | None = None
    training: TrainingInputs | None = None
    refusal: str | None = None
    names: tuple[str, ...] = ()
    optimism: list[str] = field(default_factory=list)
    splits: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compare with."""
        return self.reference is None and self.training is None

    @property
    def compared(self) -> Reference | None:
        """Known inputs that p-values compare with."""
        return self.reference if self.training is None else self.training.reference

    def plain(self) -> Known:
        """Return a copy for a file: without features of training inputs and without a function."""
        numbers: dict[str, Any] = {"reference": self.compared, "optimism": list(self.optimism)}
        return replace(self, **numbers, gaussians=None, score=None, training=None)

    def check_alpha(self, alpha: float) -> None:
        """Refuse a share that is smaller than all p-values."""
        reference = self.compared
        assert reference is not None
        splits = self.splits and reference.score == NOVELTY
        check_alpha(alpha, reference.fewest, splits, reference.counts is not None)

    def agrees(self, other: Known) -> bool:
        """Return whether both are of the same inputs, even if loaded from two files."""
        if self.training is not other.training:
            return False
        if self.reference is None or other.reference is None:
            return self.reference is other.reference and self.refusal == other.refusal
        return self.reference.equals(other.reference)


@dataclass(frozen=True, eq=False)
class Comparison:
    """B embeddings in comparison with known inputs.

    Attributes:
        known: The known inputs when the prediction was made.
        features: Features of the embeddings, shape (B, F); ``None`` once all numbers are computed.
        values: Components (B, K) of the embeddings; ``None`` before :meth:`measured`.
        scores: Scores that p-values compare, shape (B,); ``None`` before :meth:`scored`.
        classes: Predicted classes (B,) as floating-point numbers, if p-values are by class.
    """

    known: Known
    features: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    classes: Tensor | None = None

    def measured(self, embedding: EmbeddingDistribution) -> Comparison:
        """Return a copy with the components of the embedding."""
        known = self.known
        if known.empty:
            raise NotFittedError(str(known.refusal))
        if self.values is not None:
            return self
        gaussians = known.gaussians if known.training is None else known.training.sample.gaussians
        return replace(self, values=measure(embedding, self.features, gaussians))

    def scored(self, embedding: EmbeddingDistribution) -> Comparison:
        """Return a copy with the scores that p-values compare."""
        if self.known.refusal is not None:
            raise NotFittedError(self.known.refusal)
        if self.scores is not None:
            return self
        score, made = self.known.score, self
        if score is not None:
            score.check(embedding)
        if score is None or score.name == NOVELTY:
            made = self.measured(embedding)
            scores = made.novelty()
        else:
            scores = score.of(embedding)
        return replace(made, scores=scores, classes=None if score is None else score.classes(embedding))

    def fixed(self, embedding: EmbeddingDistribution) -> Comparison:
        """Return a copy with all numbers computed, so that the embedding may be rounded or saved."""
        made = self if self.known.empty else self.measured(embedding)
        try:
            made = made.scored(embedding)
        except NotFittedError as error:
            made = replace(made, known=replace(made.known, refusal=str(error)))
        return replace(made, features=None)

    def novelty(self) -> Tensor:
        """Return the novelty (B,), once the embedding is measured."""
        scale = self.known.reference if self.known.training is None else self.known.training.scale
        assert scale is not None
        assert self.values is not None
        return scale.novelty(self.values)

    def p_value(self) -> Tensor:
        """Return the p-values (B,), once the embedding is scored."""
        while self.known.optimism:
            warnings.warn(self.known.optimism.pop(), OptimisticPValueWarning, stacklevel=4)
        reference, scores = self.known.compared, self.scores
        assert reference is not None
        assert scores is not None
        return reference.p_value(scores, None if self.classes is None else self.classes.long())

    def of_rows(self, rows: Tensor) -> Comparison:
        """Return a copy for the selected embeddings; -1 is a row of NaN."""
        return self._each(lambda value: taken(value, rows.to(value.device)))

    def to(self, device: torch.device) -> Comparison:
        """Return a copy on the device of the embedding."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Comparison:
        numbers = (self.features, self.values, self.scores, self.classes)
        return Comparison(self.known, *(None if value is None else change(value) for value in numbers))

    @classmethod
    def joined(cls, parts: Sequence[Comparison | None]) -> Comparison | None:
        """Join measured parts for a concatenation; ``None`` if they compare with different inputs."""
        first, made = parts[0], [part for part in parts if part is not None]
        if first is None or len(made) < len(parts) or not all(first.known.agrees(part.known) for part in made):
            return None

        def together(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in made]
            return None if any(value is None for value in values) else torch.cat(values)

        refusal = next((part.known.refusal for part in made if part.known.refusal is not None), None)
        # Features are dropped: all parts together may be a whole data set.
        known = replace(first.known, refusal=refusal)
        return cls(known, None, together("values"), together("scores"), together("classes"))

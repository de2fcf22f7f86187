"""A posterior is a value: what a fit learned, a prior, and a calibration for p-values.

Nothing changes it; every step returns another one: ``Posterior(fitted, prior)``, ``posterior.with_prior(prior)``, and
``calibrated(posterior, ...)`` of :mod:`.calibration`. So an error leaves the old one as it was, embeddings that were
made earlier do not change, and what follows from a posterior is computed once, at first use. Tensors in it are never
changed in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.codec import NOT_SAVED
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import Calibration, Known, TrainingInputs, TrainingSample
from contrastive_curvature.embedding.spread import Axes, DenseSpread, IndependentSpread, Spread
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.fit.loop import Slope
from contrastive_curvature.network.digest import same_encoder
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.structures import Clamped, Structure
from contrastive_curvature.structures.at_features import (
    AtFeatures,
    AxesAtFeatures,
    DenseAtFeatures,
    DiagonalAtFeatures,
)
from contrastive_curvature.structures.structure import of_each_weight

OPTIMISTIC = (
    "P-values are then optimistic, that is too small: of new inputs of the known kind, more than a share alpha may "
    "fall below alpha."
)

CALIBRATE = "Call la.calibrate(loader) with known inputs, best those that the encoder was not trained on."

_COMPARES_WITH_TRAINING = (
    f"p_value: la is not calibrated, and compares with inputs of the training. {OPTIMISTIC} {CALIBRATE}"
)

_NOTHING = (
    "p_value: la is not calibrated, and has no training inputs to compare with: only the fit of a last layer keeps "
    f"some, for its present weights. {CALIBRATE}"
)

_OUTDATED = (
    "p_value: la was calibrated for another posterior: since then its prior precision, its temperature or the "
    "encoder's weights have changed. Call la.calibrate(loader) again."
)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit learned. The sum of two is the fit of both data sets, without pairs of a point of each.

    Attributes:
        curvature: The curvature, unclamped.
        mean: All trainable weights that the fit was at, shape (P,).
        sizes: Numbers of entries of the parts that have their own precision in a layerwise prior.
        rank: The option ``rank``, for structures that have it.
        subnetwork: Places of the weights that have a posterior in ``mean``, shape (K,); ``None`` for all, K = P.
        dim: Number D of outputs.
        n: Number of points.
        loss: The loss over these points, shape ().
        cost: The loss minus the smallest value that it can have.
        typical_norm: Mean norm of the raw outputs; ``None`` if it is unknown.
        encoder: Fingerprint of the encoder's weights, from :class:`~contrastive_curvature.network.digest.Watch`, (4,).
        classes: Centres of the classes, if the targets are class labels.
        training_sample: Some of the training inputs, of a last layer. Never saved, because they are the user's data.
        slopes: Derivatives in the numbers of the loss that have a gradient.
    """

    curvature: Structure
    mean: Tensor
    sizes: list[int]
    rank: int | None
    subnetwork: Tensor | None
    dim: int
    n: int
    loss: Tensor
    cost: float
    typical_norm: float | None
    encoder: Tensor
    classes: ClassCentres | None
    training_sample: TrainingSample | None = field(default=None, metadata=NOT_SAVED)
    slopes: tuple[Slope, ...] = field(default=(), metadata=NOT_SAVED)

    @property
    def with_graph(self) -> Fitted:
        """The same fit, whose loss and curvature have a graph to the numbers of the loss that have a gradient."""
        fitted = self
        for number, of_loss, of_curvature in self.slopes:
            change = number - number.detach()
            curvature = fitted.curvature.map(lambda part, slope, by=change: part + by * slope, of_curvature)
            fitted = replace(fitted, curvature=curvature, loss=fitted.loss + change * of_loss)
        return fitted

    def __add__(self, later: Fitted) -> Fitted:
        """Return the fit of both data sets, at the weights of the later one."""
        sample, norm = None, None
        both = self.training_sample, later.training_sample
        if both[0] is not None and both[1] is not None and same_encoder(self.encoder, later.encoder):
            sample = TrainingSample(both[0].rows.merged(both[1].rows))
        if self.typical_norm is not None and later.typical_norm is not None:
            norm = (self.n * self.typical_norm + later.n * later.typical_norm) / (self.n + later.n)
        return replace(
            later,
            curvature=self.curvature + later.curvature,
            n=self.n + later.n,
            loss=self.loss + later.loss,
            cost=self.cost + later.cost,
            typical_norm=norm,
            classes=_merged_classes(self.classes, later.classes),
            training_sample=sample,
            slopes=self.slopes + later.slopes,
        )

    @cached_property
    def clamped(self) -> Clamped:
        """The positive semidefinite part of the curvature, decomposed."""
        return clamp(self.curvature, self.sizes, self.rank)

    @property
    def weights(self) -> Tensor:
        """Mean of the posterior's weights: of a subnetwork the chosen ones."""
        return self.mean if self.subnetwork is None else self.mean[self.subnetwork]

    @property
    def class_centres(self) -> ClassCentres | None:
        """Centres of the classes that ``uncertainty`` uses; ``None`` below two classes."""
        return self.classes if self.classes is not None and len(self.classes.labels) > 1 else None


@dataclass(frozen=True, eq=False)
class Prior:
    """The Gaussian prior of the weights, and the temperature of the likelihood.

    Attributes:
        precision: One number, one for each parameter tensor, or one for each weight.
        mean: One number, or one for each weight. Only the marginal likelihood uses it.
        temperature: The curvature is divided by it. A tensor has a gradient.
        chosen: Whether the user or a rule chose the precision after the last fit or update.
        keeps_temperature: Whether the user chose the temperature, so that no rule does.
    """

    precision: Tensor
    mean: Tensor
    temperature: float | Tensor = 1.0
    chosen: bool = False
    keeps_temperature: bool = False


@dataclass(frozen=True, eq=False)
class Posterior:
    """A Gaussian over K weights with the precision ``H / temperature + prior``, and its calibration.

    Attributes:
        fitted: What a fit learned.
        prior: The prior.
        calibration: Inputs of the known kind, whose scores p-values rank a new input's score among; ``None`` before
            ``calibrate``.
        refusal: Why there are no p-values although there is a calibration: it was made for another prior precision or
            temperature. (:meth:`known` compares the encoder's weights.)
    """

    fitted: Fitted
    prior: Prior
    calibration: Calibration | None = None
    refusal: str | None = None

    def with_prior(self, prior: Prior) -> Posterior:
        """Return the posterior with another prior; another precision or temperature needs another calibration."""
        old = self.prior
        same = prior.temperature == old.temperature and torch.equal(prior.precision, old.precision)
        refusal = self.refusal if same or self.calibration is None else _OUTDATED
        return replace(self, prior=prior, refusal=refusal)

    @property
    def scales(self) -> tuple[Tensor, float | Tensor]:
        """Prior precision, and factor of the curvature."""
        return self.prior.precision, 1 / self.prior.temperature

    @property
    def prior_precisions(self) -> Tensor:
        """Prior precision of every weight, shape (K,)."""
        return of_each_weight(self.prior.precision, self.fitted.sizes)

    def covariance(self, jacobians: Tensor) -> Tensor:
        """Return ``J Sigma J^T`` (..., D, D) of Jacobians (..., D, K)."""
        return self.fitted.clamped.covariance(jacobians, *self.scales)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw all trainable weights, shape (S, P)."""
        return self.fitted.mean + next(self.moves([count], generator))

    def moves(self, counts: Iterable[int], generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Draw how far all trainable weights are from their mean, shape (S, P) for each count S in turn."""
        mean, places, width = self.fitted.mean, self.fitted.subnetwork, sum(self.fitted.sizes)
        sample = self.fitted.clamped.sampler(*self.scales)

        def drawn(count: int) -> Tensor:
            shift = sample(torch.randn(count, width, dtype=mean.dtype, device=mean.device, generator=generator))
            if places is None:
                return shift
            return mean.new_zeros(count, len(mean)).index_copy(1, places.to(mean.device), shift)

        return map(drawn, counts)

    @property
    def at_features(self) -> AtFeatures:
        """Spread of the outputs of a last layer, as a function of its features."""
        # Not kept for a prior with a gradient: a backward pass frees the graph.
        graph = self.prior.precision.requires_grad or isinstance(self.prior.temperature, Tensor)
        return self._at_features if graph else self._cached_at_features

    @cached_property
    def _cached_at_features(self) -> AtFeatures:
        return self._at_features

    @property
    def _at_features(self) -> AtFeatures:
        return self.fitted.clamped.at_features(self.fitted.dim, *self.scales)

    @cached_property
    def training(self) -> TrainingInputs | None:
        """The sample of training inputs under this posterior; ``None`` without one."""
        if self.fitted.training_sample is None:
            return None
        with torch.no_grad():
            return TrainingInputs(self.fitted.training_sample, partial(_at_stored_features, self.at_features))

    @cached_property
    def _known(self) -> Known:
        if self.calibration is not None:
            made = self.calibration
            splits = self.training is None or not same_encoder(self.fitted.encoder, made.encoder)
            return Known(made.reference, made.gaussians, made.score, names=("novelty", "p_value"), splits=splits)
        return Known(training=self.training, names=("novelty",), optimism=[_COMPARES_WITH_TRAINING])

    def known(self, encoder: Tensor) -> Known:
        """Return what the novelty and the p-value of a prediction compare it with.

        With a calibration: its inputs. Without one: the training inputs, with a warning at the first p-value. Asking
        for a p-value raises an error if there are neither, or if the calibration or the training inputs belong to
        other weights of the encoder, or the calibration to another prior precision or temperature.

        Args:
            encoder: Fingerprint of the encoder that makes the prediction.
        """
        if self.calibration is not None:
            if self.refusal is not None or not same_encoder(self.calibration.encoder, encoder):
                return Known(refusal=_OUTDATED, names=("novelty", "p_value"))
        elif self.training is None or not same_encoder(self.fitted.encoder, encoder):
            return Known(refusal=_NOTHING)
        return self._known


def clamp(curvature: Structure, sizes: list[int], rank: int | None) -> Clamped:
    """Return the positive semidefinite part of a curvature, decomposed with the options that its structure has."""
    options = {"rank": rank}
    return curvature.clamped(sizes, **{name: options[name] for name in curvature.options})


_SPREADS: dict[type, type[Any]] = {
    DiagonalAtFeatures: IndependentSpread,
    AxesAtFeatures: Axes,
    DenseAtFeatures: DenseSpread,
}


def spread_at(at_features: AtFeatures, phi: Tensor) -> Spread:
    """Return the spread of the outputs of a last layer at features (B, F)."""
    spread: Spread = _SPREADS[type(at_features)](*at_features(phi))
    return spread


def _at_stored_features(at_features: AtFeatures, z: Tensor, phi: Tensor) -> EmbeddingDistribution:
    """Return the distribution at stored outputs (B, D) and features (B, F), in the precision of the encoder."""
    z, phi = at_least_float32(z), at_least_float32(phi.to(z))
    return EmbeddingDistribution.trusted(z, spread_at(at_features, phi))


def _merged_classes(earlier: ClassCentres | None, later: ClassCentres | None) -> ClassCentres | None:
    """Return the class centres of two fits together; ``None`` if one fit has none."""
    if earlier is None or later is None:
        return None
    merged = earlier.merged(later)
    if merged is None or earlier.sample is None:
        why = (
            "there are too many classes, so uncertainty goes without their centres"
            if merged is None
            else "this posterior was loaded, so what is typical for its classes follows from the new inputs alone; "
            "la.measure_classes(loader) over all of them makes it exact"
        )
        warnings.warn(f"override=False: {why}.", UserWarning, stacklevel=5)
    return merged

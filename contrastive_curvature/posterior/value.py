"""A posterior is a value: what a fit learned, a prior, and the known inputs that p-values compare with.

Nothing changes it; every step returns another one, ``Fitted -> Posterior.with_prior -> calibrated``. So an error leaves
the old one as it was, an old embedding keeps its numbers, and what follows from a posterior is computed once, at first
use. Tensors in it are never changed in place.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.codec import NOT_SAVED
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import Calibration, Known, TrainingInputs, TrainingSample
from contrastive_curvature.embedding.spread import Axes, Dense, Independent, Spread
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.network.digest import same_encoder
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.structures import Clamped, Structure
from contrastive_curvature.structures.at_features import (
    AtFeatures,
    AxesAtFeatures,
    DenseAtFeatures,
    DiagonalAtFeatures,
)
from contrastive_curvature.structures.base import of_each_weight

OPTIMISTIC = "P-values are then optimistic: of other known inputs, more than a share alpha may fall below alpha."

CALIBRATE = "Call la.calibrate(loader) with known inputs, best those that the encoder was not trained on."

_COMPARES_WITH_TRAINING = (
    f"p_value: la is not calibrated, and compares with inputs of the training. {OPTIMISTIC} {CALIBRATE}"
)

_NOTHING = f"p_value: la is not calibrated, and has no inputs of a fit at the present weights. {CALIBRATE}"

_OUTDATED = (
    "p_value: la was calibrated for another posterior: since then its prior precision, its temperature or the "
    "encoder's weights have changed. Call la.calibrate(loader) again."
)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit learned. The sum of two is the fit of both data sets; pairs between them are not formed.

    Attributes:
        curvature: The curvature, unclamped.
        mean: All trainable weights that the fit was at, shape (P,).
        sizes: Numbers of entries of the parts that have their own precision in a layerwise prior.
        rank: The option ``rank``, for structures that have it.
        chosen: Places of a subnetwork's weights in ``mean``, shape (K,); ``None`` for all.
        dim: Number D of outputs.
        n: Number of points.
        loss: The loss over these points, shape ().
        cost: The loss minus its minimum.
        typical_norm: Mean norm of the raw outputs; ``None`` if it is unknown.
        encoder: Fingerprint of the encoder (:class:`.Watch`), shape (4,).
        classes: Centres of the classes, if the targets are class labels.
        sample: Some of the training inputs, of a last layer; in no file, because they are the user's data.
    """

    curvature: Structure
    mean: Tensor
    sizes: list[int]
    rank: int | None
    chosen: Tensor | None
    dim: int
    n: int
    loss: Tensor
    cost: float
    typical_norm: float | None
    encoder: Tensor
    classes: ClassCentres | None
    sample: TrainingSample | None = field(default=None, metadata=NOT_SAVED)

    def __add__(self, later: Fitted) -> Fitted:
        """Return the fit of both data sets, at the weights of the later one."""
        sample, norm = None, None
        if self.sample is not None and later.sample is not None and same_encoder(self.encoder, later.encoder):
            sample = TrainingSample(self.sample.rows.merged(later.sample.rows))
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
            sample=sample,
        )

    @cached_property
    def clamped(self) -> Clamped:
        """The positive semidefinite part of the curvature, decomposed."""
        return clamp(self.curvature, self.sizes, self.rank)

    @property
    def weights(self) -> Tensor:
        """Mean of the posterior's weights: of a subnetwork the chosen ones."""
        return self.mean if self.chosen is None else self.mean[self.chosen]

    @property
    def class_centres(self) -> ClassCentres | None:
        """Centres of the classes that ``uncertainty`` uses; a single class says nothing."""
        return self.classes if self.classes is not None and len(self.classes.labels) > 1 else None


@dataclass(frozen=True, eq=False)
class Prior:
    """The Gaussian prior of the weights, and the temperature of the likelihood.

    Attributes:
        precision: One number, one for each parameter tensor, or one for each weight.
        mean: One number, or one for each weight.
        temperature: The curvature is divided by it.
        chosen: Whether the user or a rule chose the precision after the last fit or update.
        keeps_temperature: Whether the user chose the temperature, so that no rule does.
    """

    precision: Tensor
    mean: Tensor
    temperature: float = 1.0
    chosen: bool = False
    keeps_temperature: bool = False


@dataclass(frozen=True, eq=False)
class Posterior:
    """A Gaussian over weights with the precision ``H / temperature + prior``, and the inputs that it knows.

    Attributes:
        fitted: What a fit learned.
        prior: The prior.
        calibration: Known inputs that p-values compare with; ``None`` before ``calibrate``.
        refusal: Why the calibration does not hold any more: it belongs to another prior or temperature.
    """

    fitted: Fitted
    prior: Prior
    calibration: Calibration | None = None
    refusal: str | None = None

    def with_prior(self, prior: Prior) -> Posterior:
        """Return the posterior with another prior, whose p-values need another calibration."""
        old = self.prior
        same = prior.temperature == old.temperature and torch.equal(prior.precision, old.precision)
        refusal = self.refusal if same or self.calibration is None else _OUTDATED
        return replace(self, prior=prior, refusal=refusal)

    @property
    def scales(self) -> tuple[Tensor, float]:
        """Prior precision, and factor of the curvature."""
        return self.prior.precision, 1 / self.prior.temperature

    @property
    def prior_precisions(self) -> Tensor:
        """Prior precision of every weight, shape (P,)."""
        return of_each_weight(self.prior.precision, self.fitted.sizes)

    def covariance(self, jacobians: Tensor) -> Tensor:
        """Return ``J Sigma J^T`` (..., D, D) of Jacobians (..., D, P)."""
        return self.fitted.clamped.covariance(jacobians, *self.scales)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw all trainable weights, shape (S, P)."""
        mean, chosen, width = self.fitted.mean, self.fitted.chosen, sum(self.fitted.sizes)
        noise = torch.randn(count, width, dtype=mean.dtype, device=mean.device, generator=generator)
        shift = self.fitted.clamped.sample(noise, *self.scales)
        if chosen is None:
            return mean + shift
        weights = mean.repeat(count, 1)
        weights[:, chosen] += shift
        return weights

    @property
    def at_features(self) -> AtFeatures:
        """Spread of the outputs of a last layer, as a function of its features; a graph is never used twice."""
        return self._at_features if self.prior.precision.requires_grad else self._kept_at_features

    @cached_property
    def _kept_at_features(self) -> AtFeatures:
        return self._at_features

    @property
    def _at_features(self) -> AtFeatures:
        return self.fitted.clamped.at_features(self.fitted.dim, *self.scales)

    @cached_property
    def training(self) -> TrainingInputs | None:
        """The sample of training inputs under this posterior; ``None`` without one."""
        if self.fitted.sample is None:
            return None
        with torch.no_grad():
            return TrainingInputs(self.fitted.sample, partial(_at_stored_features, self.at_features))

    @cached_property
    def _known(self) -> Known:
        if self.calibration is not None:
            made = self.calibration
            splits = self.training is None or not same_encoder(self.fitted.encoder, made.encoder)
            return Known(made.reference, made.gaussians, made.score, names=("novelty", "p_value"), splits=splits)
        return Known(training=self.training, names=("novelty",), optimism=[_COMPARES_WITH_TRAINING])

    def known(self, encoder: Tensor) -> Known:
        """Return the inputs that predictions compare with, for the fingerprint of the encoder that makes them."""
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


_SPREADS: dict[type, type[Any]] = {DiagonalAtFeatures: Independent, AxesAtFeatures: Axes, DenseAtFeatures: Dense}


def spread_at(posterior: AtFeatures, phi: Tensor) -> Spread:
    """Return the spread of the outputs of a last layer at features (B, F)."""
    spread: Spread = _SPREADS[type(posterior)](*posterior(phi))
    return spread


def _at_stored_features(posterior: AtFeatures, z: Tensor, phi: Tensor) -> EmbeddingDistribution:
    """Return the distribution at stored outputs (B, D) and features (B, F), in the precision of the encoder."""
    z, phi = at_least_float32(z), at_least_float32(phi.to(z))
    return EmbeddingDistribution.trusted(z, spread_at(posterior, phi))


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

"""``la.calibrate(loader)``: conformal p-values of whether an input is of the kind that the encoder knows.

A conformal p-value (Vovk, Gammerman and Shafer, 2005) compares the statistic of an input with those of n known inputs:
``(1 + #{known >= s}) / (n + 1)``. Where the input and the n known ones are exchangeable, it is at most alpha with a
probability of at most alpha. That needs a statistic that treats all of them alike, so the location and scale that its
components are standardised with come from other inputs: the training data, or a part of the calibration data that is
then not compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import (
    Judge,
    OptimisticPValueWarning,
    Reference,
    Standard,
    check_alpha,
    components,
    split,
)
from contrastive_curvature.embedding.spread import taken
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, expected
from contrastive_curvature.laplace.confirmed import Confirmed
from contrastive_curvature.laplace.features import Features
from contrastive_curvature.laplace.fingerprint import (
    Stamp,
    encoder_fingerprint,
    fingerprint,
    same_encoder,
    same_posterior,
)
from contrastive_curvature.network.call import naming_the_input
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.network.inputs import Inputs, check_inputs, input_length, is_texts, tokenized
from contrastive_curvature.network.loader import check_batches, check_whole
from contrastive_curvature.parts.rows import Rows
from contrastive_curvature.progress import Progress

__all__ = ["Calibration", "KnownInputs", "calibrate", "calibrated_reference", "judged", "predict", "training_sample"]

_AT_ONCE = 256
"""Training inputs of one prediction: a covariance for each of them has D^2 numbers."""

_SAME = 1e-5
"""Components of one input in another batch differ less, in float32."""

_MOST_FITTED = 0.1
"""Share of the calibration inputs that may be of the fit. At this much, a share ``alpha`` of known inputs that is
flagged grows by a ninth at most."""

_CACHED = 2**17
"""Features that are converted at once."""

_CALIBRATE = "Call la.calibrate(loader) with known inputs, best those that the encoder was not trained on."


@dataclass(frozen=True)
class Calibration:
    """Statistics of the calibration inputs, and the posterior that they belong to.

    Attributes:
        reference: What p-values are computed from, on the posterior's device.
        fingerprint: See :func:`.fingerprint`.
        confirmed: The state in which the posterior was last seen to be that one.
    """

    reference: Reference
    fingerprint: Tensor
    confirmed: Confirmed = field(default_factory=Confirmed, repr=False, compare=False)


@dataclass(frozen=True)
class TrainingSample:
    """Features of some training inputs, and the encoder that they came from."""

    features: Rows
    encoder: Tensor


@dataclass(frozen=True)
class KnownInputs:
    """What a posterior remembers of known inputs.

    Attributes:
        fits: How often its curvature was set.
        sample: Some inputs of ``fit``.
        training: Fingerprint of the posterior and components (m, K) of the sample under it.
        calibration: What :func:`calibrate` left.
        warned: Whether it has said that p-values without calibration are optimistic.
    """

    fits: int = 0
    sample: TrainingSample | None = None
    training: tuple[Tensor, Tensor] | None = None
    calibration: Calibration | None = None
    warned: bool = False

    def anew(self, calibration: Calibration | None = None) -> KnownInputs:
        """What remains once the curvature is another."""
        return KnownInputs(fits=self.fits + 1, calibration=calibration, warned=self.warned)


@dataclass
class _Prediction:
    """The :class:`~contrastive_curvature.embedding.known.Judge` of one prediction ``la(x)``.

    Attributes:
        la: The posterior that made it.
        stamp: Its state then.
        feature_norm: Norms of the features, shape (B,).
        confirmed: A calibration of which it is known that it is of that state.
        values: Components (B, K) of the embedding as it was predicted, where it has been rounded since.
    """

    la: Any
    stamp: Stamp
    feature_norm: Tensor | None
    confirmed: Calibration | None = None
    values: Tensor | None = None

    def novelty(self, embedding: EmbeddingDistribution) -> Tensor:
        standard, values = self._reference(quiet=True).standard, self._components(embedding)
        return standard.statistic(values.to(standard.location.device)).to(embedding.raw_mean.device)

    def p_value(self, embedding: EmbeddingDistribution) -> Tensor:
        return self._reference().p_value(self._components(embedding)).to(embedding.raw_mean.device)

    def is_known(self, embedding: EmbeddingDistribution, alpha: float) -> Tensor:
        check_alpha(alpha)
        reference = self._reference()
        n = len(reference.statistics)
        # What the error says needs a look at the whole encoder.
        check_alpha(alpha, n, alpha < 1 / (n + 1) and _present_sample(self.la) is None)
        return reference.p_value(self._components(embedding)).to(embedding.raw_mean.device) > alpha

    def rows(self, rows: Tensor) -> _Prediction:
        def of_rows(value: Tensor | None) -> Tensor | None:
            return None if value is None else taken(value, rows.to(value.device))

        return replace(self, feature_norm=of_rows(self.feature_norm), values=of_rows(self.values))

    def fixed(self, embedding: EmbeddingDistribution) -> _Prediction:
        return replace(self, values=self._components(embedding))

    def joined(self, judges: Sequence[Judge | None], embeddings: Sequence[EmbeddingDistribution]) -> _Prediction | None:
        if not all(isinstance(j, _Prediction) and j.la is self.la and j.stamp.equals(self.stamp) for j in judges):
            return None
        same: list[Any] = list(judges)
        if all(judge.values is None for judge in same):
            if self.feature_norm is None:
                return self
            norms = [judge.feature_norm.to(self.feature_norm.device) for judge in same]
            return replace(self, feature_norm=torch.cat(norms))
        found = [judge._components(embedding) for judge, embedding in zip(same, embeddings, strict=True)]
        return replace(self, feature_norm=None, values=torch.cat([value.to(found[0].device) for value in found]))

    def _components(self, embedding: EmbeddingDistribution) -> Tensor:
        if self.values is not None:
            return self.values
        norm = self.feature_norm
        return components(embedding, None if norm is None else norm.to(embedding.raw_mean.device))

    def _reference(self, quiet: bool = False) -> Reference:
        if not self.stamp.holds(self.la):
            wanted = "the posterior as it was when it made this prediction"
            received = "one with another curvature, prior precision, temperature or encoder"
            raise InputError(expected("p_value", wanted, received, "Call la(x) again."))
        calibration: Calibration | None = self.la._known.calibration
        if calibration is not None and calibration is self.confirmed:
            # The look at all weights is for this prediction, which they made before.
            return calibration.reference
        reference = _reference_of(self.la, quiet, self.stamp)
        self.confirmed = calibration
        return reference


def predict(la: Any, x: Inputs) -> EmbeddingDistribution:
    """The prediction ``la(x)``, with what its p-value needs.

    Args:
        la: A fitted posterior.
        x: A batch of B inputs.

    Returns:
        The distribution.
    """
    return judged(la, *_observe(la, x))


def judged(la: Any, found: EmbeddingDistribution, feature_norm: Tensor | None) -> EmbeddingDistribution:
    """A prediction of a posterior, given the judge that its p-value asks.

    Args:
        la: The posterior.
        found: The prediction.
        feature_norm: Norms (B,) of the features, where the posterior knows them.
    """
    found._judge = _Prediction(la, Stamp.of(la), feature_norm)
    return found


def calibrate(la: Any, loader: Iterable[Any], progress_bar: bool | None = None) -> None:
    """See :meth:`contrastive_curvature.laplace.base.ContrastiveLaplace.calibrate`."""
    la.check_fitted()
    if progress_bar is not None:
        validate.flag("progress_bar", progress_bar)
    check_batches(loader, "loader", "batches (x, labels), or of inputs alone")
    check_whole(loader, "loader")
    found = []
    for number, batch in enumerate(Progress(progress_bar).over(loader, "[calibration]")):
        x = tokenized(la.model, _inputs_of(batch), "loader: inputs of a batch")
        x = check_inputs(x, "loader: inputs of a batch")
        found.append(_components_of(la, x, number))
    values = torch.cat(found) if found else torch.empty(0)
    if len(values) < 2:
        hint = "A p-value of 1 / (n + 1) needs n of them."
        raise InputError(expected("loader", "at least two known inputs", f"{len(values)}", hint))
    known = _training_components(la)
    if known is None:
        known, values = split(values)
    # The posterior keeps some inputs of its fit only: each of them stands for as many.
    elif (share := _share_found(values, known.to(values)) * max(1, la.n_data / len(known))) > _MOST_FITTED:
        msg = (
            f"calibrate: about {min(share, 1):.0%} of these inputs are among those that the posterior was fitted on. "
            "P-values are then optimistic: of other known inputs, more than a share alpha may fall below alpha. "
            "Calibrate with inputs that the encoder was not trained on."
        )
        warnings.warn(msg, OptimisticPValueWarning, stacklevel=3)
    reference = Reference.of(Standard.of(known.to(values)), values)
    la._known = replace(la._known, calibration=Calibration(reference, fingerprint(la)))


def calibrated_reference(la: Any, stamp: Stamp | None = None) -> Reference | None:
    """What :func:`calibrate` left; ``None`` where it has not run since the last fit.

    Args:
        la: A fitted posterior.
        stamp: Its present state, where that is known: all weights are looked at only if it is not as it was at the last
            look. ``None`` looks at them in any case.

    Raises:
        NotFittedError: The calibration is of another posterior.
    """
    calibration: Calibration | None = la._known.calibration
    if calibration is None:
        return None
    if stamp is not None and calibration.confirmed.holds(stamp):
        return calibration.reference
    if not same_posterior(calibration.fingerprint, fingerprint(la)):
        msg = (
            "p_value: la was calibrated for another posterior: since then its prior precision, its temperature or "
            "the encoder's weights have changed. Call la.calibrate(loader) again."
        )
        raise NotFittedError(msg)
    if stamp is not None:
        calibration.confirmed.remember(stamp, la)
    return calibration.reference


def _share_found(sample: Tensor, values: Tensor) -> float:
    """Share of the rows of ``sample`` (m, K) that ``values`` (n, K) have too, up to rounding."""
    order = values[:, 0].argsort()
    first, rest = values[order, 0].contiguous(), values[order]
    # Of the neighbours in the order of the first component, one has all components where the row is there.
    place = torch.searchsorted(first, sample[:, 0].contiguous())
    near = (place.unsqueeze(1) + torch.arange(-2, 3, device=place.device)).clamp(0, len(values) - 1)
    return float(((rest[near] - sample.unsqueeze(1)).abs() < _SAME).all(2).any(1).double().mean())


def training_sample(la: Any, features: Rows | None, earlier: int) -> TrainingSample | None:
    """The sample of training inputs after a fit.

    Args:
        la: The posterior, before it takes the new curvature.
        features: Features that the fit has drawn.
        earlier: Number of points of earlier fits that this one adds to.

    Returns:
        The sample, or ``None`` where there is none of all the data at the present weights.
    """
    # Of an encoder that is one linear layer, a fit of all weights draws features too, which its statistic has not.
    if features is None or not len(features) or not la.keeps_features:
        return None
    encoder = encoder_fingerprint(la.model)
    if not earlier:
        return TrainingSample(features, encoder)
    before: TrainingSample | None = la._known.sample
    if before is None or not same_encoder(before.encoder, encoder):
        return None
    return TrainingSample(before.features.merged(features), encoder)


def _observe(la: Any, x: Inputs | Features) -> tuple[EmbeddingDistribution, Tensor | None]:
    """The distribution of B embeddings, and the norms (B,) of the features, where the posterior knows them."""
    if not la.keeps_features:
        return la._gaussian(x, False, False), None
    z, phi = la._features(x)
    out = la._gaussian(Features(z, phi), False, False)
    return out, _norms(phi.detach())


def _norms(phi: Tensor) -> Tensor:
    """Norms of the rows, shape (B,), float64."""
    # In chunks that stay in the cache; the conversion within vector_norm is several times slower.
    step = max(1, _CACHED // max(1, phi.shape[1]))
    return torch.cat([torch.linalg.vector_norm(rows.double(), dim=1) for rows in phi.split(step)])


def _components_of(la: Any, x: Inputs, number: int) -> Tensor:
    """Components (B, K) of a batch; an error of its inputs names the batch."""
    try:
        # Inputs with one axis more than those of the fit may pass the encoder, and fail only after it.
        with torch.no_grad(), naming_the_input(x):
            out, norm = _observe(la, x)
            _check_shape(out.raw_mean, input_length(x), la.n_outputs)
            return components(out, norm)
    except InputError as error:
        msg = f"loader: batch {number} (counted from 0): {error}"
        raise InputError(msg) from error


def _check_shape(mean: Tensor, n: int, dim: int) -> None:
    if mean.shape != (n, dim):
        wanted = f"inputs with outputs of shape ({n}, {dim})"
        raise InputError(expected("x", wanted, f"outputs of shape {tuple(mean.shape)}"))


def _inputs_of(batch: Any) -> Any:
    """The inputs of what a loader yields; labels are not used."""
    if is_texts(batch):
        return batch
    if isinstance(batch, (tuple, list)):
        if len(batch) not in (1, 2):
            wanted = "batches (x, labels), or of inputs alone"
            raise InputTypeError(expected("loader", wanted, f"a {type(batch).__name__} of {len(batch)}"))
        return batch[0]
    if not isinstance(batch, (Tensor, Mapping)):
        wanted = "batches (x, labels), or of inputs alone"
        raise InputTypeError(expected("loader", wanted, f"a {type(batch).__name__}"))
    return batch


def _reference_of(la: Any, quiet: bool, stamp: Stamp) -> Reference:
    """The calibration of a posterior in the state ``stamp``, or its training inputs.

    Raises:
        NotFittedError: There is neither, or the calibration is of another posterior.
    """
    calibrated = calibrated_reference(la, stamp)
    if calibrated is not None:
        return calibrated
    known = _training_components(la)
    if known is None:
        reason = "la is not calibrated, and has no inputs of its fit to compare with at the encoder's present weights"
        msg = f"p_value: {reason}. {_CALIBRATE}"
        raise NotFittedError(msg)
    if not la._known.warned and not quiet:
        la._known = replace(la._known, warned=True)
        msg = (
            "p_value: la is not calibrated, so p-values are relative to inputs that the encoder was trained on. They "
            f"are optimistic: of other known inputs, more than a share alpha may fall below alpha. {_CALIBRATE}"
        )
        warnings.warn(msg, OptimisticPValueWarning, stacklevel=6)
    return Reference.of(Standard.of(known), known)


def _present_sample(la: Any) -> Rows | None:
    """The sample of training inputs, where there is one of the encoder's present weights."""
    sample: TrainingSample | None = la._known.sample
    if sample is None or not same_encoder(sample.encoder, encoder_fingerprint(la.model)):
        return None
    return sample.features


def _training_components(la: Any) -> Tensor | None:
    """Components (m, K) of the sample of training inputs under the present posterior, where there is one."""
    sample = _present_sample(la)
    if sample is None:
        return None
    now = fingerprint(la)
    if la._known.training is None or not same_posterior(la._known.training[0], now):
        layer, found = la.model.last_layer, []
        with torch.no_grad():
            for rows in sample.columns["features"].split(_AT_ONCE):
                phi = rows.to(layer.weight)
                z = torch.nn.functional.linear(phi, layer.weight, layer.bias)
                features = Features(at_least_float32(z), at_least_float32(phi))
                found.append(components(*_observe(la, features)))
        la._known = replace(la._known, training=(now, torch.cat(found)))
    return la._known.training[1]

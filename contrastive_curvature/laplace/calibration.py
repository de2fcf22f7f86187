"""``la.calibrate(loader)``: conformal p-values of whether an input is of the kind that the encoder knows.

A conformal p-value (Vovk, Gammerman and Shafer, 2005) compares the statistic of an input with those of n known inputs:
``(1 + #{known >= s}) / (n + 1)``. Where the input and the n known ones are exchangeable, it is at most alpha with a
probability of at most alpha. That needs a statistic that treats all of them alike, so the location and scale that its
components are standardised with come from other inputs: the training data, or a part of the calibration data that is
then not compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import (
    NOVELTY,
    UNCERTAINTY,
    OptimisticPValueWarning,
    Reference,
    TrainingGaussians,
    check_alpha,
    components,
    feature_norms,
    held_out_distances,
    split,
)
from contrastive_curvature.embedding.spread import taken
from contrastive_curvature.errors import InputError, NotFittedError, expected
from contrastive_curvature.laplace.features import Features
from contrastive_curvature.laplace.prediction import check_outputs
from contrastive_curvature.laplace.score import Score, predicted_classes
from contrastive_curvature.network.call import naming_the_input
from contrastive_curvature.network.digest import ModuleTables, encoder_fingerprint, same_encoder, summary, versions
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.network.inputs import check_inputs, tokenized
from contrastive_curvature.network.loader import check_loader, inputs_alone
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.progress import Progress

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace

_AT_ONCE = 256
"""Training inputs of one prediction: a covariance for each of them has D^2 numbers."""

RIVALS = ("mahalanobis_outputs", "mahalanobis_relative", "knn_features")
"""Other scores of whether an input is known."""

_NEAREST = 10
"""Training inputs whose mean distance is a score."""

_PROJECTIONS = 8
"""Random directions in which the features of two inputs are compared."""

_SAME = 1e-5
"""Directions and log norms of the features of one input in another batch differ less, in float32."""

_ALIKE = 0.01
"""Where more than this share of the training inputs agree (blank images, a dead layer), agreement says nothing."""

_MOST_FITTED = 0.1
"""Share of the calibration inputs that may be of the fit. At this much, a share ``alpha`` of known inputs that is
flagged grows by a ninth at most."""

_OWN = 5
"""Numbers of a posterior's fingerprint before those of the encoder."""

_NO_FINGERPRINT = torch.empty(0)

_OPTIMISTIC = "P-values are then optimistic: of other known inputs, more than a share alpha may fall below alpha."

_CALIBRATE = "Call la.calibrate(loader) with known inputs, best those that the encoder was not trained on."


@dataclass(frozen=True, eq=False)
class Stamp:
    """State of a posterior at a prediction, without a look at the encoder's weights.

    Attributes:
        counted: How often the curvature was set, the temperature, the version of the prior precision, and how often
            torch saw each of the tensors change.
        parts: The prior precision, and modules, parameters and saved buffers of the encoder; while they are held, no
            other object has their identity or memory.
        prior: Copy of the prior precision.
        tables: Where the parts of the encoder are found.
        spots: Some entries of the weights, where others may train them.
    """

    counted: tuple[Any, ...]
    parts: list[Any]
    prior: Tensor
    tables: ModuleTables
    spots: Tensor | None

    @classmethod
    def of(cls, la: ContrastiveLaplace) -> Stamp:
        """Return the present state of a posterior: the same object as long as it is unchanged."""
        last = la.stamp
        tables = ModuleTables(la.model) if last is None or last.parts[0] is not la.model else last.tables
        prior, parts = la.prior_precision, tables.present()
        tensors = [part for part in parts if isinstance(part, Tensor)]
        counted = (la.known.fits, la.temperature, versions([prior]), versions(tensors))
        parts = [la.model, prior, *parts]
        spots = _spots(tensors) if la.shares_encoder else None
        same = last is not None and last.counted == counted and not any(map(is_not, last.parts, parts))
        if last is None or not same or not _equal(last.spots, spots):
            last = la.stamp = cls(counted, parts, prior.detach().clone(), tables, spots)
        return last

    def equals(self, now: Stamp) -> bool:
        """Return whether the posterior is unchanged; another prior precision of the same value is no change."""
        if self is now:
            return True
        (fits, temperature, _, seen), (fits_now, temperature_now, _, seen_now) = self.counted, now.counted
        same = (fits, temperature, seen) == (fits_now, temperature_now, seen_now) and _equal(self.spots, now.spots)
        return same and not any(map(is_not, self.parts[2:], now.parts[2:])) and torch.equal(self.prior, now.prior)


def _fingerprint(la: ContrastiveLaplace) -> Tensor:
    """Return the numbers of temperature and prior precision, then those of the encoder: shape (9,), float64."""
    temperature = torch.tensor([la.temperature], dtype=torch.float64)
    return torch.cat([temperature, summary([la.prior_precision]), encoder_fingerprint(la.model)])


def _same_posterior(first: Tensor, second: Tensor) -> bool:
    """Return whether two fingerprints are of one posterior, up to the order of sums on another device."""
    own = first.shape == second.shape and torch.allclose(first[:_OWN], second[:_OWN], rtol=1e-12, atol=0)
    return own and same_encoder(first[_OWN:], second[_OWN:])


@dataclass(frozen=True)
class Calibration:
    """Known inputs that others are compared with.

    Attributes:
        reference: Their scores.
        fingerprint: Of the posterior that they belong to.
        score: What the score is.
        gaussians: Of training inputs, where there was a sample of them.
    """

    reference: Reference
    fingerprint: Tensor
    score: Score = field(default_factory=Score)
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
        return TrainingGaussians.of(*self._given())

    @cached_property
    def held_out(self) -> Tensor:
        """Their distances under Gaussians of others, shape (m, 1) or (m, 2); made when first asked for."""
        return held_out_distances(*self._given())

    def _given(self) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = self.features.columns
        return columns["features"], self.outputs, columns.get("classes")


@dataclass(frozen=True)
class KnownInputs:
    """Known inputs that a posterior remembers; replaced as a whole.

    Attributes:
        fits: How often the curvature was set.
        sample: Some inputs of ``fit``.
        training: Fingerprint of the posterior and components (m, K) of the sample under it.
        calibration: From :func:`calibrate`.
        seen: State in which all weights were last seen to be those of the calibration.
        warned: Whether it has said that p-values without calibration are optimistic.
    """

    fits: int = 0
    sample: TrainingSample | None = None
    training: tuple[Tensor, Tensor] | None = None
    calibration: Calibration | None = None
    seen: Stamp | None = None
    warned: bool = False

    @property
    def gaussians(self) -> TrainingGaussians | None:
        """Gaussians of training inputs that a novelty takes into account."""
        source = self.calibration or self.sample
        return None if source is None else source.gaussians

    def anew(self, calibration: Calibration | None = None) -> KnownInputs:
        """Return what remains once the curvature is another."""
        return KnownInputs(fits=self.fits + 1, calibration=calibration, warned=self.warned)


@dataclass
class Judge:
    """Answers what the embeddings of one prediction ``la(x)`` are asked about known inputs.

    Attributes:
        la: The posterior that made it.
        stamp: Its state then.
        features: Features, shape (B, F).
        values: Components (B, 3) of the embeddings, once they are known.
        distances: Distances (B, 1) or (B, 2) to training inputs, once they are known.
        unrounded: Uncertainties and predicted classes (B, 2) of embeddings that were rounded.
    """

    la: ContrastiveLaplace
    stamp: Stamp
    features: Tensor | None
    values: Tensor | None = None
    distances: Tensor | None = None
    unrounded: Tensor | None = None

    @property
    def known_scores(self) -> list[str]:
        """Names of what can be asked without a warning: p-values where the posterior is calibrated."""
        if self.la.known.calibration is not None:
            return ["novelty", "p_value"]
        return [] if _present_sample(self.la) is None else ["novelty"]

    def novelty(self, embedding: EmbeddingDistribution) -> Tensor:
        """Return the novelty, shape (B,)."""
        return self._known(compared=False).reference.novelty(self._components(embedding))

    def p_value(self, embedding: EmbeddingDistribution) -> Tensor:
        """Return p-values, shape (B,)."""
        return self._p_value(embedding, self._known())

    def is_known(self, embedding: EmbeddingDistribution, alpha: float) -> Tensor:
        """Return whether the p-values are above ``alpha``, shape (B,)."""
        check_alpha(alpha)
        known = self._known()
        n, by_class = known.reference.fewest, known.score.by_class
        # What the error says needs a look at the whole encoder.
        splits = alpha < 1 / (n + 1) and known.score.name == NOVELTY and _present_sample(self.la) is None
        check_alpha(alpha, n, splits, by_class)
        return self._p_value(embedding, known) > alpha

    def scores(self, embedding: EmbeddingDistribution) -> Tensor:
        """Return the score that p-values are of, float64, shape (B,)."""
        return self._scores(embedding, self._known(compared=False))

    def rivals(self, embedding: EmbeddingDistribution) -> dict[str, Tensor]:
        """Return other scores of whether inputs are known, as far as there are training inputs for them, shape (B,)."""
        distances, found = self._distances(embedding), {}
        if distances is not None:
            found = dict(zip(RIVALS, distances.unbind(1), strict=False))
        sample = _present_sample(self.la)
        if sample is not None and self.features is not None:
            stored = normalize(sample.features.columns["features"].to(self.features))
            near = (normalize(self.features) @ stored.T).topk(min(_NEAREST, len(stored))).values
            found[RIVALS[-1]] = (2 - 2 * near).clamp(min=0).sqrt().mean(1)
        return found

    def _p_value(self, embedding: EmbeddingDistribution, known: Calibration) -> Tensor:
        scores, classes = self._scores(embedding, known), None
        if known.score.by_class:
            before = self.unrounded
            classes = predicted_classes(embedding) if before is None else before[:, 1].long()
        return known.reference.p_value(scores, classes)

    def _scores(self, embedding: EmbeddingDistribution, known: Calibration) -> Tensor:
        known.score.check(self.la, embedding)
        if known.score.name == NOVELTY:
            return known.reference.novelty(self._components(embedding))
        if known.score.name == UNCERTAINTY and self.unrounded is not None:
            return self.unrounded[:, 0].to(embedding.raw_mean.device)
        return known.score.of(embedding)

    def rows(self, rows: Tensor) -> Judge:
        """Return the judge of some of the embeddings; -1 is a row of NaN."""

        def of_rows(value: Tensor | None) -> Tensor | None:
            return None if value is None else taken(value, rows.to(value.device))

        features, values, distances, unrounded = map(
            of_rows, (self.features, self.values, self.distances, self.unrounded)
        )
        return replace(self, features=features, values=values, distances=distances, unrounded=unrounded)

    def to(self, device: torch.device) -> Judge:
        """Return the same judge, whose features do not stay on another device."""
        return self if self.features is None else replace(self, features=self.features.to(device))

    def fixed(self, embedding: EmbeddingDistribution) -> Judge:
        """Return a judge that no longer looks at the embedding, which is about to be rounded."""
        before = self.unrounded if self.unrounded is not None else _unrounded(embedding)
        values, distances = self._values(embedding), self._distances(embedding)
        return replace(self, features=None, values=values, distances=distances, unrounded=before)

    def joined(self, judges: Sequence[Judge | None], embeddings: Sequence[EmbeddingDistribution]) -> Judge | None:
        """Return the judge of a concatenation that begins with this one's embedding, if there is one of all parts."""
        rounded, parts = any(judge is not None and judge.unrounded is not None for judge in judges), []
        for judge, embedding in zip(judges, embeddings, strict=True):
            if judge is None or judge.la is not self.la or not judge.stamp.equals(self.stamp):
                return None
            parts.append(judge.fixed(embedding) if rounded else judge)
        pairs = list(zip(parts, embeddings, strict=True))
        values = torch.cat([part._values(embedding) for part, embedding in pairs])
        # Not the features of all parts, which may be of a whole data set.
        distances = [found for part, embedding in pairs if (found := part._distances(embedding)) is not None]
        whole = torch.cat(distances) if len(distances) == len(parts) else None
        before = torch.cat([part.unrounded for part in parts if part.unrounded is not None]) if rounded else None
        return replace(self, features=None, values=values, distances=whole, unrounded=before)

    def _components(self, embedding: EmbeddingDistribution) -> Tensor:
        return _with_distances(self._values(embedding), self._distances(embedding))

    def _values(self, embedding: EmbeddingDistribution) -> Tensor:
        device = embedding.raw_mean.device
        if self.values is None:
            norm = None if self.features is None else feature_norms(self.features).to(device)
            self.values = components(embedding, norm)
        return self.values.to(device)

    def _distances(self, embedding: EmbeddingDistribution) -> Tensor | None:
        gaussians = self.la.known.gaussians
        if gaussians is None:
            return None
        if self.distances is None and self.features is not None:
            self.distances = gaussians(self.features, embedding.raw_mean.detach().to(self.features.device))
        return self.distances

    def _known(self, compared: bool = True) -> Calibration:
        """Return the calibration, or the training inputs where there is none; refuse those of another posterior.

        Training inputs that others are ``compared`` with must not be those that the Gaussians were fitted to.
        """
        la, now = self.la, Stamp.of(self.la)
        if not self.stamp.equals(now):
            wanted = "the posterior as it was when it made this prediction"
            received = "one with another curvature, prior precision, temperature or encoder"
            raise InputError(expected("p_value", wanted, received, "Call la(x) again."))
        calibrated = present_calibration(la, now)
        if calibrated is not None:
            return calibrated
        known = _training_components(la)
        if known is None:
            msg = f"p_value: la is not calibrated, and has no inputs of a fit at the present weights. {_CALIBRATE}"
            raise NotFittedError(msg)
        scored = _with_distances(known[:, :3], la.known.sample.held_out) if compared else known  # type: ignore[union-attr]
        if compared and not la.known.warned:
            la.known = replace(la.known, warned=True)
            msg = f"p_value: la is not calibrated, and compares with inputs of the training. {_OPTIMISTIC} {_CALIBRATE}"
            warnings.warn(msg, OptimisticPValueWarning, stacklevel=5)
        return Calibration(Reference.of(known, scored), _NO_FINGERPRINT, gaussians=la.known.gaussians)


def _unrounded(embedding: EmbeddingDistribution) -> Tensor:
    """Return uncertainties and predicted classes (B, 2), float64; zeros for classes without centres."""
    angle = embedding.uncertainty.detach().double()
    classes = torch.zeros_like(angle) if embedding._class_centres is None else predicted_classes(embedding)
    return torch.stack([angle, classes.to(angle)], dim=1)


def judged(la: ContrastiveLaplace, found: EmbeddingDistribution, features: Tensor | None) -> EmbeddingDistribution:
    """Return a prediction with the judge that its p-value asks, which holds the features (B, F), if known."""
    # A copy: they may be the inputs themselves, and the user's to change.
    found._judge = Judge(la, Stamp.of(la), None if features is None else features.detach().clone())
    return found


def _with_distances(values: Tensor, distances: Tensor | None) -> Tensor:
    """Return all components (B, K)."""
    return values if distances is None else torch.cat([values, distances.to(values)], dim=1)


def calibrate(
    la: ContrastiveLaplace,
    loader: Iterable[Any],
    progress_bar: bool | None = None,
    score: Any = NOVELTY,
    by_class: bool = False,
) -> None:
    """Do what :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.calibrate` says."""
    la.check_fitted()
    if progress_bar is not None:
        validate.flag("progress_bar", progress_bar)
    check_loader(loader, "loader", once=True)
    chosen = Score.chosen(la, score, by_class)
    gaussians = _training_gaussians(la)
    found = [
        _measured(la, batch, number, chosen, gaussians)
        for number, batch in enumerate(Progress(progress_bar).over(loader, "[calibration]"))
    ]
    measured, sketches = map(torch.cat, zip(*found, strict=True)) if found else (torch.empty(0), torch.empty(0))
    if len(measured) < 2:
        hint = "A p-value of 1 / (n + 1) needs n of them."
        raise InputError(expected("loader", "at least two known inputs", f"{len(measured)}", hint))
    known = _training_components(la)
    if known is None:
        known = measured
        if chosen.name == NOVELTY:
            # Of other scores nothing is standardised.
            known, measured = split(measured)
        known = known[:, :-2]
    else:
        sample = _sketch(la.known.sample.features.columns["features"])  # type: ignore[union-attr]
        if (share := _share_fitted(sketches, sample.to(sketches), la.n_data)) > _MOST_FITTED:
            msg = (
                f"calibrate: about {min(share, 1):.0%} of these inputs are among those that the posterior was fitted "
                f"on. {_OPTIMISTIC} {_CALIBRATE}"
            )
            warnings.warn(msg, OptimisticPValueWarning, stacklevel=3)
    reference = Reference.of(
        known.to(measured),
        measured[:, :-2],
        measured[:, -1].long() if by_class else None,
        len(la.class_centres.labels) if la.class_centres is not None else 1,
        None if chosen.name == NOVELTY else measured[:, -2],
        chosen.name,
    )
    calibration = Calibration(reference, _fingerprint(la), chosen, gaussians)
    la.known = replace(la.known, calibration=calibration, seen=Stamp.of(la))


def set_score(la: ContrastiveLaplace, score: Any) -> None:
    """Do what :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.set_score` says."""
    calibration = la.known.calibration
    if calibration is None:
        msg = f"set_score: la is not calibrated. {_CALIBRATE}"
        raise NotFittedError(msg)
    la.known = replace(la.known, calibration=replace(calibration, score=calibration.score.given(la, score)))


def present_calibration(la: ContrastiveLaplace, now: Stamp | None = None) -> Calibration | None:
    """Return the calibration, if it is of the present posterior; ``None`` where there is none since the last fit.

    All weights are looked at only where torch has counted a change since the last look.
    """
    calibration = la.known.calibration
    if calibration is None:
        return None
    now = Stamp.of(la) if now is None else now
    if la.known.seen is None or not la.known.seen.equals(now):
        if not _same_posterior(calibration.fingerprint, _fingerprint(la)):
            msg = (
                "p_value: la was calibrated for another posterior: since then its prior precision, its temperature or "
                "the encoder's weights have changed. Call la.calibrate(loader) again."
            )
            raise NotFittedError(msg)
        la.known = replace(la.known, seen=now)
    return calibration


def _spots(tensors: Iterable[Tensor]) -> Tensor:
    """Return eight entries of each weight: fused optimizers, and writes to ``.data``, change weights but no version."""
    found = []
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            some = tensor.detach().as_strided((8,), (extent // 7,), tensor.storage_offset())
            found.append(some.to(device="cpu", dtype=torch.float64))
    return torch.cat(found) if found else torch.empty(0)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _sketch(phi: Tensor) -> Tensor:
    """Return log norms of features (B, F), and random projections of their directions; float64, shape (B, 9)."""
    norm = feature_norms(phi).clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)
    axes = torch.randn(phi.shape[1], _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([phi.double() / norm @ axes.to(phi.device), norm.log()], dim=1)


def _share_fitted(given: Tensor, sample: Tensor, n_data: int) -> float:
    """Estimate which share of inputs, by their sketches (n, K), is among the ``n_data`` inputs of a fit.

    Of these, m are kept, with sketches (m, K): a match with one of them stands for ``n_data / m``; one with several
    does not, as such an input would be kept most likely. Subtracted is what chance explains: as many matches as there
    are misses by one to two times the tolerance, and three standard errors of the difference.
    """
    found = []
    for rows in given.split(_AT_ONCE):
        # Of most pairs the first number tells them apart.
        row, other = ((rows[:, :1] - sample[:, 0]).abs() < 2 * _SAME).nonzero().unbind(1)
        apart = (rows[row] - sample[other]).abs().amax(1)
        same, close = (row[apart < size].bincount(minlength=len(rows)) for size in (_SAME, 2 * _SAME))
        told = torch.stack([same == 1, same > 1, close > same], dim=1).double()
        found.append(told[same <= max(2, _ALIKE * len(sample))])
    told = torch.cat(found)
    once, several, chance = told.mean(0).nan_to_num().tolist()
    return several + max(1, n_data / len(sample)) * (once - chance - 3 * (2 * chance / max(1, len(told))) ** 0.5)


def _measured(
    la: ContrastiveLaplace, batch: Any, number: int, score: Score, gaussians: TrainingGaussians | None
) -> tuple[Tensor, Tensor]:
    """Return components, another score and predicted classes (B, K + 2), and sketches (B, 9) of a batch, float64.

    Labels are not used. The last two are zero where they are not asked for. An error names the batch.
    """
    x = tokenized(la.model, inputs_alone(batch), "loader: inputs of a batch")
    x = check_inputs(x, "loader: inputs of a batch")
    try:
        # Inputs with one axis more than those of the fit may pass the encoder, and fail only after it.
        with torch.no_grad(), naming_the_input(x):
            out, phi = la.observe(x)
            check_outputs(x, out.raw_mean, la.n_outputs)
            found = _observed(out, phi, gaussians)
            out.relative_to(la.typical_norm, la.class_centres)
            scores = found.new_zeros(len(found)) if score.name == NOVELTY else score.of(out)
            classes = predicted_classes(out) if score.by_class else torch.zeros_like(scores)
            found = torch.cat([found, torch.stack([scores, classes.to(scores)], dim=1)], dim=1)
            return found, found.new_empty(len(found), 0) if phi is None else _sketch(phi)
    except InputError as error:
        msg = f"loader: batch {number} (counted from 0): {error}"
        raise InputError(msg) from error


def _observed(out: EmbeddingDistribution, phi: Tensor | None, gaussians: TrainingGaussians | None) -> Tensor:
    """Return the components (B, K) of embeddings with these features (B, F)."""
    if phi is None:
        return components(out)
    return _with_distances(
        components(out, feature_norms(phi)), None if gaussians is None else gaussians(phi, out.raw_mean)
    )


def _training_gaussians(la: ContrastiveLaplace) -> TrainingGaussians | None:
    """Return the Gaussians of training inputs, where there are some of the encoder's present weights."""
    sample, before = _present_sample(la), la.known.calibration
    if sample is not None:
        return sample.gaussians
    # A loaded posterior has no sample.
    same = before is not None and same_encoder(before.fingerprint[_OWN:], encoder_fingerprint(la.model))
    return before.gaussians if before is not None and same else None


def _present_sample(la: ContrastiveLaplace) -> TrainingSample | None:
    """Return the sample of training inputs, where there is one of the encoder's present weights."""
    sample = la.known.sample
    if sample is None or not same_encoder(sample.encoder, encoder_fingerprint(la.model)):
        return None
    return sample


def _training_components(la: ContrastiveLaplace) -> Tensor | None:
    """Return all components (m, K) of the sample of training inputs under the present posterior, where there is one."""
    sample = _present_sample(la)
    if sample is None:
        return None
    now = _fingerprint(la)
    if la.known.training is None or not _same_posterior(la.known.training[0], now):
        weight, found = la.model.last_layer.weight, []
        with torch.no_grad():
            features = sample.features.columns["features"].split(_AT_ONCE)
            for phi, z in zip(features, sample.outputs.split(_AT_ONCE), strict=True):
                phi, z = (at_least_float32(part.to(weight)) for part in (phi, z))
                out = la.observe(Features(z, phi))
                found.append(_observed(*out, sample.gaussians))
        la.known = replace(la.known, training=(now, torch.cat(found)))
    return la.known.training[1]  # type: ignore[index]

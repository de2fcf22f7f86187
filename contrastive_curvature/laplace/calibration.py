"""``la.calibrate(loader)``: conformal p-values that say whether the encoder knows this kind of input.

A conformal p-value (Vovk, Gammerman and Shafer, 2005) compares the statistic of an input with the statistics of n known
inputs: ``(1 + #{known >= s}) / (n + 1)``. If the input and the n known inputs are exchangeable, the p-value is at most
alpha with a probability of at most alpha. The statistic must therefore treat all these inputs alike. So the components
of the statistic are standardised with the location and scale of other inputs: the training data, or a part of the
calibration data that is then excluded from the comparison.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import (
    NOVELTY,
    Calibration,
    Known,
    OptimisticPValueWarning,
    Reference,
    TrainingGaussians,
    TrainingInputs,
    TrainingSample,
    feature_norms,
    measure,
    split,
)
from contrastive_curvature.embedding.score import Score, made_up
from contrastive_curvature.errors import InputError, NotFittedError
from contrastive_curvature.laplace.prediction import at_features, check_outputs
from contrastive_curvature.network.call import naming_the_input
from contrastive_curvature.network.digest import same_encoder, summary, versions
from contrastive_curvature.network.inputs import check_inputs, tokenized
from contrastive_curvature.network.loader import check_loader, inputs_alone
from contrastive_curvature.progress import Progress

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace

_AT_ONCE = 256
"""Inputs whose features are compared at once."""

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

_OPTIMISTIC = "P-values are then optimistic: of other known inputs, more than a share alpha may fall below alpha."

_CALIBRATE = "Call la.calibrate(loader) with known inputs, best those that the encoder was not trained on."

_COMPARES_WITH_TRAINING = (
    f"p_value: la is not calibrated, and compares with inputs of the training. {_OPTIMISTIC} {_CALIBRATE}"
)

_NOTHING = Known(
    refusal=f"p_value: la is not calibrated, and has no inputs of a fit at the present weights. {_CALIBRATE}"
)


_OUTDATED = (
    "p_value: la was calibrated for another posterior: since then its prior precision, its temperature or the "
    "encoder's weights have changed. Call la.calibrate(loader) again."
)


@dataclass(frozen=True)
class KnownInputs:
    """Known inputs that a posterior stores; always replaced as a whole.

    Attributes:
        sample: Sample of the inputs of ``fit``.
        calibration: Result of :func:`calibrate`.
        optimism: List with the warning for the first p-value against training inputs; empty after that warning.
    """

    sample: TrainingSample | None = None
    calibration: Calibration | None = None
    optimism: list[str] = field(default_factory=lambda: [_COMPARES_WITH_TRAINING])


class Snapshot(NamedTuple):
    """A state of a posterior, and the known inputs for its predictions.

    Attributes:
        parts: Known inputs, fingerprint of the encoder, and prior precision; while the snapshot holds these objects, no
            other object can have their ``id``.
        counted: Temperature, and version of the prior precision.
        fingerprint: Numbers for temperature and prior precision, then for the encoder; shape (9,), float64.
        training: Sample of training inputs in this state, if one exists for the present weights of the encoder.
        known: Data about known inputs for predictions, without the features of the predictions.
    """

    parts: tuple[Any, ...]
    counted: tuple[Any, ...]
    fingerprint: Tensor
    training: TrainingInputs | None
    known: Known


def take_snapshot(la: ContrastiveLaplace) -> Snapshot:
    """Return the present state of a posterior; an unchanged posterior returns the same object.

    The weights are read only if torch has counted a change since the last call, or if other code trains them.
    """
    last, prior, encoder = la.snapshot, la.prior_precision, la.watch(la.model)
    parts, counted = (la.known, encoder, prior), (la.temperature, versions([prior]))
    if last is not None and last.counted == counted and not any(map(is_not, last.parts, parts)):
        return last
    temperature = torch.tensor([la.temperature], dtype=torch.float64)
    fingerprint = torch.cat([temperature, summary([prior]), encoder])
    if last is not None and _same_posterior(last.fingerprint, fingerprint) and last.parts[0].sample is la.known.sample:
        training = last.training
    else:
        training = _training_inputs(la, encoder)
    la.snapshot = Snapshot(parts, counted, fingerprint, training, _known(la.known, fingerprint, training))
    return la.snapshot


def _known(inputs: KnownInputs, fingerprint: Tensor, training: TrainingInputs | None) -> Known:
    """Return the data about known inputs for predictions of a posterior with this fingerprint."""
    calibration, splits = inputs.calibration, training is None
    if calibration is not None:
        names = ("novelty", "p_value")
        if not _same_posterior(calibration.fingerprint, fingerprint):
            return Known(refusal=_OUTDATED, names=names)
        return Known(calibration.reference, calibration.gaussians, calibration.score, names=names, splits=splits)
    if training is None:
        return _NOTHING
    return Known(training=training, names=("novelty",), optimism=inputs.optimism)


def _training_inputs(la: ContrastiveLaplace, encoder: Tensor) -> TrainingInputs | None:
    """Return the training inputs in the present state, if a sample for the present weights exists."""
    sample = la.known.sample
    if sample is None or not same_encoder(sample.encoder, encoder):
        return None
    with torch.no_grad():
        return TrainingInputs(sample, partial(at_features, la.output_spread(), la.model.last_layer.weight.new_empty(0)))


def attach_known(
    la: ContrastiveLaplace, prediction: EmbeddingDistribution, features: Tensor | None
) -> EmbeddingDistribution:
    """Attach the data about known inputs, and features (B, F) if any, to a prediction, and return it."""
    nothing = la.known.sample is None and la.known.calibration is None
    known = _NOTHING if nothing else take_snapshot(la).known
    # A copy, because features may be the inputs themselves, which the user may change.
    kept = None if features is None or known.empty else features.detach().clone()
    prediction._known = known if kept is None else replace(known, features=kept)
    return prediction


def rivals(la: ContrastiveLaplace, embedding: EmbeddingDistribution) -> dict[str, Tensor]:
    """Return alternative novelty scores, shape (B,) each; only scores whose training inputs are available."""
    known, training = embedding._asked("rivals").measured(embedding), take_snapshot(la).training
    scores = dict(zip(RIVALS, known.values[:, 3:].unbind(1), strict=False))  # type: ignore[index]
    if training is not None and known.features is not None:
        stored = normalize(training.sample.features.columns["features"].to(known.features))
        near = (normalize(known.features) @ stored.T).topk(min(_NEAREST, len(stored))).values
        scores[RIVALS[-1]] = (2 - 2 * near).clamp(min=0).sqrt().mean(1)
    return scores


def _same_posterior(first: Tensor, second: Tensor) -> bool:
    """Return whether two fingerprints belong to one posterior, up to the order of sums on another device."""
    own = first.shape == second.shape and torch.allclose(first[:_OWN], second[:_OWN], rtol=1e-12, atol=0)
    return own and same_encoder(first[_OWN:], second[_OWN:])


def example(la: ContrastiveLaplace) -> EmbeddingDistribution:
    """Return made-up embeddings of a posterior, the same in every process."""
    return made_up(la.mean.new_empty(0, la.n_outputs), la.typical_norm, la.class_centres)


def calibrate(
    la: ContrastiveLaplace,
    loader: Iterable[Any],
    progress_bar: bool | None,
    score: Any,
    by_class: bool,
) -> None:
    """Implement :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.calibrate`."""
    la.check_fitted()
    check_loader(loader, "loader", once=True)
    chosen = Score.chosen(example(la), score, by_class)
    now = take_snapshot(la)
    gaussians = _training_gaussians(la, now)
    batches = [
        _measured(la, batch, number, chosen, gaussians)
        for number, batch in enumerate(Progress(progress_bar).over(loader, "[calibration]"))
    ]
    measured, sketches = map(torch.cat, zip(*batches, strict=True)) if batches else (torch.empty(0), torch.empty(0))
    if len(measured) < 2:
        hint = "A p-value of 1 / (n + 1) needs n of them."
        raise InputError("loader", "at least two known inputs", f"{len(measured)}", hint)
    if now.training is None:
        known = measured
        if chosen.name == NOVELTY:
            # Other scores are not standardised, so they need no split.
            known, measured = split(measured)
        known = known[:, :-2]
    else:
        known = now.training.values
        sample = _sketch(now.training.sample.features.columns["features"])
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
    la.known = replace(la.known, calibration=Calibration(reference, now.fingerprint, chosen, gaussians))


def set_score(la: ContrastiveLaplace, score: Any) -> None:
    """Implement :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.set_score`."""
    calibration = la.known.calibration
    if calibration is None:
        raise NotFittedError(f"set_score: la is not calibrated. {_CALIBRATE}")
    la.known = replace(la.known, calibration=replace(calibration, score=calibration.score.given(example(la), score)))


def present_calibration(la: ContrastiveLaplace) -> Calibration | None:
    """Return the calibration, ``None`` without one; raise if it belongs to another state of the posterior."""
    if la.known.calibration is not None and (refusal := take_snapshot(la).known.refusal) is not None:
        raise NotFittedError(refusal)
    return la.known.calibration


def _sketch(phi: Tensor) -> Tensor:
    """Return random projections of the directions of features (B, F), and the log norms; float64, shape (B, 9)."""
    norm = feature_norms(phi).clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)
    axes = torch.randn(phi.shape[1], _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([phi.double() / norm @ axes.to(phi.device), norm.log()], dim=1)


def _share_fitted(sketches: Tensor, sample: Tensor, n_data: int) -> float:
    """Estimate the share of inputs, with sketches (n, K), that are among the ``n_data`` inputs of a fit.

    The fit kept a sample of m inputs, with sketches (m, K). A match with one of them counts ``n_data / m`` times. A
    match with several counts once, because an input that occurs often in the fit is almost surely in the sample.
    Matches by chance are subtracted: the number of near misses (one to two times the tolerance), and three standard
    errors of the difference.
    """
    several_matches = []
    for rows in sketches.split(_AT_ONCE):
        # For most pairs the first number already differs.
        row, other = ((rows[:, :1] - sample[:, 0]).abs() < 2 * _SAME).nonzero().unbind(1)
        apart = (rows[row] - sample[other]).abs().amax(1)
        same, close = (row[apart < size].bincount(minlength=len(rows)) for size in (_SAME, 2 * _SAME))
        matches = torch.stack([same == 1, same > 1, close > same], dim=1).double()
        several_matches.append(matches[same <= max(2, _ALIKE * len(sample))])
    matches = torch.cat(several_matches)
    once, several, chance = matches.mean(0).nan_to_num().tolist()
    return several + max(1, n_data / len(sample)) * (once - chance - 3 * (2 * chance / max(1, len(matches))) ** 0.5)


def _measured(
    la: ContrastiveLaplace, batch: Any, number: int, score: Score, gaussians: TrainingGaussians | None
) -> tuple[Tensor, Tensor]:
    """Return components, another score and predicted classes (B, K + 2), and sketches (B, 9) of a batch, float64.

    Labels are not used. Score and classes are zero if the calibration does not need them. An error names the batch.
    """
    x = tokenized(la.model, inputs_alone(batch), "loader: inputs of a batch")
    x = check_inputs(x, "loader: inputs of a batch")
    try:
        # Inputs with one axis more than in the fit may pass the encoder and fail only afterwards.
        with torch.no_grad(), naming_the_input(x):
            out, phi = la.observe(x)
            check_outputs(x, out.raw_mean, la.n_outputs)
            components = measure(out, phi, gaussians)
            out.relative_to(la.typical_norm, la.class_centres)
            scores = components.new_zeros(len(components)) if score.name == NOVELTY else score.of(out)
            classes = score.classes(out)
            if classes is None:
                classes = torch.zeros_like(scores)
            components = torch.cat([components, torch.stack([scores, classes], dim=1)], dim=1)
            return components, components.new_empty(len(components), 0) if phi is None else _sketch(phi)
    except InputError as error:
        raise InputError(f"loader: batch {number} (counted from 0): {error}") from error


def _training_gaussians(la: ContrastiveLaplace, now: Snapshot) -> TrainingGaussians | None:
    """Return the Gaussians of training inputs, if they exist for the present weights of the encoder."""
    if now.training is not None:
        return now.training.sample.gaussians
    # A loaded posterior has no sample.
    before = la.known.calibration
    same = before is not None and same_encoder(before.fingerprint[_OWN:], now.fingerprint[_OWN:])
    return before.gaussians if before is not None and same else None

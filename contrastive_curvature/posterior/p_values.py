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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import (
    NOVELTY,
    Calibration,
    OptimisticPValueWarning,
    Reference,
    TrainingGaussians,
    TrainingInputs,
    measure,
    split,
    unit_features,
)
from contrastive_curvature.embedding.score import Score, made_up
from contrastive_curvature.errors import InputError, NotFittedError
from contrastive_curvature.network.call import naming_the_input
from contrastive_curvature.network.digest import same_encoder
from contrastive_curvature.network.inputs import check_inputs, tokenized
from contrastive_curvature.network.loader import check_loader, in_fixed_order, inputs_alone
from contrastive_curvature.posterior.predict import LinearizedEncoder, check_outputs, observe
from contrastive_curvature.posterior.value import CALIBRATE, OPTIMISTIC, Fitted, Posterior
from contrastive_curvature.progress import Progress

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


def rivals(posterior: Posterior, read: LinearizedEncoder, embedding: EmbeddingDistribution) -> dict[str, Tensor]:
    """Return alternative novelty scores, shape (B,) each; only scores whose training inputs are available."""
    known, training = embedding._asked("rivals").measured(embedding), present_training(posterior, read)
    scores = dict(zip(RIVALS, known.values[:, 3:].unbind(1), strict=False))  # type: ignore[index]
    if training is not None and known.features is not None:
        stored = normalize(training.sample.rows.columns["features"].to(known.features))
        near = (normalize(known.features) @ stored.T).topk(min(_NEAREST, len(stored))).values
        scores[RIVALS[-1]] = (2 - 2 * near).clamp(min=0).sqrt().mean(1)
    return scores


def example(fitted: Fitted) -> EmbeddingDistribution:
    """Return made-up embeddings of a posterior, the same in every process."""
    return made_up(fitted.mean.new_empty(0, fitted.dim), fitted.typical_norm, fitted.class_centres)


def present_training(posterior: Posterior, read: LinearizedEncoder) -> TrainingInputs | None:
    """Return the sample of training inputs, unless the encoder has other weights than in the fit."""
    return posterior.training if same_encoder(posterior.fitted.encoder, read.fingerprint) else None


def calibrated(
    posterior: Posterior,
    read: LinearizedEncoder,
    loader: Iterable[Any],
    progress_bar: bool | None,
    score: Any,
    by_class: bool,
) -> Posterior:
    """Return the posterior with known inputs, see :meth:`.ContrastiveLaplace.calibrate`."""
    check_loader(loader, "loader", once=True)
    fitted, training, encoder = posterior.fitted, present_training(posterior, read), read.fingerprint
    chosen = Score.chosen(example(fitted), score, by_class)
    gaussians, before = None, posterior.calibration
    if training is not None:
        gaussians = training.sample.gaussians
    elif before is not None and same_encoder(before.encoder, encoder):
        # A loaded posterior has no sample.
        gaussians = before.gaussians
    batches = [
        _measured(posterior, read, batch, number, chosen, gaussians)
        for number, batch in enumerate(Progress(progress_bar).over(in_fixed_order(loader, "loader"), "[calibration]"))
    ]
    measured, sketches = map(torch.cat, zip(*batches, strict=True)) if batches else torch.empty(2, 0, device="cpu")
    if len(measured) < 2:
        hint = "A p-value of 1 / (n + 1) needs n of them."
        raise InputError("loader", "at least two known inputs", f"{len(measured)}", hint)
    if training is None:
        known = measured
        if chosen.name == NOVELTY:
            # Other scores are not standardised, so they need no split.
            known, measured = split(measured)
        known = known[:, :-2]
    else:
        known = training.values
        sample = _sketch(training.sample.rows.columns["features"])
        if (share := _share_fitted(sketches, sample.to(sketches), fitted.n)) > _MOST_FITTED:
            msg = (
                f"calibrate: about {min(share, 1):.0%} of these inputs are among those that the posterior was fitted "
                f"on. {OPTIMISTIC} {CALIBRATE}"
            )
            warnings.warn(msg, OptimisticPValueWarning, stacklevel=3)
    reference = Reference.of(
        known.to(measured),
        measured[:, :-2],
        measured[:, -1].long() if by_class else None,
        len(fitted.class_centres.labels) if fitted.class_centres is not None else 1,
        None if chosen.name == NOVELTY else measured[:, -2],
        chosen.name,
    )
    return replace(posterior, calibration=Calibration(reference, encoder, chosen, gaussians), refusal=None)


def with_score(posterior: Posterior, score: Any) -> Posterior:
    """Return the posterior with the function of its score, see :meth:`.ContrastiveLaplace.set_score`."""
    calibration = posterior.calibration
    if calibration is None:
        raise NotFittedError(f"set_score: la is not calibrated. {CALIBRATE}")
    given = calibration.score.given(example(posterior.fitted), score)
    return replace(posterior, calibration=replace(calibration, score=given))


def present_calibration(posterior: Posterior, read: LinearizedEncoder) -> Calibration | None:
    """Return the calibration, ``None`` without one; raise if it belongs to another prior, temperature or encoder."""
    if posterior.calibration is not None and (refusal := posterior.known(read.fingerprint).refusal) is not None:
        raise NotFittedError(refusal)
    return posterior.calibration


def _sketch(phi: Tensor) -> Tensor:
    """Return random projections of the directions of features (B, F), and the log norms; float64, shape (B, 9)."""
    units, norm = unit_features(phi)
    axes = torch.randn(
        phi.shape[1], _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
    )
    logarithm = norm.clamp(min=torch.finfo(torch.float64).tiny).log()
    return torch.cat([units @ axes.to(phi.device), logarithm.unsqueeze(1)], dim=1)


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
    posterior: Posterior,
    read: LinearizedEncoder,
    batch: Any,
    number: int,
    score: Score,
    gaussians: TrainingGaussians | None,
) -> tuple[Tensor, Tensor]:
    """Return components, another score and predicted classes (B, K + 2), and sketches (B, 9) of a batch, float64.

    Labels are not used. Score and classes are zero if the calibration does not need them. An error names the batch.
    """
    x = tokenized(read.model, inputs_alone(batch), "loader: inputs of a batch")
    x = check_inputs(x, "loader: inputs of a batch")
    try:
        # Inputs with one axis more than in the fit may pass the encoder and fail only afterwards.
        with torch.no_grad(), naming_the_input(x):
            out, phi = observe(posterior, read, x)
            check_outputs(x, out.raw_mean, posterior.fitted.dim)
            components = measure(out, phi, gaussians)
            out.relative_to(posterior.fitted.typical_norm, posterior.fitted.class_centres)
            scores = components.new_zeros(len(components)) if score.name == NOVELTY else score.of(out)
            classes = score.classes(out)
            if classes is None:
                classes = torch.zeros_like(scores)
            components = torch.cat([components, torch.stack([scores, classes], dim=1)], dim=1)
            return components, components.new_empty(len(components), 0) if phi is None else _sketch(phi)
    except InputError as error:
        raise InputError(f"loader: batch {number} (counted from 0): {error}") from error

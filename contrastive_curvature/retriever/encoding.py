"""The one place where a retriever fits, calibrates and asks a posterior."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import NotFittedError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.io.pretrained.save import encoder_of
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.given_features import feature_inputs, has_features
from contrastive_curvature.network.in_batches import batches, by_length, results
from contrastive_curvature.network.inputs import slice_inputs
from contrastive_curvature.posterior.p_values import present_calibration, present_training
from contrastive_curvature.posterior.predict import moved_inputs
from contrastive_curvature.retriever.evidence import Embedded, evidence
from contrastive_curvature.retriever.head import AT_ONCE, BELOW, Headed, outputs, with_head
from contrastive_curvature.retriever.reading import read
from contrastive_curvature.retriever.state import coded

Frozen = tuple[Tensor, list[Hashable]]


def embedded(
    posterior: ContrastiveLaplace | None, inputs: Any, argument: str, progress_bar: bool | None = None
) -> Embedded:
    """Return embeddings, uncertainties and novelties of inputs; arguments as of :func:`.results`."""
    if posterior is None:
        return Embedded.alone(normalize(outputs(None, inputs, argument, progress_bar))[0])
    model = encoder_of(posterior)
    if isinstance(model, Headed) and not has_features(inputs):
        inputs = model.inputs(outputs(model.encoder, inputs, argument, progress_bar))
    inputs, places = by_length(inputs, argument)
    parts = []
    with torch.no_grad():
        for batch in results(posterior, posterior.model, inputs, argument, AT_ONCE, progress_bar, "[predict]"):
            uncertainty, novelty = (value.double().cpu().numpy() for value in (batch.uncertainty, batch.novelty))
            parts.append(Embedded(batch.mu.float(), uncertainty, novelty))
    found = Embedded.cat(parts)[places]
    if not isinstance(model, Headed):
        return found
    return replace(found, below=normalize(inputs[BELOW].to(found.directions))[0])


def frozen(encoder: nn.Module | None, argument: str, inputs: Any, labels: Any, progress_bar: bool | None) -> Frozen:
    """Return the outputs (N, F) of an encoder without a posterior, and the labels."""
    return read(argument, inputs, labels, partial(outputs, encoder, argument=argument, progress_bar=progress_bar))


def headed(
    encoder: nn.Module | None, x: Frozen, held: Frozen, gallery: Frozen, progress_bar: bool | None
) -> tuple[Headed, tuple[float, float]]:
    """Train a head, and keep it unless the held-out queries find more right matches without it.

    Args:
        encoder: The encoder below the head; ``None`` if the inputs are embeddings.
        x: Outputs of the encoder for the training inputs, and their labels.
        held: The same of the held-out queries.
        gallery: The same of the gallery.
        progress_bar: As of :meth:`.Retriever.fit`.

    Returns:
        The encoder with the head, or with one that changes nothing; and the shares of right matches with and without.
    """
    model = with_head(encoder, x[0], coded((), x[1])[1], progress_bar)
    labels, truth = coded((), held[1])
    classes = coded(labels, gallery[1])[1]

    def right(outputs: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            queries, points = (normalize(outputs(raw).float())[0] for raw in (held[0], gallery[0]))
        _, match = evidence(Embedded.alone(queries), points, classes)
        return float((classes[match] == truth).double().mean())

    shares = right(model.head), right(lambda raw: raw)
    if shares[1] > shares[0]:
        model = Headed(model.encoder, x[0].shape[1], layers=1).to(x[0].device).eval()
    return model, shares


def fitted_posterior(
    encoder: nn.Module, x: Any, y: Any, *, progress_bar: bool | None
) -> tuple[ContrastiveLaplace, tuple[Any, Any]]:
    """Fit a posterior of the last layer, and choose its prior.

    Args:
        encoder: The encoder.
        x: Training inputs.
        y: Their labels.
        progress_bar: As of :meth:`.Retriever.fit`.

    Returns:
        The posterior, and the inputs of its last layer with their labels.
    """
    posterior = ContrastiveLaplace(encoder)
    inputs, names = features(posterior, "x", x, y, progress_bar)
    # Whole numbers stay, for ``la.update``.
    whole = all(type(name) is int for name in names)
    classes = torch.tensor(names, device="cpu") if whole else coded((), names)[1]
    posterior.fit(batched(posterior, inputs, classes), progress_bar=progress_bar)
    posterior.optimize_prior_precision()
    return posterior, (inputs, names)


def calibrated(posterior: ContrastiveLaplace, inputs: Any, progress_bar: bool | None) -> ContrastiveLaplace:
    """Return a copy of the posterior, calibrated with held-out inputs unless it is calibrated already.

    P-values of the posterior itself need it; those of a retriever compare with all held-out queries, later ones too.
    """
    new = copy.copy(posterior)
    if present_calibration(new.posterior, new.read) is None:
        items, inputs_of = batches(new.model, inputs, AT_ONCE, "held_out")
        new.calibrate(map(inputs_of, items), progress_bar)
    return new


def check_novelty(posterior: ContrastiveLaplace) -> None:
    """Refuse a posterior whose novelty would be measured from the held-out queries, or which changed since."""
    now = posterior.posterior, posterior.read
    if present_calibration(*now) is None and present_training(*now) is None:
        raise NotFittedError(
            "encoder: this posterior has no training inputs to compare with, so its novelty is measured from the "
            "inputs of la.calibrate(loader). Call it with others than the held-out ones, which would seem less "
            "novel than new queries."
        )


def features(
    posterior: ContrastiveLaplace | None, argument: str, inputs: Any, labels: Any, progress_bar: bool | None
) -> tuple[Any, Any]:
    """Return features and labels if the posterior takes features, so the encoder runs once; else both unchanged."""
    if posterior is None or not posterior.on_last_layer:
        return inputs, labels
    if has_features(inputs):
        return inputs, labels
    model = encoder_of(posterior)
    if isinstance(model, Headed):
        raw, names = frozen(model.encoder, argument, inputs, labels, progress_bar)
        return model.inputs(raw), names
    run = partial(_last_layer_features, posterior, argument=argument, progress_bar=progress_bar)
    phi, names = read(argument, inputs, labels, run)
    return feature_inputs(phi, posterior.model.last_layer_name), names


def batched(posterior: ContrastiveLaplace, x: Any, classes: Tensor) -> list[tuple[Any, Tensor]]:
    """Return inputs in memory as batches with the numbers of their labels."""
    items, inputs_of = batches(posterior.model, x, AT_ONCE, "x")
    return [(inputs_of(rows), classes[rows]) for rows in items]


def _last_layer_features(
    la: ContrastiveLaplace, inputs: Any, argument: str, progress_bar: bool | None = None
) -> Tensor:
    """Return the inputs of the last layer, shape (N, F), on the CPU; an encoder that is not analysed yet is analysed.

    The posterior takes them in place of inputs (:func:`.feature_inputs`), so the encoder runs once.
    """

    def run(x: Any) -> Tensor:
        x = moved_inputs(la.model, x, la._device)
        if la.model.last_layer is None:
            la.prepare(slice_inputs(x, slice(0, 8)))
        phi: Tensor = la.model.forward_with_features(x).features
        return phi.cpu()

    inputs, places = by_length(inputs, argument)
    with torch.no_grad(), evaluation_mode(la.model):
        parts = list(results(run, la.model, inputs, argument, AT_ONCE, progress_bar, "[encode]"))
    return torch.cat(parts)[places]

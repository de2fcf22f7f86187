"""LAM, post-hoc and online: a Laplace posterior over the last layer, in closed form and from sampled networks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.experiments import training
from benchmarks.experiments.data import RetrievalData, Split, classes_of, loader
from contrastive_curvature.embedding.known import OptimisticPValueWarning
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.online import OnlineLaplace
from contrastive_curvature.progress import Progress

_CHUNK = 2**25
"""Numbers that sampled weights, or what they give, may fill at once."""
_SAMPLED = "inverse_kappa_sampled"
_CALIBRATION = 2_000
"""Known images that p-values are relative to, at most."""


def laplace_posthoc(
    setting: training.Setting,
    data: RetrievalData,
    seed: int,
    encoders: list[nn.Module],
    posterior: str = "default",
    **curvature: str,
) -> training.Fitted:
    """Fit the curvature of trained weights over all pairs of the training set, and the library's prior.

    Of places, whose pairs are too many, only those of a batch count, in which one place stands beside the next.

    Args:
        setting: How the encoder was trained.
        data: The training images are ``data.train``.
        seed: Without effect.
        encoders: The trained one.
        posterior: ``"default"``, the library's structure and scores, or ``"diag"``, the paper's: a diagonal, and the
            von Mises-Fisher distribution of sampled networks for retrieval and score.
        curvature: Further options of the curvature.
    """
    options = {"margin": setting.margin, **_pairs(data), **curvature}
    chosen = {} if posterior == "default" else {"hessian_structure": posterior}
    la: ContrastiveLaplace = Laplace(encoders[0], "contrastive", backend_kwargs=options, **chosen)
    images = data.train if data.relation is None else data.train.take(classes_of(data.train.targets).argsort())
    la.fit(loader(images, training.EVAL_BATCH), progress_bar=setting.progress)
    la.optimize_prior_precision()
    return _fitted(setting, la, data, posterior)


def online_step(
    setting: training.Setting, data: RetrievalData, **curvature: str
) -> Callable[[nn.Module, Tensor], nn.Module]:
    """Training by Monte-Carlo EM from the first step on, with a diagonal posterior."""
    return lambda encoder, probe: OnlineLaplace(
        encoder,
        probe=probe,
        n_data=len(data.train),
        memory_factor=setting.memory_factor,
        backend_kwargs={"margin": setting.margin, **_pairs(data), **curvature, "pairs": "batch"},
    )


def laplace_online(
    setting: training.Setting,
    data: RetrievalData,
    seed: int,
    encoders: list[nn.Module],
    posterior: str = "default",
    **curvature: str,
) -> training.Fitted:
    """Take the posterior of :func:`online_step`, trained, by the curvature that it remembers; options as post-hoc."""
    return _fitted(setting, encoders[0].laplace(), data, posterior)


def _pairs(data: RetrievalData) -> dict[str, Any]:
    return {} if data.relation is None else {"relation": data.relation, "pairs": "batch"}


def _fitted(setting: training.Setting, la: Any, data: RetrievalData, posterior: str) -> training.Fitted:
    def samples(split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        return sampled_embeddings(setting, la, split, n_samples, seed)

    if posterior == "default":
        return training.Fitted(_calibrated(setting, la, data), samples)
    return training.Fitted(lambda split: _sampled(samples(split, setting.n_samples, 0)), samples)


def _sampled(draws: Iterable[Tensor]) -> training.Prediction:
    """Mean directions and ``1 / kappa`` of sampled networks (paper, Eq. 42-43), in float64: close samples cancel."""
    found = training.spread_of(u.double() for u in draws)
    return replace(found, mean=found.mean.float())


def _calibrated(setting: training.Setting, la: Any, data: RetrievalData) -> Callable[[Split], training.Prediction]:
    """Give the posterior known images to compare others with: those held out for it, else training images.

    Relative to training images p-values would be optimistic, so predictions have them only with images that were held
    out.
    """
    split = data.train if data.calibration is None else data.calibration
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(1))[:_CALIBRATION]
    with warnings.catch_warnings():
        if data.calibration is None:
            warnings.simplefilter("ignore", OptimisticPValueWarning)
        la.calibrate(loader(split.take(rows), training.EVAL_BATCH), progress_bar=setting.progress)

    return lambda split: closed_form(setting, la, split, data.calibration is not None)


def closed_form(setting: training.Setting, la: ContrastiveLaplace, split: Split, p_values: bool) -> training.Prediction:
    """The library's prediction, and beside it what sampling gives.

    Returns:
        Mean raw outputs, ``uncertainty`` and ``novelty`` of ``EmbeddingDistribution``, without sampling; its
        ``seconds`` are for these. Variants, each one score for both questions: ``"inverse_kappa"`` (closed form), and
        of sampled networks ``"inverse_kappa_sampled"`` with the samples' mean directions (paper, Eq. 42-43) and
        ``"sum_std"``, the sum over dimensions of the standard deviations of unit embeddings (released code).
    """
    started = time.perf_counter()
    parts = []
    with torch.no_grad():
        for x in training.image_batches(setting, split):
            predicted = la(x)
            scores = [predicted.raw_mean, predicted.uncertainty, predicted.novelty, 1 / predicted.kappa]
            parts.append([score.cpu() for score in [*scores, *([predicted.p_value] if p_values else [])]])
    mean, score, novelty, angular, *p_value = (torch.cat(part) for part in zip(*parts, strict=True))
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    # Seeded: equal images give equal predictions.
    sampled = _sampled(sampled_embeddings(setting, la, split, setting.n_samples, 0))
    return training.Prediction(
        mean,
        score,
        {"inverse_kappa": angular, _SAMPLED: sampled.uncertainty, **sampled.variants},
        {_SAMPLED: sampled.mean},
        seconds,
        {"inverse_kappa": seconds, _SAMPLED: time.perf_counter() - started},
        novelty,
        p_value[0] if p_value else None,
    )


def sampled_embeddings(
    setting: training.Setting, la: ContrastiveLaplace, split: Split, n_samples: int, seed: int
) -> Iterator[Tensor]:
    """Unit embeddings (N, D) by one sampled network after the other; only the last layer is random, the rest runs once.

    Each is the same network for all images.
    """
    _, features = training.features_of(setting, la.model, split)
    generator = torch.Generator(features.device).manual_seed(seed)
    dim, width = la.model.last_layer.weight.shape
    step = max(1, _CHUNK // max(dim * width, dim * len(features)))
    with Progress(setting.progress).bar("[sampled networks]", n_samples) as advance:
        for start in range(0, n_samples, step):
            # Not around the yield: what comes between two samples is the caller's.
            with torch.no_grad():
                theta = la.sample(min(step, n_samples - start), generator=generator)
                weight, bias = theta[:, : dim * width].reshape(-1, width), theta[:, dim * width :].flatten()
                raw = linear(features, weight, bias).view(len(features), -1, dim)
                units = [training.unit(sample) for sample in raw.unbind(1)]
            for sample in units:
                yield sample.float().cpu()
                advance(1)

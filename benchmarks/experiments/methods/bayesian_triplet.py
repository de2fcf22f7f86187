"""Embeddings that are Gaussians, or von Mises-Fisher distributions, trained with the Bayesian triplet loss.

Source: Warburg, Jørgensen, Civera and Hauberg (2021), Bayesian Triplet Loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import (
    check_classes,
    check_count,
    check_fit,
    check_positive,
    check_saved,
    fitted,
)
from benchmarks.experiments.methods.embed import map_batches, unit
from benchmarks.experiments.methods.training import train
from benchmarks.experiments.methods.triplet_options import bayesian_options
from benchmarks.experiments.methods.triplet_steps import BayesianStep, gaussians, raw_outputs
from benchmarks.experiments.methods.triplet_temperature import calibrated_temperature
from contrastive_curvature import vmf
from contrastive_curvature.metrics.neighbors import Metric

__all__ = ["BayesianTriplet"]

_MEANING = ("distribution", "variance", "normalized", "first_variance", "variance_gain")
"""Options without which an encoder's outputs cannot be read."""
_SMALLEST = 1e-30
"""Squared norm of a mean whose variance is compared with it."""
_CALIBRATION = 2000
"""Training images that the temperature is calibrated with, at most."""
_DRAWS = 20
"""Samples of each of them."""


class BayesianTriplet(Method):
    """An encoder that gives a mean and a variance for every image.

    Args:
        setting: How the encoder is made and trained; its margin is that of pairs, and not used.
        distribution: ``"gaussian"``, or ``"vmf"``: unit means, and concentrations ``1 / variance``.
        moments: Of tau in the likelihood, for ``"vmf"``. ``"gaussian"``, as the documents have it, or ``None``:
            those of Gaussians around unit means. ``"vmf"``: exact.
        variance: ``"isotropic"``: one for each image. ``"diagonal"``: one for each image and dimension.
        normalized: Whether a Gaussian's mean is divided by its norm, and images are retrieved by the cosine; else by
            the Euclidean distance of the means. ``None``: ``False`` for ``"gaussian"``, ``True`` for ``"vmf"``.
        margin: Of the likelihood, on differences of squared distances, >= 0.
        mining_margin: Only triplets whose means violate it, ``|a - n|^2 < |a - p|^2 + mining_margin``, count. ``None``:
            on the sphere 0.5, as in :class:`~benchmarks.experiments.methods.triplet.TripletDeterministic` (4 takes
            all triplets there); off it the prior's variance.
        negatives: Of their negatives, so many at most are drawn for each ordered positive pair; ``None`` for all.
        prior_variance: Of the Gaussian prior around 0, > 0; ``None`` for 1. The vMF's prior is uniform.
        kl_weight: Weight of the divergences to the prior, >= 0. ``None``: 1e-3, and on the sphere 1e-6.
        first_variance: Where the raw output is 0, > 0; images unlike those of the training set have outputs closer to 0
            than others. ``None``: that of the prior, and on the sphere 0.1.
        variance_gain: Factor on the raw output that becomes the variance, > 0. The optimiser's steps do not depend on
            the scale of a gradient; so variances are learned that much more slowly, or faster, than means. ``None``: 1,
            and on the sphere 0.1.
        temperature: Factor on the variances of samples, > 0. ``None`` chooses it after training by the votes of samples
            of at most 2,000 training images, see
            :func:`~benchmarks.experiments.methods.triplet_temperature.calibrated_temperature`; where images have
            positions instead of classes there are no votes, and it is 1. It does not change :meth:`predict`.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: Options exclude each other.
    """

    name = "bayesian_triplet"
    title = "Bayesian triplet loss"

    def __init__(
        self,
        setting: Setting,
        distribution: Literal["gaussian", "vmf"] = "gaussian",
        moments: Literal["gaussian", "vmf"] | None = None,
        variance: Literal["isotropic", "diagonal"] = "isotropic",
        normalized: bool | None = None,
        margin: float = 0.0,
        mining_margin: float | None = None,
        negatives: int | None = 8,
        prior_variance: float | None = None,
        kl_weight: float | None = None,
        first_variance: float | None = None,
        variance_gain: float | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__(setting)
        self.options = bayesian_options(
            distribution,
            moments,
            variance,
            normalized,
            margin,
            mining_margin,
            negatives,
            prior_variance,
            kl_weight,
            first_variance,
            variance_gain,
        )
        self._given = None if temperature is None else check_positive("temperature", temperature)
        self._temperature: float | None = None
        self._encoder: nn.Module | None = None

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._encoder, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``.

        Raises:
            InputError: There is one class, or no class with two images.
        """
        check_fit(seed, folder)
        check_classes(self.setting, data.train, positives=True)
        step = train(
            self.setting,
            data,
            seed,
            folder / "training.pt",
            make_step=lambda encoder, _: BayesianStep(encoder, self.setting.dim, self.options, self.setting.relation),
            outputs=raw_outputs(self.setting.dim, self.options),
        )
        self._encoder = step.get_submodule("encoder")
        self._temperature = self._calibrated(data.plain, seed) if self._given is None else self._given

    @property
    def temperature(self) -> float:
        """Factor on the variances of samples.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._temperature, self.name)

    @property
    def metric(self) -> Metric:
        """How means and samples are compared."""
        return "cosine" if self.options.normalized else "euclidean"

    def _calibrated(self, images: Split, seed: int) -> float:
        if self.setting.relation is not None:
            return 1.0
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        known = images.take(order[:_CALIBRATION])
        mean, variance = self.distributions(known)
        chosen, _ = calibrated_temperature(
            lambda temperature: self._draw(mean, variance, temperature, _DRAWS, seed), known.targets, self.metric
        )
        return chosen

    def distributions(self, split: Split) -> tuple[Tensor, Tensor]:
        """Means (N, D) and variances, (N, 1) or (N, D), of images; on the CPU. vMF: ``kappa = 1 / variance``."""
        raw = map_batches(self.encoder, split, self.setting, "embeddings")
        return gaussians(raw, self.setting.dim, self.options)

    def predict(self, split: Split) -> Prediction:
        """Means; the variance, summed over dimensions, as a share of the mean's squared norm.

        On the sphere that is the variance itself, the documents' score. Off it, where means are twice as long, so are
        the distances that the scatter stands beside.

        Returns:
            Variants, where means are not normalised: ``"variance"``, the variance as it is, and ``"norm"``, minus the
            norm of the mean.
        """
        mean, variance = self.distributions(split)
        total, squares = variance.expand_as(mean).sum(1), mean.square().sum(1)
        if self.options.normalized:
            return Prediction(mean, total, metric=self.metric)
        variants = {"variance": total, "norm": -squares.sqrt()}
        return Prediction(mean, total / squares.clamp(min=_SMALLEST), variants, metric=self.metric)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Draws from each image's own distribution, with its variance times the temperature.

        Those of Gaussians are put on the sphere where the means are.
        """
        check_count("n_samples", n_samples)
        return self._draw(*self.distributions(split), self.temperature, n_samples, seed)

    def _draw(self, mean: Tensor, variance: Tensor, temperature: float, n_samples: int, seed: int) -> Iterator[Tensor]:
        variance = temperature * variance
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            if self.options.distribution == "vmf":
                yield vmf.sample(mean, 1 / variance.squeeze(1), 1, generator)[0]
                continue
            drawn = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator)
            yield unit(drawn) if self.options.normalized else drawn

    def state_dict(self) -> dict[str, Any]:
        """The weights, what their outputs mean, and the temperature."""
        encoder = dict(self.encoder.state_dict())
        return {"encoder": encoder, "meaning": self._meaning(), "temperature": self.temperature}

    def _meaning(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in _MEANING}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`.

        Raises:
            InputError: It was trained with options that give its outputs another meaning.
        """
        check_saved(state["meaning"], self._meaning())
        encoder = self.setting.make_encoder(outputs=raw_outputs(self.setting.dim, self.options))
        encoder.load_state_dict(state["encoder"])
        self._encoder = encoder.eval()
        self._temperature = state["temperature"] if self._given is None else self._given

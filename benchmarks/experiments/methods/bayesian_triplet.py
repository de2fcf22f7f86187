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
from benchmarks.experiments.methods.checks import check_choice, check_count, check_fit, check_positive, fitted
from benchmarks.experiments.methods.embed import map_batches, unit
from benchmarks.experiments.methods.training import train
from benchmarks.experiments.methods.triplet_steps import BayesianOptions, BayesianStep, gaussians, raw_outputs
from contrastive_curvature import vmf
from contrastive_curvature.arguments import check_flag, check_number
from contrastive_curvature.errors import InputError, UnsupportedError, expected

__all__ = ["BayesianTriplet"]

_MEANING = ("distribution", "variance", "normalized", "first_variance", "variance_gain")
"""Options without which an encoder's outputs cannot be read."""


class BayesianTriplet(Method):
    """An encoder that gives a mean and a variance for every image.

    Args:
        setting: How the encoder is made and trained; its margin is that of pairs, and not used.
        distribution: ``"gaussian"``, or ``"vmf"``: unit means, and concentrations ``1 / variance``.
        variance: ``"isotropic"``: one for each image. ``"diagonal"``: one for each image and dimension.
        normalized: Whether a Gaussian's mean is divided by its norm, and images are retrieved by the cosine; else by
            the Euclidean distance of the means. ``None``: ``False`` for ``"gaussian"``, ``True`` for ``"vmf"``.
        margin: Of the likelihood, on differences of squared distances, >= 0.
        mined: ``"violated"``: the triplets whose means violate the margin, as in
            :class:`~benchmarks.experiments.methods.triplet.TripletDeterministic`. ``"all"``: all triplets.
        negatives: Of these, so many are drawn for each ordered positive pair of a batch at most; ``None`` for all.
        prior_variance: Of the Gaussian prior around 0, > 0; ``None`` for 1. The vMF's prior is uniform.
        kl_weight: Weight of the divergences to the prior, >= 0.
        first_variance: Of a new encoder, > 0.
        variance_gain: Factor on the raw output that becomes the variance, > 0. The optimiser's steps do not depend on the
            scale of a gradient; so variances are learned that much more slowly, or faster, than means.

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
        variance: Literal["isotropic", "diagonal"] = "isotropic",
        normalized: bool | None = None,
        margin: float = 0.0,
        mined: Literal["violated", "all"] = "all",
        negatives: int | None = 8,
        prior_variance: float | None = None,
        kl_weight: float = 1e-6,
        first_variance: float = 0.01,
        variance_gain: float = 1.0,
    ) -> None:
        super().__init__(setting)
        check_choice("distribution", distribution, ("gaussian", "vmf"))
        check_choice("variance", variance, ("isotropic", "diagonal"))
        check_choice("mined", mined, ("violated", "all"))
        vmf_only = distribution == "vmf"
        for name, value, allowed in (
            ("variance", variance, variance == "isotropic"),
            ("normalized", normalized, normalized in (None, True)),
            ("prior_variance", prior_variance, prior_variance is None),
        ):
            if vmf_only and not allowed:
                wanted = {"variance": "'isotropic'", "normalized": "True or None", "prior_variance": "None"}[name]
                hint = (
                    "A von Mises-Fisher distribution is on the sphere and has one concentration. Leave it out, or "
                    "take distribution='gaussian'."
                )
                raise UnsupportedError(expected(name, f"{wanted} with distribution='vmf'", value, hint))
        if normalized is not None:
            check_flag("normalized", normalized)
        self.options = BayesianOptions(
            distribution,
            variance,
            vmf_only if normalized is None else normalized,
            check_number("margin", margin),
            mined,
            None if negatives is None else check_count("negatives", negatives),
            None if prior_variance is None else check_positive("prior_variance", prior_variance),
            check_number("kl_weight", kl_weight),
            check_positive("first_variance", first_variance),
            check_positive("variance_gain", variance_gain),
        )
        self._encoder: nn.Module | None = None

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._encoder, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        check_fit(seed, folder)
        step = train(
            self.setting,
            data,
            seed,
            folder / "training.pt",
            make_step=lambda encoder, _: BayesianStep(encoder, self.setting.dim, self.options, self.setting.relation),
            outputs=raw_outputs(self.setting.dim, self.options),
        )
        self._encoder = step.get_submodule("encoder")

    def distributions(self, split: Split) -> tuple[Tensor, Tensor]:
        """Means (N, D) and variances, (N, 1) or (N, D), of images; on the CPU. vMF: ``kappa = 1 / variance``."""
        raw = map_batches(self.encoder, split, self.setting, "embeddings")
        return gaussians(raw, self.setting.dim, self.options)

    def predict(self, split: Split) -> Prediction:
        """Means; the variance, summed over dimensions.

        Returns:
            Variants: ``"sum_std"``, the sum of the standard deviations, and ``"norm"``, minus the norm of the mean,
            where it is not normalised.
        """
        mean, variance = self.distributions(split)
        every = variance.expand_as(mean)
        variants = {"sum_std": every.sqrt().sum(1)}
        if not self.options.normalized:
            variants["norm"] = -mean.norm(dim=1)
        return Prediction(mean, every.sum(1), variants, metric="cosine" if self.options.normalized else "euclidean")

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Draws from each image's own distribution; those of Gaussians are put on the sphere where the means are."""
        check_count("n_samples", n_samples)
        fitted(self._encoder, self.name)
        return self._draw(split, n_samples, seed)

    def _draw(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        mean, variance = self.distributions(split)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            if self.options.distribution == "vmf":
                yield vmf.sample(mean, 1 / variance.squeeze(1), 1, generator)[0]
                continue
            drawn = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator)
            yield unit(drawn) if self.options.normalized else drawn

    def state_dict(self) -> dict[str, Any]:
        """The weights, and what their outputs mean."""
        meaning = {name: getattr(self.options, name) for name in _MEANING}
        return {"encoder": dict(self.encoder.state_dict()), "meaning": meaning}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`.

        Raises:
            InputError: It was trained with options that give its outputs another meaning.
        """
        for name in _MEANING:
            if state["meaning"][name] != getattr(self.options, name):
                raise InputError(
                    expected(name, f"{state['meaning'][name]!r}, as in training", getattr(self.options, name))
                )
        encoder = self.setting.make_encoder(outputs=raw_outputs(self.setting.dim, self.options))
        encoder.load_state_dict(state["encoder"])
        self._encoder = encoder.eval()

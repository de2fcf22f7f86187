"""Hedged instance embeddings (Oh et al., "Modeling uncertainty with hedged instance embedding"), and their points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import Split
from benchmarks.experiments.methods.base import Prediction, Setting
from benchmarks.experiments.methods.checks import check_choice, check_count, check_positive
from benchmarks.experiments.methods.hedged_pairs import PairMethod
from benchmarks.experiments.methods.hedged_steps import HedgedStep, PairTraining, PointStep, mixture
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hedged import match_probability, stratified_samples

__all__ = ["Hedged", "HedgedPoint"]

_SEED = 0
"""Of the samples behind the self-mismatch."""
_MARGIN = 1.0
_FIRST = {"a": 2.0, "b": 3.0, "match_lr": 10.0}
"""Of the match probability, where nothing else is said."""


class HedgedPoint(PairMethod):
    """The document's point embedding: no uncertainty, and no samples.

    Args:
        setting: See :class:`~benchmarks.experiments.methods.hedged_pairs.PairMethod`.
        loss: ``"soft"``: with a learned threshold (Eq. 3). ``"hard"``: with a margin (Eq. 1).
        margin: Of the hard loss, on the distance; ``None`` for 1.
        a: Of the soft loss, as the next two: see :class:`~benchmarks.experiments.methods.hedged_steps.PairTraining`.
            ``None`` for 2.
        b: First intercept; ``None`` for 3.
        match_lr: Of both; ``None`` for 10.
        pairs: Of a batch, see there.
        batches: In an epoch.
        optimizer: Its name.

    Raises:
        InputError: An option is out of range.
        UnsupportedError: An option belongs to the other loss, or the setting's images have positions, not classes.
    """

    name = "hedged_point"
    title = "Point embedding (HIB's)"

    def __init__(
        self,
        setting: Setting,
        loss: Literal["soft", "hard"] = "soft",
        margin: float | None = None,
        a: float | None = None,
        b: float | None = None,
        match_lr: float | None = None,
        pairs: Literal["batch", "drawn"] = "batch",
        batches: int | None = None,
        optimizer: Literal["rmsprop", "adam"] = "rmsprop",
    ) -> None:
        check_choice("loss", loss, ("soft", "hard"))
        given = {"margin": margin, "a": a, "b": b, "match_lr": match_lr}
        for option in ("margin",) if loss == "soft" else ("a", "b", "match_lr"):
            if given[option] is not None:
                hint = "It belongs to the other loss: leave it out, or change the loss."
                raise UnsupportedError(expected(option, f"None with loss={loss!r}", given[option], hint))
        match = {name: first if given[name] is None else given[name] for name, first in _FIRST.items()}
        super().__init__(setting, PairTraining(**match, pairs=pairs, batches=batches, optimizer=optimizer))  # type: ignore[arg-type]
        self.loss: str = loss
        self.margin = check_positive("margin", _MARGIN if margin is None else margin)

    def meaning(self) -> dict[str, Any]:
        """See :meth:`PairMethod.meaning`."""
        return {"loss": self.loss}

    def make_step(self, encoder: nn.Module) -> PointStep:
        """See :meth:`PairMethod.make_step`."""
        return PointStep(encoder, self.training, self.margin if self.loss == "hard" else None)

    def outputs(self) -> int:
        """See :meth:`PairMethod.outputs`."""
        return self.setting.dim

    @property
    def threshold(self) -> float:
        """The distance at which a match is as likely as not, or the margin of the hard loss."""
        if self.loss == "hard":
            return self.margin
        a, b = self.match
        return b / a

    def draw(self, split: Split, n_samples: int, seed: int) -> Tensor:
        """The point itself, whatever the number of samples, shape (N, 1, D)."""
        check_count("n_samples", n_samples)
        return self.raw(split).unsqueeze(1)

    def predict(self, split: Split) -> Prediction:
        """Points, without uncertainty."""
        return Prediction(self.raw(split), metric="euclidean")


class Hedged(PairMethod):
    """Embeddings that are Gaussians or mixtures of C of them, trained with the VIB objective (Eq. 8).

    A shared network has ``2 C D`` outputs, see :func:`~benchmarks.experiments.methods.hedged_steps.mixture`.

    Args:
        setting: See :class:`~benchmarks.experiments.methods.hedged_pairs.PairMethod`.
        components: C.
        first_variance: Of a new embedding, > 0.
        kl_weight: Weight of the divergences to ``N(0, I)``, >= 0.
        n_samples: Samples K of each image, in training and in its scores; a multiple of C.
        average: Of :func:`~contrastive_curvature.hedged.match_loss`.
        divergence: Of :func:`~contrastive_curvature.hedged.vib_objective`.
        a: See :class:`~benchmarks.experiments.methods.hedged_steps.PairTraining`, as the arguments below.
        b: First intercept.
        match_lr: Of both.
        pairs: Of a batch.
        batches: In an epoch.
        optimizer: Its name.

    Raises:
        InputError: An option is out of range.
        UnsupportedError: The setting's images have positions, not classes.
    """

    name = "hedged"
    title = "Hedged embedding (HIB)"

    def __init__(
        self,
        setting: Setting,
        components: int = 1,
        first_variance: float = 0.1,
        kl_weight: float = 1e-4,
        n_samples: int = 8,
        average: Literal["log", "probability"] = "probability",
        divergence: Literal["bound", "sampled"] = "bound",
        a: float = 2.0,
        b: float = 3.0,
        match_lr: float = 10.0,
        pairs: Literal["batch", "drawn"] = "batch",
        batches: int | None = None,
        optimizer: Literal["rmsprop", "adam"] = "rmsprop",
    ) -> None:
        super().__init__(setting, PairTraining(a, b, match_lr, pairs, batches, optimizer))
        self.components = check_count("components", components)
        self.first_variance = check_positive("first_variance", first_variance)
        # written so that NaN fails too
        if not 0 <= kl_weight < float("inf"):
            raise InputError(expected("kl_weight", "a finite number, at least 0", kl_weight))
        self.kl_weight = kl_weight
        self.n_samples = check_count("n_samples", n_samples)
        self._check_samples(n_samples)
        check_choice("average", average, ("log", "probability"))
        check_choice("divergence", divergence, ("bound", "sampled"))
        self.average, self.divergence = average, divergence

    def make_step(self, encoder: nn.Module) -> HedgedStep:
        """See :meth:`PairMethod.make_step`."""
        return HedgedStep(
            encoder,
            self.training,
            components=self.components,
            first_variance=self.first_variance,
            kl_weight=self.kl_weight,
            n_samples=self.n_samples,
            average=self.average,
            divergence=self.divergence,
        )

    def outputs(self) -> int:
        """See :meth:`PairMethod.outputs`."""
        return 2 * self.components * self.setting.dim

    def meaning(self) -> dict[str, Any]:
        """See :meth:`PairMethod.meaning`."""
        return {"components": self.components, "first_variance": self.first_variance}

    def mixtures(self, split: Split) -> tuple[Tensor, Tensor]:
        """Means and variances of images, both (N, C, D), on the CPU."""
        return mixture(self.raw(split), self.components, self.first_variance)

    def draw(self, split: Split, n_samples: int, seed: int) -> Tensor:
        """Stratified samples.

        Args:
            split: N images.
            n_samples: K, a multiple of C.
            seed: Of the samples.

        Returns:
            float32, shape (N, K, D), on the CPU.
        """
        self._check_samples(check_count("n_samples", n_samples))
        return stratified_samples(*self.mixtures(split), n_samples, torch.Generator().manual_seed(seed))

    def predict(self, split: Split) -> Prediction:
        """Means of the mixtures; the self-mismatch (Eq. 9), with the same noise for all images.

        Returns:
            Variants: ``"variance"``, the variance of the mixture, averaged over dimensions.
        """
        mean, variance = self.mixtures(split)
        volume = (variance.mean(1) + mean.var(1, correction=0)).mean(1)
        return Prediction(mean.mean(1), self._mismatch(mean, variance), {"variance": volume}, metric="euclidean")

    def _mismatch(self, mean: Tensor, variance: Tensor) -> Tensor:
        generator, each = torch.Generator().manual_seed(_SEED), self.n_samples // self.components
        centre, spread = mean.repeat_interleave(each, 1), variance.sqrt().repeat_interleave(each, 1)
        zero = torch.zeros_like(mean[0])
        # The noise of one image serves all: equal images have equal scores, and ranks have less noise.
        sets = [
            centre + spread * stratified_samples(zero, torch.ones_like(zero), self.n_samples, generator)
            for _ in range(2)
        ]
        return 1 - match_probability(*sets, *self.match)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Independent draws from each image's mixture."""
        check_count("n_samples", n_samples)
        return self._independent(*self.mixtures(split), n_samples, seed)

    def _independent(self, mean: Tensor, variance: Tensor, n_samples: int, seed: int) -> Iterator[Tensor]:
        generator, images = torch.Generator().manual_seed(seed), torch.arange(len(mean))
        for _ in range(n_samples):
            chosen = torch.randint(self.components, (len(mean),), generator=generator)
            noise = torch.randn(mean[:, 0].shape, generator=generator)
            yield mean[images, chosen] + variance[images, chosen].sqrt() * noise

    def _check_samples(self, n_samples: int) -> None:
        if n_samples % self.components:
            wanted = f"a multiple of the {self.components} components"
            raise InputError(expected("n_samples", wanted, n_samples))

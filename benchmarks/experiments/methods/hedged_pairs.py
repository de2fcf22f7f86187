"""What hedged embeddings and their points have in common: training on balanced pairs, and the match probability."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.experiments.data.pair_batches import PairBatches
from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Setting
from benchmarks.experiments.methods.checks import check_fit, check_saved, fitted
from benchmarks.experiments.methods.embed import map_batches
from benchmarks.experiments.methods.hedged_steps import PairTraining
from benchmarks.experiments.methods.training import train
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hedged import MatchParameters, match_probability

__all__ = ["PairMethod"]

_CHUNK = 2**22
"""Pairs of samples whose probabilities are computed at once."""


class PairMethod(Method):
    """An encoder trained on batches of pairs, half of them of one class (section 2.3).

    A batch has ``setting.batch_size / 2`` pairs, see :class:`~benchmarks.experiments.data.pair_batches.PairBatches`;
    ``setting.per_class`` and ``setting.margin`` do not matter. Embeddings are compared by Euclidean distance.

    Args:
        setting: How the encoder is made and trained; its images have class labels.
        training: How pairs are trained on.

    Raises:
        InputError: ``setting.batch_size`` is no multiple of 4.
        UnsupportedError: The setting's images have positions, not classes.
    """

    def __init__(self, setting: Setting, training: PairTraining) -> None:
        super().__init__(setting)
        if setting.relation is not None:
            msg = f"setting.relation: method {self.name!r} draws pairs from class labels. Use data with classes."
            raise UnsupportedError(msg)
        if setting.batch_size < 4 or setting.batch_size % 4:
            hint = "Half of the pairs match. Or leave the rows hib, hib_mixture and hib_point out of --methods."
            raise InputError(expected("setting.batch_size", "a multiple of 4", setting.batch_size, hint))
        self.training = training
        self._step: nn.Module | None = None

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._step, self.name).get_submodule("encoder")

    @property
    def match(self) -> tuple[float, float]:
        """The learned slope ``a`` and intercept ``b`` of the match probability.

        Raises:
            InputError: There was no fit.
            UnsupportedError: The method was trained without them.
        """
        numbers: MatchParameters | None = getattr(fitted(self._step, self.name), "match", None)
        if numbers is None:
            msg = f"{self.title} has no match probability; its soft loss learns one."
            raise UnsupportedError(msg)
        a, b = (number.item() for number in numbers())
        return a, b

    @abstractmethod
    def make_step(self, encoder: nn.Module) -> nn.Module:
        """The module whose call with a batch returns the loss; it has the parts ``encoder`` and ``match``."""

    @abstractmethod
    def outputs(self) -> int:
        """Raw outputs of the encoder."""

    @abstractmethod
    def draw(self, split: Split, n_samples: int, seed: int) -> Tensor:
        """Samples of the embeddings, the same number of each component; float32, shape (N, K, D), on the CPU."""

    @abstractmethod
    def meaning(self) -> dict[str, Any]:
        """The options without which the outputs of a saved encoder cannot be read."""

    def raw(self, split: Split) -> Tensor:
        """Raw outputs of images, on the CPU."""
        return map_batches(self.encoder, split, self.setting, "embeddings")

    def match_probability(self, first: Split, second: Split, n_samples: int = 8, seed: int = 0) -> Tensor:
        """How likely the first image and the second, the images after them and so on, show the same class.

        Args:
            first: N images.
            second: N images.
            n_samples: Samples of each.
            seed: Of the samples.

        Returns:
            Probabilities (N,), see :func:`contrastive_curvature.hedged.match_probability`.

        Raises:
            InputError: The numbers of images differ.
            UnsupportedError: The method has no match probability.
        """
        if len(first) != len(second):
            raise InputError(expected("second", f"{len(first)} images, as many as first", len(second)))
        a, b = self.match
        # Two seeds from one: an image and itself must have independent samples.
        left, right = self.draw(first, n_samples, 2 * seed), self.draw(second, n_samples, 2 * seed + 1)
        size = max(1, _CHUNK // left.shape[1] ** 2)
        parts = zip(left.split(size), right.split(size), strict=True)
        return torch.cat([match_probability(x, y, a, b) for x, y in parts])

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        check_fit(seed, folder)
        self._step = train(
            self.setting,
            data,
            seed,
            folder / "training.pt",
            make_step=lambda encoder, _: self.make_step(encoder).to(self.setting.device),
            outputs=self.outputs(),
            batches=self._pairs,
        )

    def state_dict(self) -> dict[str, Any]:
        """The weights, the numbers of the match probability, and what outputs mean."""
        return {"step": dict(fitted(self._step, self.name).state_dict()), "meaning": self.meaning()}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`.

        Raises:
            InputError: It was trained with options that give its outputs another meaning.
        """
        check_saved(state["meaning"], self.meaning())
        step = self.make_step(self.setting.make_encoder(outputs=self.outputs())).to(self.setting.device)
        step.load_state_dict(state["step"])
        self._step = step.eval()

    def _pairs(self, setting: Setting, images: Any, seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        batches = self.training.batches or math.ceil(len(images) / setting.batch_size)
        drawn = PairBatches(images.targets, setting.batch_size // 2, batches, generator)
        return DataLoader(
            images, batch_sampler=drawn, collate_fn=_same, generator=generator, num_workers=setting.workers
        )


def _same(batch: Any) -> Any:
    return batch

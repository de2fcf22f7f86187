"""A score of the retrieval: one score decides who is unknown, the distance to the gallery ranks the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import check_count, fitted
from benchmarks.experiments.methods.knn import NEIGHBORS, KNNFeatures
from benchmarks.experiments.methods.laplace_posthoc import LaplacePosthoc
from benchmarks.experiments.methods.on_base import OnBase
from contrastive_curvature import RetrievalUncertainty
from contrastive_curvature.errors import InputError, expected

_CALIBRATION = 2000
"""Training images that say what the uncertainty of a known input is."""


class LaplaceGated(OnBase):
    """:class:`~contrastive_curvature.RetrievalUncertainty` with the novelty of post-hoc LAM.

    Args:
        setting: That of the encoder.
        share: Of the known inputs, how many may be taken for unknown.
    """

    name = "laplace_gated"
    title = "LAM (post-hoc) + 10-NN distance, gated"

    def __init__(self, setting: Setting, share: float = 0.05) -> None:
        super().__init__(setting)
        self.share = share
        self._detector: Method | None = None
        self._score: RetrievalUncertainty | None = None

    def make_detector(self, plain: Split) -> OnBase:
        """The unfitted method whose score tells who is unknown, for these training images."""
        # Without sampled variants, which nobody asks for here.
        return LaplacePosthoc(replace(self.setting, n_samples=0))

    def calibration(self, plain: Split) -> Split:
        """Training images whose scores are those of known inputs."""
        rows = torch.randperm(len(plain), generator=torch.Generator().manual_seed(1))[:_CALIBRATION]
        return plain.take(rows)

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Fit the detector, embed the gallery, calibrate."""
        detector = self.make_detector(data.plain)
        detector.fit(data, seed, folder, self.base)
        self._calibrate(detector, data)

    def predict(self, split: Split) -> Prediction:
        """The encoder's embeddings; the gated score."""
        found = fitted(self._detector, self.name).predict(split)
        score = fitted(self._score, self.name)(found.mean, self._novelty(found))
        return Prediction(found.mean, score, seconds=None)

    def own_state(self) -> dict[str, Any]:
        """The detector's state."""
        return {"detector": fitted(self._detector, self.name).state_dict(), "share": self.share}

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`OnBase.load_own_state`.

        Raises:
            InputError: It was fitted with another share.
        """
        if state["share"] != self.share:
            raise InputError(expected("share", f"{state['share']}, as in the fit", self.share))
        detector = self.make_detector(data.plain)
        detector.load_state_dict(state["detector"], data)
        self._calibrate(detector, data)

    def _calibrate(self, detector: OnBase, data: RetrievalData) -> None:
        plain = data.plain
        known = self._novelty(detector.predict(self.calibration(plain)))
        self._detector = detector
        self._score = RetrievalUncertainty(self.base.outputs(plain), known, share=self.share)

    def _novelty(self, prediction: Prediction) -> Tensor:
        found = prediction.uncertainty if prediction.novelty is None else prediction.novelty
        return fitted(found, "a detector with a score")


class KNNGated(LaplaceGated):
    """The same with the distance in feature space as the novelty.

    Args:
        setting: That of the encoder.
        share: Of the known inputs, how many may be taken for unknown.
        gallery_size: Of the search in feature space at most, ``None`` for the setting's ``baseline_features``; a
            quarter of the training images is left out of it.
    """

    name = "knn_gated"
    title = "10-NN distances, features gate embedding"

    def __init__(self, setting: Setting, share: float = 0.05, gallery_size: int | None = None) -> None:
        super().__init__(setting, share)
        wanted = setting.baseline_features if gallery_size is None else gallery_size
        self.gallery_size = check_count("gallery_size", wanted, NEIGHBORS)

    def make_detector(self, plain: Split) -> OnBase:
        """See :meth:`LaplaceGated.make_detector`."""
        return KNNFeatures(self.setting, self._searched(plain))

    def calibration(self, plain: Split) -> Split:
        """Images that the detector does not search: one of them would be its own nearest neighbour."""
        # The order in which KNNFeatures draws its gallery.
        order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(0))
        return plain.take(order[self._searched(plain) :][:_CALIBRATION])

    def check_data(self, data: RetrievalData) -> None:
        """See :meth:`OnBase.check_data`.

        Raises:
            InputError: There are too few training images to leave some out.
        """
        least = -(-4 * NEIGHBORS // 3)
        if len(data.train) < least:
            raise InputError(expected("data.train", f"at least {least} images", len(data.train)))
        needed, left = math.ceil(1 / self.share) - 1, len(data.plain) - self._searched(data.plain)
        if left < needed:
            wanted = f"{needed} images that are not searched, for share = {self.share}"
            raise InputError(expected("data.train", wanted, left, "Use more images, or a smaller gallery_size."))

    def _searched(self, plain: Split) -> int:
        return min(self.gallery_size, 3 * len(plain) // 4)

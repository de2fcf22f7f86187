"""Distance to the ten nearest training images, in embeddings or in the features before the last layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data.split import RetrievalData, Split
from benchmarks.methods.base import Prediction, Setting
from benchmarks.methods.checks import check_count, fitted
from benchmarks.methods.embed import unit
from benchmarks.methods.on_base import OnBase
from contrastive_curvature.demo.baselines import embedding_distance, feature_distance
from contrastive_curvature.demo.config import NEIGHBORS
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hessian.sphere import check_outputs

__all__ = ["KNNEmbedding", "KNNFeatures"]

_BLOCK = 2000
"""Queries at once: beside the gallery no array is larger than their neighbours or their distances."""


class KNNEmbedding(OnBase):
    """Mean cosine distance to the embeddings of the ten nearest training images, without augmentation.

    Args:
        setting: That of the encoder.
    """

    name = "knn_embedding"
    title = "10-NN distance, embedding"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._gallery: Tensor | None = None

    def check_data(self, data: RetrievalData) -> None:
        """See :meth:`OnBase.check_data`.

        Raises:
            InputError: There are fewer than ten training images.
        """
        if len(data.train) < NEIGHBORS:
            raise InputError(expected("data.train", f"at least {NEIGHBORS} images", len(data.train)))

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Embed the training images."""
        self._gallery = self._read_gallery(data.plain)

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """Embed the training images again: the encoder and ``data`` determine the embeddings, so no file has them."""
        self.check_data(data)
        self.fit_on_base(data, 0, Path())

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; the distance, in [0, 2]."""
        gallery = fitted(self._gallery, self.name)
        parts = [self._scores(split.take(rows), gallery) for rows in torch.arange(len(split)).split(_BLOCK)]
        return Prediction(torch.cat([u for u, _ in parts]), torch.cat([distance for _, distance in parts]))

    def _read_gallery(self, plain: Split) -> Tensor:
        return self.base.outputs(plain)

    def _scores(self, split: Split, gallery: Tensor) -> tuple[Tensor, Tensor]:
        """Unit embeddings and distances of some images."""
        z = self.base.outputs(split)
        return unit(z), embedding_distance(z, gallery)


class KNNFeatures(KNNEmbedding):
    """The same between features, where directions are left that the last layer drops.

    Args:
        setting: That of the encoder.
        gallery_size: Training images to search at most, drawn with a fixed seed: their features stay in memory.

    Raises:
        InputError: ``gallery_size`` is below ten.
    """

    name = "knn_features"
    title = "10-NN distance, features"

    def __init__(self, setting: Setting, gallery_size: int = 10_000) -> None:
        super().__init__(setting)
        self.gallery_size = check_count("gallery_size", gallery_size, NEIGHBORS)

    def own_state(self) -> dict[str, Any]:
        """The size that the scores belong to."""
        return {"gallery_size": self.gallery_size}

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`KNNEmbedding.load_own_state`.

        Raises:
            InputError: The scores were fitted with another gallery size.
        """
        if state["gallery_size"] != self.gallery_size:
            raise InputError(expected("gallery_size", f"{state['gallery_size']}, as in the fit", self.gallery_size))
        super().load_own_state(state, data)

    def _read_gallery(self, plain: Split) -> Tensor:
        rows = torch.randperm(len(plain), generator=torch.Generator().manual_seed(0))[: self.gallery_size]
        _, phi = self.base.features(plain.take(rows))
        return check_outputs(phi, "features of training images").to(self.setting.device)

    def _scores(self, split: Split, gallery: Tensor) -> tuple[Tensor, Tensor]:
        z, phi = self.base.features(split)
        queries = check_outputs(phi, "features").to(gallery.device)
        return unit(z), feature_distance(queries, gallery, self.setting.progress).cpu()

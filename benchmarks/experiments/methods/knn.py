"""Distance to the ten nearest training images, in embeddings or in the features before the last layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Prediction, Setting
from benchmarks.experiments.methods.checks import check_count, fitted
from benchmarks.experiments.methods.embed import unit
from benchmarks.experiments.methods.on_base import OnBase
from contrastive_curvature.embedding.gallery import neighbor_distance
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hessian.sphere import check_outputs

NEIGHBORS = 10
"""Neighbours of these methods, and of the retrieval whose figures the tables show."""

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
        return unit(z), neighbor_distance(z, gallery, NEIGHBORS)


class KNNFeatures(KNNEmbedding):
    """The same between features, where directions are left that the last layer drops.

    Args:
        setting: That of the encoder.
        gallery_size: Training images to search at most, drawn with a fixed seed: their features stay in memory.
            ``None`` for the setting's ``baseline_features``.

    Raises:
        InputError: ``gallery_size`` is below ten.
    """

    name = "knn_features"
    title = "10-NN distance, features"

    def __init__(self, setting: Setting, gallery_size: int | None = None) -> None:
        super().__init__(setting)
        wanted = setting.baseline_features if gallery_size is None else gallery_size
        self.gallery_size = check_count("gallery_size", wanted, NEIGHBORS)

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


def feature_distance(queries: Tensor, gallery: Tensor, progress: bool = False) -> Tensor:
    """Mean cosine distance to the ten nearest gallery points, for long vectors.

    In blocks of queries and of gallery, so that beside both nothing larger than a block times a block is held.

    Args:
        queries: Features, shape (N, F).
        gallery: Features, shape (M, F), M >= 10.
        progress: Whether to show a progress bar.

    Returns:
        Shape (N,), in [0, 2].
    """
    lengths = gallery.norm(dim=1)
    parts = []
    for rows in tqdm(queries.split(_BLOCK), desc="[feature baseline]", leave=False, disable=not progress):
        unit_rows = rows / rows.norm(dim=1, keepdim=True)
        best = unit_rows.new_full((len(rows), NEIGHBORS), -1.0)
        for block, length in zip(gallery.split(_BLOCK), lengths.split(_BLOCK), strict=True):
            best = torch.cat([best, unit_rows @ block.T / length], dim=1).topk(NEIGHBORS, dim=1).values
        parts.append(1 - best.mean(1))
    return torch.cat(parts)

"""Scores on top of a trained encoder: its norm, densities of classes, and neighbours."""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Prediction, Setting
from benchmarks.experiments.methods.deterministic import OnBase
from benchmarks.experiments.methods.embed import unit
from contrastive_curvature import metrics, vmf
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.metrics.neighbors import squared_distances
from contrastive_curvature.vmf.estimation import sra


class NormScore(OnBase):
    """Long outputs count as certain: those of images that the network answers strongly.

    Read as the concentration of a von Mises-Fisher distribution around the embedding, the norm is that score too: any
    decreasing function of it ranks alike.

    Args:
        setting: That of the encoder.
    """

    name = "norm"

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; minus the norm, in units of the raw outputs."""
        z = self.base.outputs(split)
        return Prediction(unit(z), -z.norm(dim=1))


_BLOCK = 2**24
"""Densities held at once."""


class VMFMixture:
    """A mixture of one von Mises-Fisher distribution for each class, weighted by the classes' frequencies.

    Args:
        mu: Mean directions, shape (C, D).
        kappa: Concentrations, shape (C,).
        log_weight: Logarithms of the frequencies, shape (C,).
    """

    def __init__(self, mu: Tensor, kappa: Tensor, log_weight: Tensor) -> None:
        self.mu, self.kappa, self.log_weight = mu.double(), kappa.double(), log_weight.double()

    @classmethod
    def fit(cls, u: Tensor, labels: Tensor) -> VMFMixture:
        """Estimate every class (Sra 2012, by :func:`contrastive_curvature.vmf.fit`).

        A class with one image has no spread of its own and takes that of all others together.

        Args:
            u: Unit embeddings, shape (N, D).
            labels: Shape (N,).

        Returns:
            The mixture.

        Raises:
            InputError: No class has two images.
        """
        _, sizes = labels.unique(return_counts=True)
        if int(sizes.max()) < 2:
            raise InputError("data.train", "a class with at least 2 images", "one image of every class")
        groups = [group.double() for group in u[labels.argsort(stable=True)].split(sizes.tolist())]
        # For each image of a class of several: squared distance to its class's mean, which is 1 - Rbar^2 on average.
        spread = torch.cat([(group - group.mean(0)).square().sum(1) for group in groups if len(group) > 1]).mean()
        pooled = sra((1 - spread).clamp(min=0).sqrt(), spread, u.shape[1])
        found = [vmf.fit(group) if len(group) > 1 else (group[0], pooled) for group in groups]
        mu, kappa = (torch.stack(part) for part in zip(*found, strict=True))
        return cls(mu, kappa, (sizes / sizes.sum()).log())

    def log_prob(self, u: Tensor) -> Tensor:
        """Log-density with respect to the surface measure.

        Args:
            u: Unit embeddings, shape (N, D).

        Returns:
            In nats, float64, shape (N,).
        """
        peak = self.log_weight + vmf.log_density_at_mode(self.kappa, self.mu.shape[1])
        parts = [
            torch.logsumexp(peak - self.kappa * (1 - rows.double() @ self.mu.T), dim=1)
            for rows in u.split(max(1, _BLOCK // len(self.mu)))
        ]
        return torch.cat(parts)


class VMFDensity(OnBase):
    """Minus the log-density of the embedding under the training classes.

    The score is meant for images of these classes; those of new ones count as out of distribution.

    Args:
        setting: That of the encoder.
    """

    name = "vmf_density"

    def fit_on_base(self, data: RetrievalData, seed: int) -> None:
        """Estimate the classes.

        Raises:
            UnsupportedError: The training images have positions instead of classes.
        """
        plain = data.plain
        if plain.targets.is_floating_point():
            raise UnsupportedError(
                "vmf_density: the training images have positions and no classes. Take 'knn_embedding' instead."
            )
        self._mixture = VMFMixture.fit(unit(self.base.outputs(plain)), plain.targets)

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; minus the log-density in nats."""
        u = unit(self.base.outputs(split))
        return Prediction(u, -self._mixture.log_prob(u).float())


NEIGHBORS = 10
"""Neighbours of these methods, and of the retrieval whose figures the tables show."""

_BLOCK_KNN = 2000
"""Queries at once: beside the gallery no array is larger than their neighbours or their distances."""


class KNNEmbedding(OnBase):
    """Mean cosine distance to the embeddings of the ten nearest training images, without augmentation.

    Args:
        setting: That of the encoder.
    """

    name = "knn_embedding"

    def fit_on_base(self, data: RetrievalData, seed: int) -> None:
        """Embed the training images."""
        self._gallery = self._read_gallery(data.plain)

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; the distance, in [0, 2]."""
        parts = [self._scores(split.take(rows), self._gallery) for rows in torch.arange(len(split)).split(_BLOCK_KNN)]
        return Prediction(torch.cat([u for u, _ in parts]), torch.cat([distance for _, distance in parts]))

    def _read_gallery(self, plain: Split) -> Tensor:
        return self.base.outputs(plain)

    def _scores(self, split: Split, gallery: Tensor) -> tuple[Tensor, Tensor]:
        """Unit embeddings and distances of some images."""
        z = self.base.outputs(split)
        return unit(z), neighbor_distance(z, gallery)


def neighbor_distance(queries: Tensor, gallery: Tensor) -> Tensor:
    """Mean cosine distance (N,) of queries (N, D) to the ten nearest gallery points (M, D), in [0, 2].

    For unit embeddings it is half the mean squared Euclidean distance, so both give the same order.
    """
    nearest = metrics.nearest_neighbors(queries, gallery, k=NEIGHBORS)
    return squared_distances(normalize(queries)[0], normalize(gallery)[0], nearest).mean(1) / 2


class KNNFeatures(KNNEmbedding):
    """The same between features, where directions are left that the last layer drops.

    Args:
        setting: That of the encoder.
        gallery_size: Training images to search at most, drawn with a fixed seed: their features stay in memory.
            ``None`` for the setting's ``baseline_features``.
    """

    name = "knn_features"

    def __init__(self, setting: Setting, gallery_size: int | None = None) -> None:
        super().__init__(setting)
        self.gallery_size = setting.baseline_features if gallery_size is None else gallery_size

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
    for rows in tqdm(queries.split(_BLOCK_KNN), desc="[feature baseline]", leave=False, disable=not progress):
        unit_rows = rows / rows.norm(dim=1, keepdim=True)
        best = unit_rows.new_full((len(rows), NEIGHBORS), -1.0)
        for block, length in zip(gallery.split(_BLOCK_KNN), lengths.split(_BLOCK_KNN), strict=True):
            best = torch.cat([best, unit_rows @ block.T / length], dim=1).topk(NEIGHBORS, dim=1).values
        parts.append(1 - best.mean(1))
    return torch.cat(parts)

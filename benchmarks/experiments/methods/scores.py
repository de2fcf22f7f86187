"""A trained encoder as it is, and scores on top of it: its norm, densities of classes, and neighbours."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.training import Fitted, Prediction, Setting, analysed, encode, features_of, unit
from contrastive_curvature import metrics, vmf
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.metrics.neighbors import squared_distances
from contrastive_curvature.progress import Progress
from contrastive_curvature.vmf.estimation import sra

NEIGHBORS = 10
"""Neighbours of these methods, and of the retrieval whose figures the tables show."""
_GALLERY = 10_000
"""Training images whose features are searched at most: they stay in memory."""
_BLOCK = 2**24
"""Densities held at once."""
_BLOCK_KNN = 2000
"""Queries at once: beside the gallery no array is larger than their neighbours or their distances."""
Encoders = list[nn.Module]


def deterministic(setting: Setting, data: RetrievalData, seed: int, encoders: Encoders) -> Fitted:
    """Embed, without uncertainty (paper, G.4)."""
    return Fitted(lambda split: Prediction(unit(encode(setting, encoders[0], split))))


def norm(setting: Setting, data: RetrievalData, seed: int, encoders: Encoders) -> Fitted:
    """Count long outputs as certain: those of images that the network answers strongly.

    Read as the concentration of a von Mises-Fisher distribution around the embedding, the norm is that score too: any
    decreasing function of it ranks alike.
    """

    def predict(split: Split) -> Prediction:
        z = encode(setting, encoders[0], split)
        return Prediction(unit(z), -z.norm(dim=1))

    return Fitted(predict)


class VMFMixture(NamedTuple):
    """A mixture of one von Mises-Fisher distribution for each class, weighted by the classes' frequencies.

    Args:
        mu: Mean directions, shape (C, D).
        kappa: Concentrations, shape (C,).
        log_weight: Logarithms of the frequencies, shape (C,).
    """

    mu: Tensor
    kappa: Tensor
    log_weight: Tensor

    @classmethod
    def fit(cls, u: Tensor, labels: Tensor) -> VMFMixture:
        """Estimate every class (Sra 2012, by :func:`contrastive_curvature.vmf.fit`).

        A class with one image has no spread of its own and takes that of all others together.

        Args:
            u: Unit embeddings, shape (N, D).
            labels: Shape (N,).
        """
        _, sizes = labels.unique(return_counts=True)
        groups = [group.double() for group in u[labels.argsort(stable=True)].split(sizes.tolist())]
        # For each image of a class of several: squared distance to its class's mean, which is 1 - Rbar^2 on average.
        spread = torch.cat([(group - group.mean(0)).square().sum(1) for group in groups if len(group) > 1]).mean()
        pooled = sra((1 - spread).clamp(min=0).sqrt(), spread, u.shape[1])
        classes = [vmf.fit(group) if len(group) > 1 else (group[0], pooled) for group in groups]
        mu, kappa = (torch.stack(part).double() for part in zip(*classes, strict=True))
        return cls(mu, kappa, (sizes / sizes.sum()).log().double())

    def log_prob(self, u: Tensor) -> Tensor:
        """Log-density of unit embeddings (N, D) by the surface measure, in nats, float64, shape (N,)."""
        peak = self.log_weight + vmf.log_density_at_mode(self.kappa, self.mu.shape[1])
        parts = [
            torch.logsumexp(peak - self.kappa * (1 - rows.double() @ self.mu.T), dim=1)
            for rows in u.split(max(1, _BLOCK // len(self.mu)))
        ]
        return torch.cat(parts)


def vmf_density(setting: Setting, data: RetrievalData, seed: int, encoders: Encoders) -> Fitted:
    """Score by minus the log-density under the training classes; images of new classes count as unknown."""
    mixture = VMFMixture.fit(unit(encode(setting, encoders[0], data.train)), data.train.targets)

    def predict(split: Split) -> Prediction:
        u = unit(encode(setting, encoders[0], split))
        return Prediction(u, -mixture.log_prob(u).float())

    return Fitted(predict)


def knn_embedding(setting: Setting, data: RetrievalData, seed: int, encoders: Encoders) -> Fitted:
    """Score by the mean cosine distance to the embeddings of the ten nearest training images, in [0, 2]."""
    gallery = encode(setting, encoders[0], data.train)

    def predict(split: Split) -> Prediction:
        z = encode(setting, encoders[0], split)
        return Prediction(unit(z), torch.cat([neighbor_distance(rows, gallery) for rows in z.split(_BLOCK_KNN)]))

    return Fitted(predict)


def neighbor_distance(queries: Tensor, gallery: Tensor) -> Tensor:
    """Mean cosine distance (N,) of queries (N, D) to the ten nearest gallery points (M, D), in [0, 2].

    For unit embeddings it is half the mean squared Euclidean distance, so both give the same order.
    """
    nearest = metrics.nearest_neighbors(queries, gallery, k=NEIGHBORS)
    return squared_distances(normalize(queries)[0], normalize(gallery)[0], nearest).mean(1) / 2


def knn_features(setting: Setting, data: RetrievalData, seed: int, encoders: Encoders) -> Fitted:
    """Score by the same distance between features, where directions are left that the last layer drops."""
    encoder = analysed(setting, encoders[0], data)
    rows = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:_GALLERY]
    gallery = check_outputs(features_of(setting, encoder, data.train.take(rows))[1], "features of training images")

    def predict(split: Split) -> Prediction:
        parts: list[Any] = []
        for block in torch.arange(len(split)).split(_BLOCK_KNN):
            z, phi = features_of(setting, encoder, split.take(block))
            distance = feature_distance(check_outputs(phi, "features"), gallery, setting.progress)
            parts.append((unit(z).cpu(), distance.cpu()))
        u, distances = (torch.cat(part) for part in zip(*parts, strict=True))
        return Prediction(u, distances)

    return Fitted(predict)


def feature_distance(queries: Tensor, gallery: Tensor, progress: bool | None = False) -> Tensor:
    """Mean cosine distance to the ten nearest gallery points, for long vectors.

    In blocks of queries and of gallery, so that beside both nothing larger than a block times a block is held.

    Args:
        queries: Features, shape (N, F).
        gallery: Features, shape (M, F), M >= 10.
        progress: Whether to show a progress bar; ``None`` shows it from the tenth second on.

    Returns:
        Shape (N,), in [0, 2].
    """
    lengths = gallery.norm(dim=1)
    parts = []
    for rows in Progress(progress).over(queries.split(_BLOCK_KNN), "[feature baseline]"):
        unit_rows = rows / rows.norm(dim=1, keepdim=True)
        best = unit_rows.new_full((len(rows), NEIGHBORS), -1.0)
        for block, length in zip(gallery.split(_BLOCK_KNN), lengths.split(_BLOCK_KNN), strict=True):
            best = torch.cat([best, unit_rows @ block.T / length], dim=1).topk(NEIGHBORS, dim=1).values
        parts.append(1 - best.mean(1))
    return torch.cat(parts)

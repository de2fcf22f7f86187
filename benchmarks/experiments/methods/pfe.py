"""Probabilistic face embeddings (Shi and Jain 2019; paper, G.4): a head learns how far embeddings scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from benchmarks.experiments import training
from benchmarks.experiments.data import RetrievalData, Split
from contrastive_curvature import ContrastiveLoss
from contrastive_curvature.pairs import RelationFunction

_FLOOR = 1e-6
"""Smallest variance, which keeps the loss bounded for pairs of the same image."""
_RATE = 1e-3
"""Learning rate of the head's first epoch."""


def mutual_likelihood_score(mu_a: Tensor, var_a: Tensor, mu_b: Tensor, var_b: Tensor) -> Tensor:
    """Log-likelihood, in nats, that two Gaussian embeddings share one latent code (Shi and Jain 2019, Eq. 3).

    ``-1/2 sum_d [(mu_a - mu_b)^2 / (var_a + var_b) + log(var_a + var_b)] - D/2 log(2 pi)``.

    Args:
        mu_a: Means, shape (..., D).
        var_a: Variances, shape (..., D), above zero.
        mu_b: Means of the others, shape (..., D).
        var_b: Their variances, shape (..., D).
    """
    both = var_a + var_b
    inner = (mu_a - mu_b).square() / both + both.log() + math.log(2 * math.pi)
    return -inner.sum(-1) / 2


class SharedBatchNorm(nn.Module):
    """Batch normalisation with one scale and one shift for all D dimensions, as Shi and Jain end their module.

    They start at ``1e-4`` and ``-7``: nearly the same variance ``exp(-7)`` everywhere.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, affine=False)
        self.scale = nn.Parameter(torch.tensor(1e-4))
        self.shift = nn.Parameter(torch.tensor(-7.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.norm(x) + self.shift


class MutualLikelihoodStep(nn.Module):
    """Minus the mean mutual likelihood score over the positive pairs of a batch; only the head is trained.

    Args:
        head: Features -> logarithms of the variances.
        read: A batch -> unit embeddings (N, D) and features (N, F), without a graph.
        relation: Of targets that are no classes.
    """

    def __init__(
        self,
        head: nn.Module,
        read: Callable[[Tensor], tuple[Tensor, Tensor]],
        relation: RelationFunction | None = None,
    ) -> None:
        super().__init__()
        self.head, self.read, self.relation = head, read, relation

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        mu, phi = self.read(x)
        i, j, _, _ = ContrastiveLoss(None).mine(mu, targets, self.relation)
        # Small classes have an image twice in a batch, and with itself it agrees at any variance.
        other = (mu[i] != mu[j]).any(1)
        i, j = i[other], j[other]
        if not len(i):
            # Nor may the batch move running statistics: a single image, an epoch's last, has no variance to norm by.
            return torch.stack([p.sum() * 0 for p in self.head.parameters()]).sum()
        variance = self.head(phi).exp() + _FLOOR
        return -mutual_likelihood_score(mu[i], variance[i], mu[j], variance[j]).mean()


def pfe(setting: training.Setting, data: RetrievalData, seed: int, encoders: list[nn.Module]) -> training.Fitted:
    """Learn Gaussian embeddings: the frozen encoder's mean, and variances by a head on the features.

    Its score is the variance, averaged over dimensions. Variants: ``"sum_std"``, the sum of the standard deviations
    (the code released with the paper), and ``"harmonic"``, the harmonic mean of the variances (Shi and Jain 2019,
    section 4.2). The features of the training images are computed once if they fit in memory.
    """
    training.seed_everything(seed)
    dim, width = setting.dim, encoders[0].get_submodule("head").in_features
    layers = (nn.Linear(width, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim), SharedBatchNorm(dim))
    head = nn.Sequential(*layers).to(setting.device)
    encoder = training.analysed(setting, encoders[0], data)

    @torch.no_grad()
    def of_images(x: Tensor) -> tuple[Tensor, Tensor]:
        z, phi = encoder.forward_with_features(x)
        return training.unit(z), phi

    rows: Any = data.train
    more: dict[str, Any] = {}
    read = of_images
    if len(data.train) * (width + dim) * 4 <= training.CACHE_BYTES:
        z, phi = training.features_of(setting, encoder, data.train)
        rows, more = (
            TensorDataset(torch.cat([training.unit(z), phi], 1).cpu(), data.train.targets),
            {"collate_fn": default_collate},
        )

        def read(row: Tensor) -> tuple[Tensor, Tensor]:
            return row[:, :dim], row[:, dim:]

    batches = training.training_loader(setting, rows, data.train.targets, seed, **more)
    training.run_training(setting, MutualLikelihoodStep(head, read, data.relation), batches, _RATE)
    head.eval()

    def gaussians(split: Split) -> tuple[Tensor, Tensor]:
        """Unit means and variances, each (N, D)."""

        def both(x: Tensor) -> Tensor:
            u, phi = of_images(x)
            return torch.cat([u, head(phi).exp() + _FLOOR], 1)

        out = training.encode(setting, both, split)
        return out[:, :dim], out[:, dim:]

    def predict(split: Split) -> training.Prediction:
        u, variance = gaussians(split)
        variants = {"sum_std": variance.sqrt().sum(1), "harmonic": 1 / (1 / variance).mean(1)}
        return training.Prediction(u, variance.mean(1), variants)

    def samples(split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        u, variance = gaussians(split)
        std = variance.sqrt()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            yield training.unit(u + std * torch.randn(u.shape, generator=generator))

    return training.Fitted(predict, samples)

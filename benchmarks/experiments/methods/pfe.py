"""Probabilistic face embeddings (Shi and Jain 2019; paper, G.4): a head learns how far embeddings scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods import embed
from benchmarks.experiments.methods.base import Prediction
from benchmarks.experiments.methods.deterministic import OnBase
from benchmarks.experiments.methods.training import run_training, seed_everything, training_loader
from contrastive_curvature import ContrastiveLoss
from contrastive_curvature.pairs import RelationFunction

_FLOOR = 1e-6
"""Smallest variance, which keeps the loss bounded for pairs of the same image."""
_RATE = 1e-3
"""Learning rate of the head's first epoch."""


def mutual_likelihood_score(mu_a: Tensor, var_a: Tensor, mu_b: Tensor, var_b: Tensor) -> Tensor:
    """Log-likelihood that two Gaussian embeddings share one latent code (Shi and Jain 2019, Eq. 3).

    ``-1/2 sum_d [(mu_a - mu_b)^2 / (var_a + var_b) + log(var_a + var_b)] - D/2 log(2 pi)``.

    Args:
        mu_a: Means, shape (..., D).
        var_a: Variances, shape (..., D), above zero.
        mu_b: Means of the others, shape (..., D).
        var_b: Their variances, shape (..., D).

    Returns:
        Scores in nats, shape (...).
    """
    both = var_a + var_b
    inner = (mu_a - mu_b).square() / both + both.log() + math.log(2 * math.pi)
    return -inner.sum(-1) / 2


class SharedBatchNorm(nn.Module):
    """Batch normalisation with one scale and one shift for all dimensions, as Shi and Jain end their module.

    They start at ``1e-4`` and ``-7``: nearly the same variance ``exp(-7)`` everywhere.

    Args:
        dim: D.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, affine=False)
        self.scale = nn.Parameter(torch.tensor(1e-4))
        self.shift = nn.Parameter(torch.tensor(-7.0))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape (N, D)."""
        return self.scale * self.norm(x) + self.shift


class VarianceHead(nn.Sequential):
    """Features -> variance of every dimension of the embedding; its modules give the logarithm.

    Args:
        features: F.
        dim: D.
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__(
            nn.Linear(features, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim), SharedBatchNorm(dim)
        )
        self.features = features

    def forward(self, phi: Tensor) -> Tensor:
        """Variances (N, D), above zero, of features (N, F)."""
        log_variance: Tensor = super().forward(phi)  # type: ignore[no-untyped-call]
        return log_variance.exp() + _FLOOR


class MutualLikelihoodStep(nn.Module):
    """Minus the mean mutual likelihood score over the positive pairs of a batch; only the head is trained.

    Args:
        head: See :class:`VarianceHead`.
        encode: A batch -> unit embeddings (N, D) and features (N, F), without a graph.
        relation: On positions, which images show the same place; ``None`` for class labels.
    """

    def __init__(
        self,
        head: VarianceHead,
        encode: Callable[[Tensor], tuple[Tensor, Tensor]],
        relation: RelationFunction | None = None,
    ) -> None:
        super().__init__()
        self.head, self.encode, self.relation = head, encode, relation

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar; zero, with a zero gradient, for a batch without positive pairs."""
        mu, phi = self.encode(x)
        i, j, _, _ = ContrastiveLoss(None).mine(mu, targets, self.relation)
        # Small classes have an image twice in a batch, and with itself it agrees at any variance.
        other = (mu[i] != mu[j]).any(1)
        i, j = i[other], j[other]
        if not len(i):
            # Nor may the batch move running statistics: a single image, an epoch's last, has no variance to norm by.
            return torch.stack([p.sum() * 0 for p in self.head.parameters()]).sum()
        variance = self.head(phi)
        return -mutual_likelihood_score(mu[i], variance[i], mu[j], variance[j]).mean()


class PFE(OnBase):
    """Gaussian embeddings: the frozen encoder's mean, and variances by a head on the features before its last layer.

    Args:
        setting: Its batches and epochs are the head's too. The head sees images without augmentation, whose features
            are computed once if they fit in memory.
    """

    name = "pfe"

    def fit_on_base(self, data: RetrievalData, seed: int) -> None:
        """Train the head."""
        seed_everything(seed)
        width = self.base.encoder.get_submodule("head").in_features
        self._head = VarianceHead(width, self.setting.dim).to(self.setting.device)
        train = data.plain
        width = self._head.features + self.setting.dim
        rows: Split | _Rows = train
        encode: Callable[[Tensor], tuple[Tensor, Tensor]] = self._encode
        if len(train) * width * 4 <= embed.CACHE_BYTES:
            z, phi = self.base.features(train)
            rows, encode = _Rows(torch.cat([embed.unit(z), phi], 1), train.targets), self._parts
        step = MutualLikelihoodStep(self._head, encode, self.setting.relation)
        batches = training_loader(self.setting, rows, seed)
        run_training(self.setting, step, batches, self.setting.epochs, _RATE)
        self._head.eval()

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; the variance, averaged over dimensions.

        Returns:
            Variants: ``"sum_std"``, the sum of the standard deviations (the code released with the paper), and
            ``"harmonic"``, the harmonic mean of the variances (Shi and Jain 2019, section 4.2).
        """
        u, variance = self._gaussians(split)
        variants = {"sum_std": variance.sqrt().sum(1), "harmonic": 1 / (1 / variance).mean(1)}
        return Prediction(u, variance.mean(1), variants)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Draws from each image's own Gaussian, put on the sphere."""
        u, variance = self._gaussians(split)
        std = variance.sqrt()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            yield embed.unit(u + std * torch.randn(u.shape, generator=generator))

    def _gaussians(self, split: Split) -> tuple[Tensor, Tensor]:
        """Unit means and variances, each (N, D)."""

        def encode(x: Tensor) -> Tensor:
            u, phi = self._encode(x)
            return torch.cat([u, self._head(phi)], 1)

        both = embed.map_batches(encode, split, self.setting, "PFE")
        return both[:, : self.setting.dim], both[:, self.setting.dim :]

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unit means and features of images."""
        z, phi = self.base.encode_features(x)
        return embed.unit(z), phi

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The same of rows that hold both."""
        return row[:, : self.setting.dim], row[:, self.setting.dim :]


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """What the frozen encoder gave for each image, (N, D + F), with the images' targets."""

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, wanted: list[int]) -> tuple[Tensor, Tensor]:
        return self.rows[wanted], self.targets[wanted]

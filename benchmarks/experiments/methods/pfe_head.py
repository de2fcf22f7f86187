"""The uncertainty module of probabilistic face embeddings and its loss (Shi and Jain 2019; paper, G.4)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from contrastive_curvature import ContrastiveLoss
from contrastive_curvature.pairs import RelationFunction

_FLOOR = 1e-6
"""Smallest variance, which keeps the loss bounded for pairs of the same image."""


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

"""Training with triplets: the deterministic loss, and the Bayesian one, of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.experiments.methods.triplet_mining import mine_triplets
from benchmarks.experiments.methods.triplet_options import BayesianOptions
from contrastive_curvature.hedged.match import inverse_softplus
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.triplet import kl_to_normal, kl_to_uniform, log_normal_cdf, log_probability
from contrastive_curvature.triplet.moments import Directed, Spread, moments_of_vmf, spread_of

__all__ = ["BayesianStep", "TripletStep", "gaussians", "raw_outputs"]

_FLOOR = 1e-6
"""Smallest variance, so that divergences stay finite."""


def raw_outputs(dim: int, options: BayesianOptions) -> int:
    """How many outputs an encoder has: those of the mean, and one or D of the variance."""
    return dim + (1 if options.variance == "isotropic" else dim)


def gaussians(raw: Tensor, dim: int, options: BayesianOptions) -> tuple[Tensor, Tensor]:
    """Means and variances from raw outputs.

    Variances are ``softplus(gain raw + shift) + 1e-6``: close to ``exp`` while they are small, and linear, so that one
    step does not blow them up, where they are large. The shift gives the first variance at ``raw = 0``.

    Args:
        raw: Shape (N, D + 1) or (N, 2 D): the mean, then what becomes the variance.
        dim: D.
        options: See there.

    Returns:
        Mean (N, D), and variance (N, 1) or (N, D).
    """
    mean, spread = raw[:, :dim], raw[:, dim:]
    if options.normalized:
        mean = normalize(check_outputs(mean, "means"))[0]
    return mean, softplus(options.variance_gain * spread + inverse_softplus(options.first_variance)) + _FLOOR


class TripletStep(nn.Module):
    """The mean of ``|a - p|^2 - |a - n|^2 + margin`` over the triplets of a batch where it is above 0.

    Args:
        encoder: Images -> raw outputs (N, D), which are put on the unit sphere.
        margin: On differences of squared distances.
        negatives: Of each positive pair at most, see :func:`mine_triplets`.
        relation: On positions, which images show the same place; ``None`` for class labels.
    """

    def __init__(
        self, encoder: nn.Module, margin: float, negatives: int | None, relation: RelationFunction | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.margin, self.negatives, self.relation = encoder, margin, negatives, relation

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar; zero, with a zero gradient, for a batch without such triplets."""
        z: Tensor = self.encoder(x)
        u = normalize(check_outputs(z))[0]
        a, p, n = mine_triplets(u, targets, self.margin, self.negatives, self.relation)
        if not len(a):
            return z.sum() * 0
        near, far = (u[a] - u[p]).square().sum(1), (u[a] - u[n]).square().sum(1)
        return (near - far + self.margin).mean()


class BayesianStep(nn.Module):
    """The Bayesian triplet loss, averaged over triplets of a batch.

    It is the mean of :func:`contrastive_curvature.triplet.bayesian_triplet_loss`, in less time.

    Args:
        encoder: Images -> raw outputs, as many as :func:`raw_outputs` says.
        dim: D.
        options: See there.
        relation: On positions, which images show the same place; ``None`` for class labels.
    """

    def __init__(
        self, encoder: nn.Module, dim: int, options: BayesianOptions, relation: RelationFunction | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.dim, self.options, self.relation = encoder, dim, options, relation

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats, a scalar; zero, with a zero gradient, for a batch without triplets."""
        options, z = self.options, self.encoder(x)
        mean, variance = gaussians(z, self.dim, options)
        triplet = mine_triplets(mean, targets, options.mining_margin, options.negatives, self.relation)
        if not len(triplet[0]):
            return torch.as_tensor(z.sum() * 0)
        likelihood = self._log_probability(mean, variance, triplet).mean()
        return options.kl_weight * self._divergence(mean, variance, triplet) - likelihood

    def _log_probability(self, mean: Tensor, variance: Tensor, triplet: tuple[Tensor, ...]) -> Tensor:
        if self.options.moments == "gaussian":
            a, p, n = ((mean[i], variance[i]) for i in triplet)
            return log_probability(a, p, n, self.options.margin)
        # Once an image, and not once a triplet: that takes four fifths of the time.
        mean, spread = mean.double(), spread_of(1 / variance.double().squeeze(1), self.dim)
        a, p, n = (Directed(mean[i], Spread(*(part[i] for part in spread))) for i in triplet)
        tau = moments_of_vmf(a, p, n)
        return log_normal_cdf(-(tau.mean + self.options.margin) / tau.variance.sqrt())

    def _divergence(self, mean: Tensor, variance: Tensor, triplet: tuple[Tensor, ...]) -> Tensor:
        """The mean over triplets of the sum of their three divergences, each of which is computed once an image."""
        if self.options.distribution == "vmf":
            each = kl_to_uniform(1 / variance.squeeze(1), self.dim)
        else:
            each = kl_to_normal(mean, variance, self.options.prior_variance)
        share = torch.bincount(torch.cat(triplet), minlength=len(each)) / len(triplet[0])
        return (share.to(each.dtype) * each).sum()

"""The Bayesian triplet loss and its parts, for embeddings that are Gaussians (Warburg et al. 2021).

An embedding is a pair ``(mean, variance)`` of tensors: mean (..., D), and variance (..., D) for a diagonal covariance
or (..., 1) for an isotropic one. Embeddings that are von Mises-Fisher distributions have their own moments of tau and
their own divergence. Shape letters: ``D`` dimension of the embedding, ``...`` any batch shape. The batch shapes of
anchor, positive and negative are broadcast. The three embeddings are independent.

All work is done in float64 and returned in the dtype of the arguments; half precision is returned as float32.

Every function raises an ``InputError`` that names the argument for values that its ``Args`` do not allow: another shape
or dimension, batch shapes that do not broadcast, NaN and infinity, a negative or zero number, an unknown option.
"""

from __future__ import annotations

from contrastive_curvature.triplet.divergence import kl_to_normal, kl_to_uniform
from contrastive_curvature.triplet.gaussian_moments import TauMoments, tau_moments, tau_moments_vmf
from contrastive_curvature.triplet.loss import bayesian_triplet_loss
from contrastive_curvature.triplet.probability import log_normal_cdf, log_probability

__all__ = [
    # three embeddings -> tau -> its probability
    "tau_moments",
    "tau_moments_vmf",
    "TauMoments",
    "log_normal_cdf",
    "log_probability",
    # one embedding -> its distance to the prior
    "kl_to_normal",
    "kl_to_uniform",
    # all of it
    "bayesian_triplet_loss",
]

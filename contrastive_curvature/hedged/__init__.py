"""Hedged instance embeddings: embeddings that are Gaussians or mixtures of them, compared by their samples.

After "Modeling uncertainty with hedged instance embedding" (under review at ICLR 2019). Shape letters: ``D`` dimension
of the embedding, ``C`` components of a mixture, ``K`` samples of an embedding, ``...`` any batch shape. An embedding is
a mean and a variance, both (..., C, D); the components have equal weights and diagonal covariances. Batch shapes of two
embeddings are broadcast. Half precision is converted to float32.

Every function raises an ``InputError`` that names the argument for values that its ``Args`` do not allow: another shape
or dimension, NaN and infinity, a number that is not positive, an unknown option, no pairs for a mean.
"""

from __future__ import annotations

from contrastive_curvature.hedged.matching import (
    MatchParameters,
    match_logits,
    match_probability,
    self_mismatch,
    stratified_samples,
)
from contrastive_curvature.hedged.objective import (
    hard_contrastive_loss,
    kl_bound,
    kl_estimate,
    match_loss,
    soft_contrastive_loss,
    vib_objective,
)

__all__ = [
    # points
    "MatchParameters",
    "match_logits",
    "soft_contrastive_loss",
    "hard_contrastive_loss",
    # an embedding -> samples -> probability of a match, uncertainty
    "stratified_samples",
    "match_probability",
    "self_mismatch",
    # training
    "match_loss",
    "kl_bound",
    "kl_estimate",
    "vib_objective",
]

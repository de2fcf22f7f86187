"""The von Mises-Fisher distribution on the unit sphere: estimation, density, normaliser, sampling and distances.

The density of a direction ``u`` on the sphere of R^D (D >= 2), with respect to the surface measure, is
``C_D(kappa) exp(kappa <mu, u>)`` (Warburg et al. 2023, appendix C). Shape letters: ``S`` samples, ``D`` ambient
dimension, ``...`` any batch shape. Directions (``samples``, ``mean``, ``mu``, ``z``) need not be normalised: they are
divided by their norm. Half precision is converted to float32.

Every function raises an ``InputError`` that names the argument for values that its ``Args`` do not allow: another shape
or dimension, D < 2, a zero vector, NaN and infinity, a negative concentration or variance, batch shapes that do not
broadcast.
"""

from __future__ import annotations

from contrastive_curvature.vmf.density import (
    kl_divergence,
    log_density_at_mode,
    log_normalizer,
    log_normalizer_quadratic,
    log_prob,
    mean_resultant_length,
)
from contrastive_curvature.vmf.distances import (
    bhattacharyya_distance,
    cosine_distance,
    expected_likelihood_distance,
    from_embedding,
    kl_distance,
    kl_distance_printed,
    squared_euclidean_distance,
)
from contrastive_curvature.vmf.estimation import (
    concentration,
    concentration_from_gaussian,
    fit,
    mean_direction,
    tangential_variance,
)
from contrastive_curvature.vmf.nonisotropic import el_nivmf_distance, el_nivmf_logits, nivmf_distance, nivmf_log_prob
from contrastive_curvature.vmf.sampling import rsample, sample

__all__ = [
    # samples or a Gaussian -> (mu, kappa)
    "mean_direction",
    "concentration",
    "fit",
    "tangential_variance",
    "concentration_from_gaussian",
    # functions of kappa alone
    "log_normalizer",
    "log_density_at_mode",
    "mean_resultant_length",
    # the distribution
    "log_prob",
    "kl_divergence",
    "sample",
    "rsample",
    # a concentration for each axis
    "nivmf_log_prob",
    # distances of all embeddings to all proxies
    "from_embedding",
    "squared_euclidean_distance",
    "cosine_distance",
    "bhattacharyya_distance",
    "expected_likelihood_distance",
    "kl_distance",
    "nivmf_distance",
    "el_nivmf_distance",
    "el_nivmf_logits",
    # printed in a source document, for comparison
    "kl_distance_printed",
    "log_normalizer_quadratic",
]

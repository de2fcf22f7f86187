"""The methods that the tables compare: ``fit(setting, data, seed, encoders, **options) -> Fitted``, a file a kind."""

from __future__ import annotations

from benchmarks.experiments.methods import ensembles, hedged, laplace, pfe, proxies, scores, triplet

ON_ENCODER = {
    "deterministic": scores.deterministic,
    "pfe": pfe.pfe,
    "laplace_posthoc": laplace.laplace_posthoc,
    "norm": scores.norm,
    "vmf_density": scores.vmf_density,
    "knn_embedding": scores.knn_embedding,
    "knn_features": scores.knn_features,
}
"""Those that are given the trained deterministic encoder of their seed, ``encoders[0]``, and leave it as it is."""
ON_ONLINE = {"laplace_online": laplace.laplace_online}
"""Those that are given the training step of :func:`laplace.online_step`, trained, as ``encoders[0]``."""
METHODS = (
    ON_ENCODER
    | ON_ONLINE
    | {
        "deep_ensemble": ensembles.deep_ensemble,
        "mc_dropout": ensembles.mc_dropout,
        "hedged": hedged.hedged,
        "triplet": triplet.triplet,
        "bayesian_triplet": triplet.bayesian_triplet,
        "proxies": proxies.proxies,
    }
)
"""By the name that a row of :mod:`benchmarks.experiments.plan` gives."""

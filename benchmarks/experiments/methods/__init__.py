"""The methods that the tables compare, by name."""

from __future__ import annotations

from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.deterministic import Deterministic
from benchmarks.experiments.methods.ensembles import DeepEnsemble, MCDropout
from benchmarks.experiments.methods.hedged import Hedged, HedgedPoint
from benchmarks.experiments.methods.laplace import LaplaceOnline, LaplacePosthoc
from benchmarks.experiments.methods.pfe import PFE
from benchmarks.experiments.methods.proxies import Proxies
from benchmarks.experiments.methods.scores import (
    KNNEmbedding,
    KNNFeatures,
    NormScore,
    VMFDensity,
)
from benchmarks.experiments.methods.triplet import BayesianTriplet, TripletDeterministic

__all__ = ["METHODS", "Method", "Prediction", "Setting"]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Deterministic,
        DeepEnsemble,
        PFE,
        LaplacePosthoc,
        MCDropout,
        LaplaceOnline,
        NormScore,
        VMFDensity,
        KNNEmbedding,
        KNNFeatures,
        HedgedPoint,
        Hedged,
        TripletDeterministic,
        BayesianTriplet,
        Proxies,
    )
}
"""From the name that a row of :mod:`benchmarks.experiments.plan` gives."""

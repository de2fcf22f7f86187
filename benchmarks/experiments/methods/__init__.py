"""The methods that the tables compare, by name."""

from __future__ import annotations

import inspect
from typing import Any

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
    KNNGated,
    LaplaceGated,
    NormScore,
    VMFDensity,
)
from benchmarks.experiments.methods.triplet import BayesianTriplet, TripletDeterministic
from contrastive_curvature.errors import InputError

__all__ = ["METHODS", "Method", "Prediction", "Setting", "make_method"]

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
        LaplaceGated,
        KNNGated,
        HedgedPoint,
        Hedged,
        TripletDeterministic,
        BayesianTriplet,
        Proxies,
    )
}
"""From the name that a row of :mod:`benchmarks.experiments.plan` gives."""


def make_method(name: str, setting: Setting, **options: Any) -> Method:
    """Make a method that is still to be fitted or loaded.

    Args:
        name: One of :data:`METHODS`.
        setting: How encoders are made and trained.
        **options: The method's own, see its class.

    Returns:
        The method.

    Raises:
        InputError: The name or an option is unknown, or an option's value is out of range.
    """
    if name not in METHODS:
        raise InputError("name", f"one of {', '.join(map(repr, METHODS))}", name)
    allowed = list(inspect.signature(METHODS[name]).parameters)[1:]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        wanted = f"options among {', '.join(allowed)}" if allowed else "no options"
        raise InputError(f"options of {name!r}", wanted, ", ".join(unknown))
    return METHODS[name](setting, **options)

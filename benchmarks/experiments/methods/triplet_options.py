"""What the outputs of a Bayesian triplet encoder mean, and the loss on them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.experiments.methods.checks import check_choice, check_count, check_positive
from contrastive_curvature import validate
from contrastive_curvature.errors import UnsupportedError, expected

__all__ = ["MINED", "BayesianOptions", "bayesian_options"]

MINED = 0.5
"""Margin that unit means of triplets violate, of the deterministic triplet loss too."""
_ON_SPHERE = (MINED, 1e-6, 0.1, 0.1)
"""Mining margin, weight of the divergences, first variance and gain of means on the sphere."""


@dataclass(frozen=True)
class BayesianOptions:
    """What an encoder's outputs mean, and the loss on them.

    Args:
        distribution: ``"gaussian"`` or ``"vmf"``.
        moments: Of tau, ``"gaussian"`` or ``"vmf"``.
        variance: ``"isotropic"`` or ``"diagonal"``.
        normalized: Whether means are divided by their norm.
        margin: Of the likelihood, on differences of squared distances.
        mining_margin: That the means of triplets violate.
        negatives: Of each positive pair at most; ``None`` for all.
        prior_variance: Of the Gaussian prior.
        kl_weight: Of the divergences to the prior.
        first_variance: Where a raw output is 0.
        variance_gain: On the raw output of a variance.
    """

    distribution: str
    moments: str
    variance: str
    normalized: bool
    margin: float
    mining_margin: float
    negatives: int | None
    prior_variance: float
    kl_weight: float
    first_variance: float
    variance_gain: float


def bayesian_options(
    distribution: str,
    moments: str | None,
    variance: str,
    normalized: bool | None,
    margin: float,
    mining_margin: float | None,
    negatives: int | None,
    prior_variance: float | None,
    kl_weight: float | None,
    first_variance: float | None,
    variance_gain: float | None,
) -> BayesianOptions:
    """Check the options of the Bayesian triplet method, see there, and fill in those that depend on others.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: Options exclude each other.
    """
    check_choice("distribution", distribution, ("gaussian", "vmf"))
    check_choice("variance", variance, ("isotropic", "diagonal"))
    if moments is not None:
        check_choice("moments", moments, ("gaussian", "vmf"))
    if normalized is not None:
        validate.flag("normalized", normalized)
    if distribution == "vmf":
        _refuse_for_vmf(variance, normalized, prior_variance)
    elif moments == "vmf":
        hint = "Gaussians have other moments; or take distribution='vmf'."
        raise UnsupportedError(expected("moments", "'gaussian' or None with distribution='gaussian'", moments, hint))
    prior = 1.0 if prior_variance is None else check_positive("prior_variance", prior_variance)
    sphere = distribution == "vmf" or bool(normalized)
    mined, weight, first, gain = _ON_SPHERE if sphere else (prior, 1e-3, prior, 1.0)
    return BayesianOptions(
        distribution,
        "gaussian" if moments is None else moments,
        variance,
        sphere,
        validate.number("margin", margin),
        mined if mining_margin is None else validate.number("mining_margin", mining_margin),
        None if negatives is None else check_count("negatives", negatives),
        prior,
        weight if kl_weight is None else validate.number("kl_weight", kl_weight),
        first if first_variance is None else check_positive("first_variance", first_variance),
        gain if variance_gain is None else check_positive("variance_gain", variance_gain),
    )


def _refuse_for_vmf(variance: str, normalized: bool | None, prior_variance: float | None) -> None:
    for name, value, wanted, fits in (
        ("variance", variance, "'isotropic'", variance == "isotropic"),
        ("normalized", normalized, "True or None", normalized is not False),
        ("prior_variance", prior_variance, "None", prior_variance is None),
    ):
        if not fits:
            hint = (
                "A von Mises-Fisher distribution is on the sphere, has one concentration, and the uniform one for a "
                "prior. Leave it out, or take distribution='gaussian'."
            )
            raise UnsupportedError(expected(name, f"{wanted} with distribution='vmf'", value, hint))

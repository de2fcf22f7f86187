"""Rules that the two answers could follow, each computed from a few numbers of every input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.transfer.compact import RANKS, RATIO, STRENGTHS, variance_name
from benchmarks.transfer.quantities import COMBINATIONS, QUANTITIES, WITH_VARIANCE, Encoder, Numbers, columns, log
from contrastive_curvature.fit.class_centres import CAP, WEIGHT
from contrastive_curvature.laplace.prior import STRENGTH

__all__ = [
    "CAPS",
    "CLASS_WEIGHTS",
    "LIBRARY_CLASSES",
    "LIBRARY_KNOWN",
    "LIBRARY_LOWER",
    "LIBRARY_MATCH",
    "LOWER_WEIGHTS",
    "NO_CLASSES",
    "NO_LOWER",
    "Rule",
    "Scores",
    "class_name",
    "class_rules",
    "density_rules",
    "known_rules",
    "library_at",
    "lower_name",
    "lower_rules",
    "match_rules",
    "rank_rules",
]

Scores = Callable[[Encoder], Callable[[str], Numbers]]
"""Of an encoder: set of inputs -> scores (N,), larger is less certain."""

_UPPER = ("V/|phi|", "V/|phi|^2", "1/n")
_BELOW = ("V/|phi|", 0.5)
"""What the library's novelty is made of: its quantities, and its lower side, a quantity and a weight."""

LOWER_WEIGHTS = (0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
"""Weights of a lower side that are tried with the library's upper side."""

NO_LOWER = "none"
"""Stands for a rule without a lower side."""

CLASS_WEIGHTS = (1.0, 2.0, 3.0, 4.0)
CAPS = (0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""What is tried as the class part: weights w, and the largest ratio r of distances to class centres that counts."""

NO_CLASSES = "none"
"""Stands for a rule without a class part."""

_EXPONENTS = (1, 2, 3, 4, 6)
_WEIGHTS = (0.3, 1, 3, 10)
_COMPONENTS = 4
_SEED = 0


@dataclass(frozen=True)
class Rule:
    """A rule.

    Args:
        name: In tables.
        variance: Name of the variance that it takes.
        score: What it makes of an encoder.
    """

    name: str
    variance: str
    score: Scores


def match_rules() -> Iterator[Rule]:
    """Rules for "is the nearest neighbour right?": the ratio alone, and every form with every class part.

    Scores are logarithms, to which the class part is added.
    """
    yield Rule("r", variance_name(STRENGTH), lambda encoder: lambda one: encoder.values[one][RATIO])
    for form in _match_forms():
        yield form
        yield from (_with_classes(form, weight, cap) for weight in CLASS_WEIGHTS for cap in CAPS)


def class_rules() -> dict[str, Rule]:
    """The library's rule with every class part that is tried, by :func:`class_name`."""
    form = _power(variance_name(STRENGTH), 3, f"strength {STRENGTH:g}")
    parts = [(weight, cap) for weight in CLASS_WEIGHTS for cap in CAPS]
    return {NO_CLASSES: form} | {class_name(*part): _with_classes(form, *part) for part in parts}


def class_name(weight: float, cap: float) -> str:
    """How a class part is shown: ``2 weight min(r, cap)`` is added to the logarithm of a score, a squared angle's.

    Args:
        weight: As :data:`~contrastive_curvature.fit.class_centres.WEIGHT`, which is the factor for an angle.
        cap: As :data:`~contrastive_curvature.fit.class_centres.CAP`.
    """
    return f"r {weight:g} to {cap:g}"


def known_rules() -> Iterator[Rule]:
    """Rules for "is the input of the known kind?": one to three quantities, combined.

    Soft maxima are tried with a lower side of half weight, too.
    """
    for strength in STRENGTHS:
        variance, title = variance_name(strength), f"strength {strength:g}"
        yield from (_combined((name,), "max", variance, title) for name in QUANTITIES)
        for count in (1, 2, 3):
            for names in combinations(QUANTITIES, count):
                yield from (_combined(names, how, variance, title) for how in COMBINATIONS if count > 1)
                yield from (_two_sided(names, (name, 0.5), variance, title) for name in WITH_VARIANCE)


def lower_rules() -> dict[str, Rule]:
    """The library's rule with every lower side that is tried, by :func:`lower_name`."""
    variance, title = variance_name(STRENGTH), f"strength {STRENGTH:g}"
    out = {NO_LOWER: _combined(_UPPER, "soft max", variance, title)}
    for name in WITH_VARIANCE:
        for weight in LOWER_WEIGHTS:
            out[lower_name(name, weight)] = _two_sided(_UPPER, (name, weight), variance, title)
    return out


def lower_name(quantity: str, weight: float) -> str:
    """How a lower side is shown: minus the standardised logarithm of a quantity, times a weight."""
    return f"-{weight:g} {quantity}"


def density_rules() -> Iterator[Rule]:
    """Densities of (log V, log n, log |phi|) among training inputs, for the same question."""
    variance = variance_name(STRENGTH)
    yield Rule("Mahalanobis distance of (log V, log n, log |phi|)", variance, _mahalanobis)
    yield Rule(f"mixture of {_COMPONENTS} Gaussians over (log V, log n, log |phi|)", variance, _mixture)


def library_at(variance: str, title: str) -> tuple[Rule, Rule]:
    """The two rules of the library, with another variance."""
    return _with_classes(_power(variance, 3, title), WEIGHT, CAP), _two_sided(_UPPER, _BELOW, variance, title)


def rank_rules() -> Iterator[tuple[Rule, Rule]]:
    """The two rules of the library at every rank."""
    return (library_at(variance_name(rank=rank), f"rank {rank}") for rank in RANKS)


def _match_forms() -> Iterator[Rule]:
    yield Rule("1/n", variance_name(STRENGTH), lambda encoder: lambda one: -log(encoder.values[one]["n"]))
    for strength in STRENGTHS:
        variance, title = variance_name(strength), f"strength {strength:g}"
        yield from (_power(variance, exponent, title) for exponent in _EXPONENTS)
        yield from (_additive(variance, weight, title) for weight in _WEIGHTS)


def _with_classes(form: Rule, weight: float, cap: float) -> Rule:
    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        of = form.score(encoder)
        return lambda one: of(one) + 2 * weight * np.minimum(encoder.values[one][RATIO], cap)

    shown, *strength = form.name.split(", ")
    return Rule(", ".join([shown, class_name(weight, cap), *strength]), form.variance, score)


def _power(variance: str, exponent: int, title: str) -> Rule:
    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        def of(one: str) -> Numbers:
            values = encoder.values[one]
            return log(values[variance]) - exponent * log(values["n"])

        return of

    return Rule(f"V/n^{exponent}, {title}", variance, score)


def _additive(variance: str, weight: float, title: str) -> Rule:
    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        offset = weight * float(np.median(encoder.values["train"][variance]))
        return lambda one: log(offset + encoder.values[one][variance]) - 2 * log(encoder.values[one]["n"])

    return Rule(f"({weight:g} median V + V)/n^2, {title}", variance, score)


def _combined(names: tuple[str, ...], how: str, variance: str, title: str) -> Rule:
    taken = columns(names)

    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        found = encoder.standardised(variance)
        return lambda one: COMBINATIONS[how](found[one][:, taken])

    shown = names[0] if len(names) == 1 else f"{how} of {', '.join(names)}"
    return Rule(f"{shown}, {title}", variance, score)


def _two_sided(names: tuple[str, ...], below: tuple[str, float], variance: str, title: str) -> Rule:
    """A soft maximum with the lower side of a quantity, times a weight."""
    quantity, weight = below
    taken = columns((*names, quantity))
    signs = np.array([1.0] * len(names) + [-weight])

    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        found = encoder.standardised(variance)
        return lambda one: COMBINATIONS["soft max"](found[one][:, taken] * signs)

    return Rule(f"soft max of {', '.join(names)}, {lower_name(*below)}, {title}", variance, score)


def _mahalanobis(encoder: Encoder) -> Callable[[str], Numbers]:
    from sklearn.covariance import EmpiricalCovariance

    logs = encoder.logs(variance_name(STRENGTH))
    fitted = EmpiricalCovariance().fit(logs["train"])
    return lambda one: np.asarray(fitted.mahalanobis(logs[one]))


def _mixture(encoder: Encoder) -> Callable[[str], Numbers]:
    from sklearn.mixture import GaussianMixture

    logs = encoder.logs(variance_name(STRENGTH))
    fitted = GaussianMixture(_COMPONENTS, random_state=_SEED).fit(logs["train"])
    return lambda one: -np.asarray(fitted.score_samples(logs[one]))


LIBRARY_MATCH, LIBRARY_KNOWN = (rule.name for rule in library_at(variance_name(STRENGTH), f"strength {STRENGTH:g}"))
"""Names of the rules that the library follows."""

LIBRARY_CLASSES = class_name(WEIGHT, CAP)
"""The class part of the first."""

LIBRARY_LOWER = lower_name(*_BELOW)
"""The lower side of the second."""

"""Rules that the two answers could follow, each computed from a few numbers of every input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.transfer.compact import RANKS, STRENGTHS, Compact, variance_name
from contrastive_curvature.known import Standard
from contrastive_curvature.laplace.prior import STRENGTH

__all__ = ["LIBRARY_KNOWN", "LIBRARY_MATCH", "Encoder", "Rule", "Scores", "density_rules", "known_rules", "match_rules"]

Numbers = NDArray[np.float64]

Scores = Callable[["Encoder"], Callable[[str], Numbers]]
"""Of an encoder: set of inputs -> scores (N,), larger is less certain."""

_QUANTITIES: dict[str, tuple[int, int, int]] = {
    "V": (1, 0, 0),
    "V/n": (1, -1, 0),
    "V/n^2": (1, -2, 0),
    "V/|phi|": (1, 0, -1),
    "V/|phi|^2": (1, 0, -2),
    "V/(n |phi|)": (1, -1, -1),
    "1/n": (0, -1, 0),
    "1/|phi|": (0, 0, -1),
}
"""Name -> exponents of the tangential variance V, the norm n of the raw output, and the norm |phi| of the features."""

_COMBINATIONS: dict[str, Callable[[Numbers], Numbers]] = {
    "max": lambda z: z.max(1),
    "soft max": lambda z: np.logaddexp.reduce(2 * z, axis=1) / 2,
    "sum": lambda z: z.sum(1),
    "squares": lambda z: np.square(np.maximum(z, 0)).sum(1) + 1e-3 * z.sum(1),
}
"""Ways to combine standardised logarithms, shape (N, K). Squares of the positive parts: below all medians, the sum
decides."""

_LIBRARY = ("V/|phi|", "V/|phi|^2", "1/n")
"""Quantities that the library's novelty is made of."""

_EXPONENTS = (1, 2, 3, 4, 6)
_WEIGHTS = (0.3, 1, 3, 10)
_COMPONENTS = 4
_SEED = 0


class Encoder:
    """One encoder's numbers, with the logarithms that many rules share.

    Args:
        name: Of its feature file.
        values: Its numbers.
    """

    def __init__(self, name: str, values: Compact) -> None:
        self.name, self.values = name, values
        self._logs: dict[str, dict[str, Numbers]] = {}

    def has(self, variance: str) -> bool:
        """Whether there is a variance of this name: an encoder of few features has no larger rank."""
        return variance in self.values["train"]

    def logs(self, variance: str) -> dict[str, Numbers]:
        """Set of inputs -> logarithms of V, n and |phi|, shape (N, 3)."""
        return {one: _log(np.stack([v[variance], v["n"], v["phi"]], axis=1)) for one, v in self.values.items()}

    def standardised(self, variance: str) -> dict[str, Numbers]:
        """Set of inputs -> logarithms of all quantities, shape (N, 8), in the units of the training inputs."""
        if variance not in self._logs:
            exponents = np.array(list(_QUANTITIES.values()), dtype=float).T
            logs = {one: v @ exponents for one, v in self.logs(variance).items()}
            standard = Standard.of(torch.from_numpy(logs["train"]))
            location, scale = standard.location.numpy(), standard.scale.numpy()
            self._logs[variance] = {one: (v - location) / scale for one, v in logs.items()}
        return self._logs[variance]

    @cached_property
    def unknowns(self) -> list[str]:
        """Sets that are told from the test inputs."""
        return [name for name in self.values if name not in ("train", "test")]


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
    """Rules for "is the nearest neighbour right?"."""
    yield Rule("1/n", variance_name(STRENGTH), lambda encoder: lambda one: 1 / encoder.values[one]["n"])
    for strength in STRENGTHS:
        variance = variance_name(strength)
        yield from (_power(variance, exponent, f"strength {strength:g}") for exponent in _EXPONENTS)
        yield from (_additive(variance, weight, f"strength {strength:g}") for weight in _WEIGHTS)


def known_rules() -> Iterator[Rule]:
    """Rules for "is the input of the known kind?": one to three quantities, combined.

    At the largest strength there are single quantities and the library's rule alone: none of them is near the best.
    """
    for strength in STRENGTHS:
        variance, title = variance_name(strength), f"strength {strength:g}"
        yield from (_combined((name,), "max", variance, title) for name in _QUANTITIES)
        if strength == max(STRENGTHS):
            yield library_at(variance, title)[1]
            continue
        for names in (*combinations(_QUANTITIES, 2), *combinations(_QUANTITIES, 3)):
            yield from (_combined(names, how, variance, title) for how in _COMBINATIONS)


def density_rules() -> Iterator[Rule]:
    """Rules that see inputs with too small a V as well, for the same question.

    Densities of (log V, log n, log |phi|) among training inputs, and the library's with one quantity more.
    """
    variance = variance_name(STRENGTH)
    for strength in STRENGTHS[:2]:
        yield _two_sided("V/|phi|^2", 0.5, strength)
        yield _two_sided("V/n^2", 1.0, strength)
    yield Rule("Mahalanobis distance of (log V, log n, log |phi|)", variance, _mahalanobis)
    yield Rule(f"mixture of {_COMPONENTS} Gaussians over (log V, log n, log |phi|)", variance, _mixture)


def library_at(variance: str, title: str) -> tuple[Rule, Rule]:
    """The two rules of the library, with another variance."""
    return _power(variance, 3, title), _combined(_LIBRARY, "soft max", variance, title)


def rank_rules() -> Iterator[tuple[Rule, Rule]]:
    """The two rules of the library at every rank."""
    return (library_at(variance_name(rank=rank), f"rank {rank}") for rank in RANKS)


def _power(variance: str, exponent: int, title: str) -> Rule:
    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        def of(one: str) -> Numbers:
            values = encoder.values[one]
            return _log(values[variance]) - exponent * _log(values["n"])

        return of

    return Rule(f"V/n^{exponent}, {title}", variance, score)


def _additive(variance: str, weight: float, title: str) -> Rule:
    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        offset = weight * float(np.median(encoder.values["train"][variance]))
        return lambda one: (offset + encoder.values[one][variance]) / np.square(encoder.values[one]["n"])

    return Rule(f"({weight:g} median V + V)/n^2, {title}", variance, score)


def _combined(names: tuple[str, ...], how: str, variance: str, title: str) -> Rule:
    columns = [list(_QUANTITIES).index(name) for name in names]

    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        found = encoder.standardised(variance)
        return lambda one: _COMBINATIONS[how](found[one][:, columns])

    shown = names[0] if len(names) == 1 else f"{how} of {', '.join(names)}"
    return Rule(f"{shown}, {title}", variance, score)


def _two_sided(quantity: str, weight: float, strength: float) -> Rule:
    """The library's rule with the negative logarithm of a quantity, too, times a weight."""
    variance = variance_name(strength)
    columns = [list(_QUANTITIES).index(name) for name in (*_LIBRARY, quantity)]
    signs = np.array([1.0] * len(_LIBRARY) + [-weight])

    def score(encoder: Encoder) -> Callable[[str], Numbers]:
        found = encoder.standardised(variance)
        return lambda one: _COMBINATIONS["soft max"](found[one][:, columns] * signs)

    shown = f"soft max of {', '.join(_LIBRARY)} and -{weight:g} times {quantity}"
    return Rule(f"{shown}, strength {strength:g}", variance, score)


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


def _log(value: Numbers) -> Numbers:
    return np.log(np.maximum(value, np.finfo(np.float64).tiny))


LIBRARY_MATCH, LIBRARY_KNOWN = (rule.name for rule in library_at(variance_name(STRENGTH), f"strength {STRENGTH:g}"))
"""Names of the rules that the library follows."""

"""Are the rates of ``cc.Retriever`` kept? Draws of held-out queries from simulated worlds, whose truth is known.

``python -m benchmarks.promises`` prints the first table of benchmarks/results/answers.md: half of the error is asked
for with 90 % confidence, and 5 % false alarms.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.machine import table
from contrastive_curvature.retriever.evidence import Embedded, Searched, evidence
from contrastive_curvature.retriever.rule import Rates, Rule, certified


def unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class World(NamedTuple):
    """Queries around class centres on a sphere, some noisier than others, and the gallery that they are searched in."""

    queries: Embedded
    truth: torch.Tensor
    gallery: torch.Tensor
    classes: torch.Tensor

    @classmethod
    def of(cls, classes: int, dim: int, each: int, n: int = 6000, noise: tuple[float, ...] = (0.1, 0.3, 0.5)) -> World:
        """Return n queries, and a gallery of ``each`` points a class."""
        rng = np.random.default_rng(0)
        centres = unit(rng.normal(size=(classes, dim)))
        points = unit(np.repeat(centres, each, 0) + 0.25 * rng.normal(size=(classes * each, dim)))
        truth, spread = rng.integers(0, classes, n), rng.choice(noise, n)
        found = unit(centres[truth] + spread[:, None] * rng.normal(size=(n, dim)))
        uncertainty, novelty = spread * np.exp(rng.normal(size=n) / 2), spread + rng.random(n)
        queries = Embedded(torch.from_numpy(found).float(), uncertainty, novelty)
        of = torch.arange(classes).repeat_interleave(each)
        return cls(queries, torch.from_numpy(truth), torch.from_numpy(points).float(), of)

    def searched(self, digits: int | None = None) -> tuple[Searched, Searched]:
        """Evidence with and without the class of each query, rounded so that there are ties."""
        columns, match = evidence(self.queries, self.gallery, self.classes)
        absent, _ = evidence(self.queries, self.gallery, self.classes, self.truth)
        novelty = self.queries.novelty
        if digits is not None:
            columns, absent, novelty = (values.round(digits) for values in (columns, absent, novelty))
        right = (self.classes[match] == self.truth).numpy()
        of = self.truth.numpy()
        return Searched(columns, novelty, right, of), Searched(absent, novelty, right & False, of)


def answered(rule: Rule, found: Searched) -> NDArray[np.bool_]:
    return rule.decision(found) == "answer"


class Case(NamedTuple):
    """What is drawn: so many held-out queries, evidence rounded to so many digits, a rate of false matches or none."""

    title: str
    classes: int
    dim: int
    held_out: int
    digits: int | None = None
    false_matches: float | None = None
    noise: tuple[float, ...] = (0.1, 0.3, 0.5)


CASES = (
    Case("20 classes", 20, 8, 1000),
    Case("3 classes", 3, 4, 1000),
    Case("20 classes, ties", 20, 8, 300, 1),
    Case("20 classes, ties", 20, 8, 300, 1, 0.1),
    Case("20 classes", 20, 8, 300),
    Case("20 classes", 20, 8, 300, None, 0.1),
    Case("20 classes, ties", 20, 8, 120, 1, 0.1),
    Case("3 classes", 3, 4, 300, None, 0.4),
    Case("20 classes", 20, 8, 60),
    Case("40 classes, half of the matches wrong", 40, 8, 1000, None, 0.1, (0.3, 0.5, 0.8)),
)


class Observed(NamedTuple):
    """By draw, each (draws,): more wrong answers than asked; shares answered, without class, known called unknown."""

    broken: NDArray[np.bool_]
    answered: NDArray[np.float64]
    matches: NDArray[np.float64]
    alarms: NDArray[np.float64]


_world = cache(World.of)


def simulated(case: Case, draws: int) -> Observed:
    """Certify with so many draws of held-out queries, and count errors among the other queries."""
    every, absent = _world(case.classes, case.dim, 10, noise=case.noise).searched(case.digits)
    asked = Rates(wrong := 0.5 * float(1 - every.right.mean()), case.false_matches, 0.05, 0.9)
    rng = np.random.default_rng(1)
    found = []
    for _ in range(draws):
        drawn, others = np.split(rng.permutation(len(every.right)), [case.held_out])
        rule = certified(asked, every[drawn], absent[drawn])
        new = every[others]
        now = answered(rule, new)
        matches = answered(rule, absent[others]).mean()
        broken = bool(now.any() and (~new.right[now]).mean() > wrong)
        found.append((broken, now.mean(), matches, (rule.p_value(new.novelty) <= 0.05).mean()))
    return Observed(*(np.array(column) for column in zip(*found, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=__doc__)
    parser.add_argument("--draws", type=int, default=500, help="a case (default: 500)")
    draws = parser.parse_args(arguments).draws
    head = ["", "held-out queries", "false matches: asked, observed", "draws with more wrong answers than asked"]
    print(table([*head, "false alarms", "answered"], []))
    for case in CASES:
        seen = simulated(case, draws)
        asked = "none" if case.false_matches is None else f"{case.false_matches:.0%}, {seen.matches.mean():.1%}"
        shares = (f"{values.mean():.1%}" for values in (seen.broken, seen.alarms, seen.answered))
        print(f"| {' | '.join([case.title, str(case.held_out), asked, *shares])} |", flush=True)


if __name__ == "__main__":
    main()

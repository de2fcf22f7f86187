"""``benchmarks.transfer.rules``: rules by hand, and the library's against the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfer.compact import STRENGTHS, Compact
from benchmarks.transfer.quantities import COMBINATIONS, WITH_VARIANCE, Encoder
from benchmarks.transfer.rules import (
    CAPS,
    CLASS_WEIGHTS,
    LIBRARY_CLASSES,
    LIBRARY_KNOWN,
    LIBRARY_LOWER,
    LIBRARY_MATCH,
    LOWER_WEIGHTS,
    NO_CLASSES,
    NO_LOWER,
    class_name,
    class_rules,
    density_rules,
    known_rules,
    library_at,
    lower_name,
    lower_rules,
    match_rules,
)
from contrastive_curvature.embedding.known import Reference
from contrastive_curvature.laplace.prior import STRENGTH

KNOWN = {rule.name: rule for rule in known_rules()}
LOWER = lower_rules()
MATCH = {rule.name: rule for rule in match_rules()}
CLASSES = class_rules()


def made(train: int, other: int, seed: int, spread: float = 1.0) -> Compact:
    """Numbers of inputs that no encoder made."""
    rng = np.random.default_rng(seed)
    names = ("n", "phi", *(f"V {strength:g}" for strength in STRENGTHS))
    sets = {"train": train, "unknown_far": other}
    out = {one: {name: np.exp(spread * rng.normal(size=size)) for name in names} for one, size in sets.items()}
    for one, size in sets.items():
        out[one]["ratio"] = rng.random(size)
    return out


def standardised(numbers: Compact, of: Any) -> np.ndarray:
    """A quantity's logarithm among the unknown, in units of the training inputs."""
    train = np.sort(np.log(of(numbers["train"])))
    # The lower median, as torch has it.
    middle = train[(len(train) - 1) // 2]
    scale = 1.4826 * np.sort(np.abs(train - middle))[(len(train) - 1) // 2]
    return np.asarray((np.log(of(numbers["unknown_far"])) - middle) / scale)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99), st.sampled_from([0.01, 1.0, 30.0]))
def test_the_librarys_rule_follows_the_librarys_statistic(train: int, other: int, seed: int, spread: float) -> None:
    numbers = made(train, other, seed, spread)

    def components(one: str) -> torch.Tensor:
        v, n, phi = (np.log(numbers[one][name]) for name in (f"V {STRENGTH:g}", "n", "phi"))
        return torch.from_numpy(np.stack([v - phi, v - 2 * phi, -n], axis=1))

    train = components("train")
    expected = Reference.of(train, train).statistic(components("unknown_far")).numpy()
    found = KNOWN[LIBRARY_KNOWN].score(Encoder("one", numbers))("unknown_far")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found, LOWER[LIBRARY_LOWER].score(Encoder("one", numbers))("unknown_far"))


def test_rules_by_hand() -> None:
    numbers = made(50, 20, 0)
    encoder, one = Encoder("faces", numbers), numbers["unknown_far"]
    rules = {**MATCH, **KNOWN, **{rule.name: rule for rule in density_rules()}}
    found = rules["r"].score(encoder)("unknown_far")
    np.testing.assert_array_equal(found, one["ratio"])
    np.testing.assert_allclose(np.exp(-rules["1/n"].score(encoder)("unknown_far")), one["n"])
    added = rules["(3 median V + V)/n^2, strength 1"].score(encoder)("unknown_far")
    np.testing.assert_allclose(np.exp(added), (3 * np.median(numbers["train"]["V 1"]) + one["V 1"]) / one["n"] ** 2)
    powers = rules["V/n^4, strength 0.01"].score(encoder)("unknown_far")
    np.testing.assert_allclose(np.exp(powers), one["V 0.01"] / one["n"] ** 4)
    first = standardised(numbers, lambda s: s["V 0.1"] / (s["n"] * s["phi"]))
    z = np.stack([first, standardised(numbers, lambda s: 1 / s["n"])], axis=1)
    by_hand = {
        "max": z.max(1),
        "soft max": np.log(np.exp(2 * z).sum(1)) / 2,
        "sum": z.sum(1),
        "squares": (np.maximum(z, 0) ** 2).sum(1) + 1e-3 * z.sum(1),
    }
    for how, expected in by_hand.items():
        found = rules[f"{how} of V/(n |phi|), 1/n, strength 0.1"].score(encoder)("unknown_far")
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    squared = standardised(numbers, lambda s: s["V 0.1"] / s["n"] ** 2)
    found = rules["soft max of V/(n |phi|), 1/n, -0.5 V/n^2, strength 0.1"].score(encoder)("unknown_far")
    np.testing.assert_allclose(found, np.log(np.exp(2 * z).sum(1) + np.exp(-squared)) / 2, rtol=1e-8)
    sets = {name: np.log(np.stack([v[f"V {STRENGTH:g}"], v["n"], v["phi"]], axis=1)) for name, v in numbers.items()}
    left = sets["unknown_far"] - sets["train"].mean(0)
    expected = (left @ np.linalg.inv(np.cov(sets["train"].T, ddof=0)) * left).sum(1)
    name = next(name for name in rules if name.startswith("Mahalanobis"))
    np.testing.assert_allclose(rules[name].score(encoder)("unknown_far"), expected, rtol=1e-6)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_soft_maximum_at_any_size(rows: list[list[float]]) -> None:
    z = np.array(rows)
    np.testing.assert_allclose(COMBINATIONS["soft max"](z), np.logaddexp.reduce(2 * z, axis=1) / 2, rtol=1e-12)


@pytest.mark.parametrize("quantity", WITH_VARIANCE)
def test_lower_sides_by_hand(quantity: str) -> None:
    of = {
        "V": lambda _, v: v,
        "V/n": lambda s, v: v / s["n"],
        "V/n^2": lambda s, v: v / s["n"] ** 2,
        "V/|phi|": lambda s, v: v / s["phi"],
        "V/|phi|^2": lambda s, v: v / s["phi"] ** 2,
        "V/(n |phi|)": lambda s, v: v / (s["n"] * s["phi"]),
    }[quantity]
    numbers = made(30, 9, 1)
    encoder, variance = Encoder("one", numbers), f"V {STRENGTH:g}"
    upper = LOWER[NO_LOWER].score(encoder)("unknown_far")
    z = standardised(numbers, lambda s: of(s, s[variance]))
    for weight in LOWER_WEIGHTS:
        found = LOWER[lower_name(quantity, weight)].score(encoder)("unknown_far")
        np.testing.assert_allclose(found, np.logaddexp(2 * upper, -2 * weight * z) / 2, rtol=1e-8)


@pytest.mark.parametrize("weight", CLASS_WEIGHTS)
@pytest.mark.parametrize("cap", CAPS)
def test_class_parts_by_hand(weight: float, cap: float) -> None:
    numbers = made(9, 30, 2)
    encoder, one, part = Encoder("one", numbers), numbers["unknown_far"], f"r {weight:g} to {cap:g}"
    # A squared angle, so that the angle's factor is exp(weight r).
    factor = np.exp(weight * np.minimum(one["ratio"], cap)) ** 2
    v = one[f"V {STRENGTH:g}"]
    by_hand = {
        f"V/n^3, {part}, strength {STRENGTH:g}": v / one["n"] ** 3 * factor,
        f"(0.3 median V + V)/n^2, {part}, strength 1": (0.3 * np.median(numbers["train"]["V 1"]) + one["V 1"])
        / one["n"] ** 2
        * factor,
        f"1/n, {part}": 1 / one["n"] * factor,
    }
    for name, expected in by_hand.items():
        np.testing.assert_allclose(np.exp(MATCH[name].score(encoder)("unknown_far")), expected, rtol=1e-8)
    found = CLASSES[class_name(weight, cap)].score(encoder)("unknown_far")
    np.testing.assert_allclose(np.exp(found), v / one["n"] ** 3 * factor, rtol=1e-8)


def test_every_form_has_all_class_parts_and_the_library_has_one_of_them() -> None:
    assert len(MATCH) == len(list(match_rules())) == 1 + (1 + len(STRENGTHS) * (5 + 4)) * (1 + 4 * 6)
    assert len({rule.name for rule in CLASSES.values()}) == len(CLASSES) == 1 + 4 * 6
    assert {rule.name for rule in CLASSES.values()} <= set(MATCH)
    assert CLASSES[LIBRARY_CLASSES].name == LIBRARY_MATCH
    assert CLASSES[NO_CLASSES].name == f"V/n^3, strength {STRENGTH:g}"


def test_every_rule_has_its_own_name_and_every_soft_maximum_its_lower_sides() -> None:
    assert len(KNOWN) == len(list(known_rules()))
    assert len({rule.name for rule in LOWER.values()}) == len(LOWER) == 1 + 6 * 6
    assert LOWER[NO_LOWER].name in KNOWN
    assert LOWER[LIBRARY_LOWER].name == LIBRARY_KNOWN
    soft = [name for name in KNOWN if name.startswith("soft max of") and ", -0.5" not in name]
    assert len(soft) == len(STRENGTHS) * (28 + 56)
    for name in soft:
        form, strength = name.rsplit(", ", 1)
        assert {f"{form}, {lower_name(quantity, 0.5)}, {strength}" for quantity in WITH_VARIANCE} <= set(KNOWN)
    for strength in STRENGTHS:
        match, known = library_at(f"V {strength:g}", f"strength {strength:g}")
        assert known.name in KNOWN
        assert match.name == LIBRARY_MATCH.replace(f"strength {STRENGTH:g}", f"strength {strength:g}")
        assert match.name in MATCH

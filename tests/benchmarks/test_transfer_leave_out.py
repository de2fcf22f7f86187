"""``benchmarks.transfer.leave_out``: choices against loops; the tables of one part of a rule against its figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfer.leave_out import (
    CRITERIA,
    Criterion,
    Figures,
    Gaps,
    choose,
    choose_part,
    family,
    mean_over_families,
)
from benchmarks.transfer.part_table import class_table, lower_table, part_to_json, strength_table
from benchmarks.transfer.rules import (
    LIBRARY_CLASSES,
    LIBRARY_LOWER,
    NO_CLASSES,
    NO_LOWER,
    class_rules,
    lower_rules,
)

ENCODERS = ("a-2-supcon", "a-3-triplet", "b", "c-2-contrastive")
FAMILIES = {"a": ENCODERS[:2], "b": ("b",), "c": ENCODERS[3:]}


def of(figure: float, best: float = 1.0) -> Figures:
    return Figures(figure=figure, gap=best - figure, largest=best - figure)


def drawn(names: Any, seed: int) -> Gaps:
    rng = np.random.default_rng(seed)
    one = lambda: Figures(figure=rng.random(), gap=rng.random(), largest=rng.random())  # noqa: E731
    return {name: {encoder: one() for encoder in ENCODERS} for name in names}


def loop(found: dict[str, Figures], key: str, without: str = "") -> float:
    """Mean over families of the mean over encoders."""
    means = []
    for name, encoders in FAMILIES.items():
        if name != without:
            means.append(sum(dict(found[one])[key] for one in encoders) / len(encoders))  # type: ignore[misc]
    return float(sum(means) / len(means))


def test_families_share_data_set_and_trunk() -> None:
    assert family("cifar10-resnet56-128-supcon") == family("cifar10-resnet56-16-triplet-seed3") == "cifar10-resnet56"
    assert len({family(name) for name in ("cifar10-resnet-16-supcon", "cifar10-paper-16-supcon", "faces")}) == 3


def test_an_encoder_has_no_say_in_the_rule_that_it_is_judged_by() -> None:
    gaps = {
        # The three of one family agree on a rule that no other family likes.
        "theirs": {**{f"big-{dim}-supcon": of(0.95) for dim in (2, 3, 4)}, "small": of(0.6), "other": of(0.6)},
        "ours": {**{f"big-{dim}-supcon": of(0.7) for dim in (2, 3, 4)}, "small": of(0.8), "other": of(0.7)},
    }
    # Means over encoders: 0.81 and 0.72; over families: 0.717 and 0.733.
    assert mean_over_families(gaps["theirs"]) == pytest.approx(1 - (0.95 + 0.6 + 0.6) / 3)
    assert mean_over_families(gaps["ours"], "figure") == pytest.approx((0.7 + 0.8 + 0.7) / 3)
    found = {choice.encoder: choice for choice in choose(gaps, "ours", "gap")}
    assert {name: choice.rule for name, choice in found.items()} == {
        "big-2-supcon": "ours",
        "big-3-supcon": "ours",
        "big-4-supcon": "ours",
        "small": "theirs",
        "other": "theirs",
    }
    assert found["big-2-supcon"].best_rule == "theirs"
    assert found["small"].figures == pytest.approx({"chosen": 0.6, "library": 0.8, "best": 0.8, "reference": 1.0})


@given(st.integers(1, 5), st.integers(0, 999))
def test_a_part_is_chosen_by_all_other_families(count: int, seed: int) -> None:
    names = [str(k) for k in range(count)]
    gaps = drawn(names, seed)
    part = choose_part(gaps, "0", CRITERIA)
    for by in CRITERIA:
        for left_out in FAMILIES:
            chosen = part.choices[by][left_out]
            assert loop(gaps[chosen], by, left_out) == min(loop(gaps[name], by, left_out) for name in names)
        mixed = {one: gaps[part.choices[by][family(one)]][one] for one in ENCODERS}
        rules = {choice.encoder: choice.rule for choice in choose(gaps, "0", by)}
        assert rules == {one: part.choices[by][family(one)] for one in ENCODERS}
        for key, value in part.without_a_say(by).items():
            assert value == pytest.approx(loop(mixed, key))
    for name in names:
        for key, value in part.mean(name).items():
            assert value == pytest.approx(loop(gaps[name], key))
        for left_out, encoders in FAMILIES.items():
            expected = sum(gaps[name][one]["gap"] for one in encoders) / len(encoders)
            assert part.there(name, left_out)["gap"] == pytest.approx(expected)


def rows(lines: Any) -> dict[str, list[str]]:
    """First cell -> the other cells, of all lines of tables, as the whole text shows them."""
    split = [[cell.strip() for cell in line.replace("|phi|", "f").strip("|").split("|")] for line in lines]
    return {cells[0]: cells[1:] for cells in split if len(cells) > 1}


def shown(figures: Figures) -> str:
    return f"{figures['gap']:.3f} ({figures['largest']:.3f})"


def test_the_table_of_lower_sides_shows_choices_and_figures() -> None:
    gaps = drawn(lower_rules(), 0)
    part = choose_part(gaps, LIBRARY_LOWER, CRITERIA)
    found = rows(lower_table(part))
    for name in FAMILIES:
        chosen = [part.choices[by][name] for by in CRITERIA]
        cells = [cell for one in chosen for cell in (one.replace("|phi|", "f"), shown(part.there(one, name)))]
        assert found[name] == [*cells, *(shown(part.there(one, name)) for one in (LIBRARY_LOWER, NO_LOWER))]
    without = [shown(part.without_a_say(by)) for by in CRITERIA]
    assert found["mean"] == [
        "",
        without[0],
        "",
        without[1],
        shown(part.mean(LIBRARY_LOWER)),
        shown(part.mean(NO_LOWER)),
    ]
    assert found["V/n^2"] == [
        shown(part.mean(f"-{weight} V/n^2")) for weight in ("0.25", "0.4", "0.5", "0.6", "0.75", "1")
    ]
    assert found["V/f"][2] == f"**{shown(part.mean(LIBRARY_LOWER))}**"
    best = min(gaps, key=lambda name: loop(gaps[name], "gap"))
    shown_as = best.replace("|phi|", "f")
    assert found[f"best in hindsight by mean gap: {shown_as}"][1] == f"{loop(gaps[best], 'gap'):.3f}"


def test_the_table_of_class_parts_shows_choices_and_figures() -> None:
    gaps = drawn(class_rules(), 2)
    part = choose_part(gaps, LIBRARY_CLASSES, ["gap"])
    found = rows(class_table(part))

    def gap(name: str, left_out: str = "") -> str:
        return f"{(part.there(name, left_out) if left_out else part.mean(name))['gap']:.3f}"

    for name in FAMILIES:
        chosen = part.choices["gap"][name]
        assert found[name] == [chosen, gap(chosen, name), gap(LIBRARY_CLASSES, name), gap(NO_CLASSES, name)]
    without = f"{part.without_a_say('gap')['gap']:.3f}"
    assert found["mean"] == ["", without, gap(LIBRARY_CLASSES), gap(NO_CLASSES)]
    caps = ("0.7", "0.8", "0.85", "0.9", "0.95", "1")
    for weight in ("1", "2", "3", "4"):
        names = [f"r {weight} to {cap}" for cap in caps]
        assert found[weight] == [f"**{gap(one)}**" if one == LIBRARY_CLASSES else gap(one) for one in names]
    best = min(gaps, key=lambda name: loop(gaps[name], "gap"))
    assert found[f"best in hindsight by mean gap: {best}"] == [
        f"{part.mean(best)[key]:.3f}" for key in ("figure", "gap")
    ]


@pytest.mark.parametrize("criteria", [("gap",), CRITERIA])
def test_the_table_of_strengths_shows_every_strength(criteria: tuple[Criterion, ...]) -> None:
    gaps = drawn(("0.01", "0.1"), 1)
    part = choose_part(gaps, "0.1", criteria)
    found = rows(strength_table(part))
    cell = shown if len(criteria) > 1 else lambda figures: f"{figures['gap']:.3f}"
    for name in FAMILIES:
        assert found[name][-2:] == [cell(part.there(one, name)) for one in ("0.01", "0.1")]
    # Where an encoder has one question its largest gap is its mean gap, and not shown.
    mean = part.mean("0.1")
    assert (
        found["**0.1** (library)"] == [f"{mean[key]:.3f}" for key in ("figure", "gap", "largest")][: 1 + len(criteria)]
    )
    json = part_to_json(part)
    assert json["candidates"]["0.1"]["mean"]["figure"] == round(mean["figure"], 4)
    assert json["candidates"]["0.01"]["gaps of families"]["b"] == round(gaps["0.01"]["b"]["gap"], 4)
    assert json["candidates"]["0.01"]["figures of families"]["b"] == round(gaps["0.01"]["b"]["figure"], 4)
    assert json["choices"]["gap"]["families"] == part.choices["gap"]

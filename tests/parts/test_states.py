"""States of parts merge in any order and grouping, and a fit in parts is the fit of the whole."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from part_cases import (
    ALONE,
    CASES,
    N,
    Numbered,
    batches_of,
    content_of,
    encoder,
    fit_in_parts,
    make,
    points,
    same_posterior,
)
from safetensors.torch import save
from tables import each, refused

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit import dataset
from contrastive_curvature.fit.curvature_options import CurvatureOptions
from contrastive_curvature.fit.part_state import State
from contrastive_curvature.structures import Diagonal

pytestmark = [
    pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning"),
    pytest.mark.filterwarnings("ignore::contrastive_curvature.laplace.advice.FeatureNormWarning"),
    # Of random networks, and few points.
    pytest.mark.filterwarnings("ignore:The clamped curvature is zero everywhere"),
]


@st.composite
def divisions(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Points of every part, and the sizes of its batches: some parts are empty, and some have one point."""
    order = draw(st.permutations(range(N)))
    cuts = sorted(draw(st.lists(st.integers(0, N), min_size=1, max_size=5)))
    found = []
    for start, stop in zip([0, *cuts], [*cuts, N], strict=True):
        size = draw(st.integers(1, 8))
        n = stop - start
        found.append((order[start:stop], [size] * (n // size) + ([n % size] if n % size else [])))
    return found


def loader_of(device: str, chosen: list[int], sizes: list[int]) -> Any:
    if not chosen:
        return []
    return batches_of(device, sizes, torch.tensor(chosen))


def fit_with(la: Any, parts: list[Any]) -> None:
    """Fit one posterior in parts."""
    count = len(parts)
    statistics = State.merged([la.part_statistics(part, (k, count)) for k, part in enumerate(parts)])
    second = [la.part_curvature(part, (k, count), statistics) for k, part in enumerate(parts)]
    la.fit_parts(statistics, State.merged(second))


def merged_in(states: list[State], order: list[int], pairs: list[int]) -> State:
    """All states, put together two at a time: which two, the list says."""
    left = [states[k] for k in order]
    for pick in pairs:
        if len(left) == 1:
            break
        first = left.pop(pick % len(left))
        second = left.pop((pick // 7) % len(left))
        left.append(first.merge(second))
    return State.merged(left)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ALONE])
@settings(max_examples=5)
@given(drawn=divisions(), data=st.data())
def test_a_fit_in_parts_is_that_of_the_whole(case, drawn, data, device) -> None:
    parts = [loader_of(device, chosen, sizes) for chosen, sizes in drawn]
    la, count = make(case, device), len(parts)

    def merged(states: list[State]) -> State:
        order = data.draw(st.permutations(range(count)))
        return merged_in(states, order, data.draw(st.lists(st.integers(0, 99), max_size=6)))

    statistics = merged([la.part_statistics(part, (k, count)) for k, part in enumerate(parts)])
    la.fit_parts(statistics, merged([la.part_curvature(p, (k, count), statistics) for k, p in enumerate(parts)]))
    whole = make(case, device)
    whole.fit(batches_of(device, [5, 5, 2]))
    same_posterior(la, whole, device)


@pytest.mark.parametrize("many", [N, N + 1])
def test_the_number_of_all_points_decides_in_parts_as_in_one_process(many, device, monkeypatch) -> None:
    monkeypatch.setattr(dataset, "MANY_POINTS", many)
    monkeypatch.setattr(dataset, "NEGATIVE_SAMPLES", 7)
    case = "as the number of points has it"
    parts = [batches_of(device, [5, 2], torch.arange(7)), batches_of(device, [5], torch.arange(7, N))]
    la, whole = fit_in_parts(case, device, parts)[0], make(case, device)
    whole.fit(batches_of(device, [N]))
    same_posterior(la, whole, device)
    same_posterior(la, fit_in_parts(case, device, parts, negative_samples=7 if many == N else None)[0], device)


@pytest.mark.parametrize("case", list(CASES))
def test_every_step_may_run_in_a_process_of_its_own(case: str, device: str, tmp_path: Path) -> None:
    """States go through files, and a part that was lost is computed again to the bit."""
    parts = [batches_of(device, [3, 1], torch.arange(4) + 4 * k) for k in range(3)]
    first = [make(case, device).part_statistics(part, (k, 3)) for k, part in enumerate(parts)]
    assert content_of(make(case, device).part_statistics(parts[1], (1, 3))) == content_of(first[1])
    statistics, backwards = State.merged(first), State.merged(reversed(first))
    second = [make(case, device).part_curvature(part, (k, 3), statistics) for k, part in enumerate(parts)]
    assert content_of(make(case, device).part_curvature(parts[2], (2, 3), backwards)) == content_of(second[2])
    la, again, read = make(case, device), make(case, device), []
    merged = (statistics, State.merged(second))
    la.fit_parts(*merged)
    for state, path in zip(merged, (tmp_path / "a", str(tmp_path / "b")), strict=True):
        state.save(path)
        read.append(State.load(path).to(torch.device(device)))
        assert content_of(read[-1]) == content_of(state) == Path(path).read_bytes()
    again.fit_parts(*read)
    same_posterior(again, la, device, 0.0)
    if case != "mc samples":
        whole = make(case, device)
        whole.fit(batches_of(device, [3, 1] * 3))
        same_posterior(la, whole, device)


def states(case: str, device: str, count: int = 2, **more: Any) -> tuple[Any, list[Any], list[State], list[State]]:
    """A posterior, the loaders of its parts, and their states."""
    n = N // count
    parts = [batches_of(device, [n], torch.arange(n) + n * k) for k in range(count)]
    la = make(case, device, **more)
    first = [la.part_statistics(part, (k, count)) for k, part in enumerate(parts)]
    whole = State.merged(first)
    return la, parts, first, [la.part_curvature(part, (k, count), whole) for k, part in enumerate(parts)]


def test_states_that_do_not_belong_together_are_refused(device: str) -> None:
    la, parts, first, second = states("sampled", device)
    whole = State.merged(first)
    refused(lambda: first[0].merge(second[1]), "states: expected all of one kind, 'statistics', got 'curvature'")
    refused(lambda: whole.merge(first[0]), "states: expected every part once, got part 0 twice")
    third = la.part_statistics(parts[1], (1, 3))
    refused(lambda: first[0].merge(third), "states: expected parts of 2, got parts of 3")
    other = make("sampled", device)
    with torch.no_grad():
        other.model.model[0].weight[0, 0] += 1e-12
    moved = other.part_statistics(parts[1], (1, 2))
    refused(lambda: first[0].merge(moved), "states: encoder: expected", "in all parts")
    for more, name in (({"margin": 0.8}, "loss"), ({"structure": "full"}, "structure")):
        changed = make("sampled", device, **more)
        with pytest.raises(InputError, match=f"states: {name}: expected .* in all parts"):
            first[0].merge(changed.part_statistics(parts[1], (1, 2)))
        with pytest.raises(InputError, match=f"statistics: {name}: expected"):
            changed.part_curvature(parts[1], (1, 2), whole)
        with pytest.raises(InputError, match=f"statistics: {name}: expected"):
            changed.fit_parts(whole, State.merged(second))
    # Both passes over part 0, once with another part 1.
    x, y = parts[1].batches[0]
    alien = State.merged([first[0], la.part_statistics(Numbered([(x, y // 2)], parts[1].numbers), (1, 2))])
    foreign = la.part_curvature(parts[0], (0, 2), alien)
    refused(lambda: second[1].merge(foreign), "states: statistics: expected")
    # The same targets with other inputs.
    moved = [Numbered([(part.batches[0][0].flip(0), part.batches[0][1])], part.numbers) for part in parts]
    elsewhere = State.merged([la.part_statistics(part, (k, 2)) for k, part in enumerate(moved)])
    points_of = "curvature: expected the points of part 0 of the statistics"
    refused(lambda: la.fit_parts(elsewhere, State.merged(second)), points_of)
    part = batches_of(device, [6], torch.arange(6))
    twice = State.merged([la.part_statistics(part, (k, 2)) for k in range(2)])
    refused(lambda: la.part_curvature(part, (0, 2), twice), "statistics: expected every point in one part", "twice")


def test_a_missing_part_is_refused_by_its_number(device: str) -> None:
    la, parts, first, second = states("sampled", device, 3)
    some = State.merged([first[0], first[2]])
    assert some.missing == [1]
    whole = State.merged(first)
    la.fit_parts(whole, State.merged(second))
    before = la.H.clone()
    message = "statistics: expected all 3 parts, got none of [1]"
    refused(lambda: la.part_curvature(parts[0], (0, 3), some), message)
    refused(lambda: la.fit_parts(some, State.merged(second)), message)
    refused(lambda: la.fit_parts(whole, second[2]), "curvature: expected all 3 parts, got none of [0, 1]")
    refused(lambda: la.fit_parts(whole, whole), "curvature: expected a state of kind 'curvature', got 'statistics'")
    assert torch.equal(la.H, before), "the last fit stays"
    assert la.n_data == N


@each("kind", ["points", "targets", "fewer", "outputs"])
def test_other_points_in_the_second_pass_are_refused(kind: str, device: str) -> None:
    la, parts, first, _ = states("exact", device)
    (x, y), numbers = parts[1].batches[0], parts[1].numbers
    batch = {
        "points": (x.flip(0) + 1, y),
        "targets": (x, (y + 1) % 3),
        "fewer": (x[:-1], y[:-1]),
        "outputs": (1.5 * x, y),
    }[kind]
    with pytest.raises(InputError, match="loader: expected the points of part 1 of the statistics"):
        la.part_curvature(Numbered([batch], numbers[: len(batch[0])]), (1, 2), State.merged(first))


def test_the_same_data_under_other_numbers_are_refused(device: str) -> None:
    """A job array whose jobs forget to take their share: 40 points, counted from a place of its own in every part."""
    la, (x, y) = make("sampled", device), points(device, 40)
    first = [la.part_statistics([(x, y)], (k, 2)) for k in range(2)]
    refused(lambda: State.merged(first), "expected other points in every part, got the same 40 points")
    other = la.part_statistics([(x + 1, y)], (1, 2))
    assert State.merged([first[0], other]).n == 80


def test_malformed_states_are_refused(device: str) -> None:
    la, parts, first, _ = states("sampled", device)
    refused(lambda: State.merged(first[0]), "states: expected several states, as a list", kind=InputTypeError)
    refused(lambda: la.part_curvature(parts[0], (0, 3), State.merged(first)), "part: expected one of 2 parts")
    refused(lambda: fit_with(la, [[], []]), "statistics: expected at least one point")
    for part in (3, (2, 2), (-1, 2)):
        refused(partial(la.part_statistics, parts[0], part), "part: expected")


class Unread:
    """A loader of which only the first batch may be read."""

    def __init__(self, device: str) -> None:
        self.batch = batches_of(device, [12]).batches[0]

    def __iter__(self) -> Any:
        yield self.batch
        raise AssertionError


def test_fits_that_do_not_come_in_parts_are_refused_at_once(device) -> None:
    options = {"pd_fix": "full", "negative_samples": None}
    la = Laplace(encoder(device), "contrastive", "all", "diag", backend_kwargs=options)
    with pytest.raises(UnsupportedError, match="pd_fix='full': every point is coupled"):
        la.part_statistics(Unread(device), (0, 2))


def test_an_option_that_is_new_tells_fits_apart_too(device: str) -> None:
    @dataclass(frozen=True)
    class MoreOptions(CurvatureOptions):
        more: int = 0

    own = CurvatureOptions.parse({})
    known = {field.name: getattr(own, field.name) for field in fields(own)}
    one, other = (
        cc.ContrastiveGGN(encoder(device), options=MoreOptions(**known, more=more)).identity(Diagonal)
        for more in (0, 1)
    )
    assert {name for name in one if one[name] != other[name]} == {"options"}


def state(device: str, seed: int = 7) -> State:
    return make("sampled", device).part_statistics(batches_of(device, [5, 5, 2], seed=seed), (0, 1))


def test_other_files_are_refused_by_name(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part"
    monkeypatch.setattr(artifact, "VERSION", 4)
    state(device).save(path)
    monkeypatch.undo()
    refused(
        lambda: State.load(path), f"{path}: expected a state", "got version 4", "use that release, or make it again"
    )
    state(device).save(path)
    content = path.read_bytes()
    foreign = save({"weight": torch.zeros(3, device=device)})
    for other, message in (
        (b"", "a damaged one, or something else. Compute this part again"),
        (content[:-1], "a damaged one, or something else. Compute this part again"),
        (content[:-1] + bytes([content[-1] ^ 1]), "its checksum is another. Compute this part again"),
        (foreign, "a safetensors file of something else. la.part_statistics"),
    ):
        path.write_bytes(other)
        with pytest.raises(InputError, match=r"part: expected a state of a part of a data set, got .*" + message):
            State.load(path)
    none = tmp_path / "none"
    refused(lambda: State.load(none), "none: expected a state of a part of a data set, got no such file")
    refused(lambda: state(device).save(none / "a"), "expected a file in a folder that exists")


@each("n", [12, 1200])
def test_a_file_of_curvature_does_not_hold_the_data(n: int, device: str) -> None:
    """The curvature, the sample with its classes, and points that say what is typical; no inputs."""
    la, loader = make("sampled", device), [points(device, n)]
    first = la.part_statistics(loader, (0, 1))
    assert len(content_of(first)) <= 16_000 + n * 8 * 5
    assert len(content_of(la.part_curvature(loader, (0, 1), first))) <= 16_000 + n * 8 * 7

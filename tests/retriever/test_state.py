"""A retriever is a value: whatever stops or overtakes a call, its state is the old one or the complete new one."""

import copy
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from laplace import Laplace
from numpy.typing import NDArray
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.codec import to_tree
from contrastive_curvature.retriever.state import RetrieverState

PACKAGE = str(Path(cc.__file__).parent)
RATES = {"wrong_answers": 0.2, "false_matches": 0.2, "false_alarms": 0.05}
Points = tuple[NDArray[np.float32], NDArray[np.str_]]


def points(n: int, seed: int, classes: int = 5) -> Points:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return (3 * np.eye(6)[y] + 0.5 * rng.normal(size=(n, 6))).astype(np.float32), np.array([f"kind {k}" for k in y])


GALLERY, HELD, MORE, ASKED = points(40, 1), points(80, 2), points(8, 3), points(30, 4)[0]


@pytest.fixture(scope="module")
def made() -> cc.Retriever:
    return cc.Retriever(None, **RATES).fit(gallery=GALLERY, held_out=HELD)


@pytest.fixture
def retriever(made: cc.Retriever) -> cc.Retriever:
    return copy.copy(made)


CHANGES: dict[str, Callable[[cc.Retriever], Any]] = {
    "add": lambda r: r.add(*MORE),
    "remove": lambda r: r.remove([1, 2, 3]),
    "learn at random": lambda r: r.learn(*MORE, "random"),
    "learn what was answered": lambda r: r.learn(*points(30, 5), "answered"),
    "fit": lambda r: r.fit(gallery=points(30, 6), held_out=points(50, 7)),
}


def parts(value: Any) -> Iterator[Any]:
    """All numbers and names of a state."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from parts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from parts(part)
    elif isinstance(value, torch.Tensor):
        yield value.numpy().tobytes()
    else:
        yield value.tobytes() if isinstance(value, np.ndarray) else value


def content(state: RetrieverState | None) -> list[Any]:
    return list(parts(to_tree(state)))


def at_new_lines(call: Callable[[], Any], then: Callable[[int], None]) -> int:
    """Call, with a function before each line of the package that has not run yet; return the number of these lines."""
    seen: set[tuple[Any, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        place = (frame.f_code, frame.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            then(len(seen))
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return len(seen)


@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupt_at_any_line_leaves_the_old_state_or_the_new_one(change: str, made: cc.Retriever) -> None:
    act, old, new = CHANGES[change], made._now, copy.copy(made)
    before = content(old)
    total = at_new_lines(lambda: act(new), lambda _: None)
    after = content(new._now)
    assert after != before
    kept = 0
    for line in range(1, total + 1):
        stopped = copy.copy(made)

        def stop(number: int, line: int = line) -> None:
            if number == line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            at_new_lines(lambda stopped=stopped: act(stopped), stop)
        kept += stopped._now is old
        assert stopped._now is old or content(stopped._now) == after
        assert not stopped._writing.locked()
    assert total > 150
    assert total - kept < 5  # lines after the assignment
    assert content(old) == before


def fitted_posterior(seed: int) -> Any:
    torch.manual_seed(seed)
    la: Any = Laplace(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).eval(), "contrastive")
    la.fit([(torch.from_numpy(GALLERY[0]), torch.arange(40) % 5)])
    return la


def answered(retriever: cc.Retriever) -> list[Any]:
    return list(parts(vars(retriever(ASKED))))


@pytest.mark.parametrize("fits", [False, True])
def test_a_change_at_any_line_of_a_query_gives_the_old_answers_or_the_new_ones(fits: bool, made: cc.Retriever) -> None:
    if fits:
        made, other = (
            cc.Retriever(fitted_posterior(seed), **RATES).fit(gallery=GALLERY, held_out=HELD) for seed in (0, 1)
        )
    else:
        other = copy.copy(made).remove(range(12))
    wanted = [answered(made), answered(other)]
    assert wanted[0] != wanted[1]
    found = []
    for line in range(1, at_new_lines(lambda: made(ASKED), lambda _: None) + 1):
        asked, answers = copy.copy(made), list[Any]()

        def change(number: int, line: int = line, asked: cc.Retriever = asked) -> None:
            if number == line and fits:
                asked._state = other._state
            elif number == line:
                asked.remove(range(12))

        at_new_lines(lambda asked=asked, answers=answers: answers.extend(answered(asked)), change)
        found.append(wanted.index(answers))
    assert found == sorted(found, reverse=True)
    assert set(found) == {0, 1}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_waits_for_another_one_so_that_none_is_lost(change: str, retriever: cc.Retriever) -> None:
    act, added, alone = CHANGES[change], list[int](), copy.copy(retriever)
    middle = at_new_lines(lambda: act(alone), lambda _: None) // 2
    other = threading.Thread(target=lambda: added.extend(retriever.add(*MORE)))

    def overtake(number: int) -> None:
        if number == middle:
            other.start()
            other.join(0.5)
            retriever(ASKED)  # does not wait

    at_new_lines(lambda: act(retriever), overtake)
    other.join()
    identifiers = retriever._now.gallery.identifiers
    assert set(added) <= set(identifiers.tolist())
    assert len(identifiers) == len(alone._now.gallery.identifiers) + 8 == len(set(identifiers.tolist()))


def twice(given: Points) -> Points:
    return np.concatenate([given[0]] * 2), np.concatenate([given[1]] * 2)


@pytest.mark.parametrize(
    ("message", "act"),
    [
        ("no rate covers", lambda r: r.add(*points(8, 8, 6))),
        ("false_matches: nothing is answered", lambda r: r.fit(gallery=GALLERY, held_out=points(3, 9))),
        ("are repetitions", lambda r: r.fit(gallery=GALLERY, held_out=twice(HELD))),
        ("are repetitions", lambda r: r.learn(*twice(MORE), "random")),
        ("are in the gallery", lambda r: r.fit(gallery=HELD, held_out=HELD)),
        ("wrong_answers: nothing is answered", lambda r: r.remove(range(39))),
    ],
)
def test_a_warning_that_is_an_error_changes_nothing(message: str, act: Any, retriever: cc.Retriever) -> None:
    old, once = retriever._now, copy.copy(retriever)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        act(once)
    assert any(message in str(warning.message) for warning in said)
    assert {warning.filename for warning in said} == {__file__}
    for number in range(len(said)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", re.escape(str(said[number].message)))
            with pytest.raises(UserWarning):
                act(retriever)
        assert retriever._now is old
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        act(retriever)
    assert content(retriever._now) == content(once._now)


def test_feedback_has_the_limit_that_it_was_answered_under_until_the_score_changes(retriever: cc.Retriever) -> None:
    limit = retriever._now.rule.limit
    for seed in (5, 6):
        retriever.learn(*points(30, seed), "answered")
        assert retriever._now.ceiling == limit
    retriever.remove([3])
    assert retriever._now.ceiling == np.inf
    assert len(retriever._now.feedback[0]) > 30


def test_a_fit_that_fails_leaves_the_earlier_one(retriever: cc.Retriever) -> None:
    old = retriever._now
    for wrong in (
        {"gallery": GALLERY, "held_out": [(torch.from_numpy(HELD[0][:, 1:]), HELD[1])]},
        {"gallery": GALLERY, "held_out": (HELD[0][:1], HELD[1][:1])},
        {"gallery": (GALLERY[0] * np.nan, GALLERY[1]), "held_out": HELD},
        {"gallery": GALLERY, "held_out": HELD, "groups": [1]},
    ):
        with pytest.raises((cc.InputError, RuntimeError)):
            retriever.fit(**wrong)
        assert retriever._now is old


def test_the_posterior_of_the_user_and_that_of_the_retriever_are_two() -> None:
    la = fitted_posterior(0)
    before = list(parts(la.state_dict()))
    retriever = cc.Retriever(la, **RATES).fit(gallery=GALLERY, held_out=HELD)
    assert list(parts(la.state_dict())) == before  # not calibrated
    answers = answered(retriever)
    for changed in (la, retriever.la):
        changed.prior_precision = 100 * changed.prior_precision
        changed.temperature = 7.0
    assert answered(retriever) == answers
    assert not torch.equal(retriever.la(ASKED).uncertainty, la(ASKED).uncertainty)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_goes_its_own_way(copied: Any, retriever: cc.Retriever) -> None:
    other, before = copied(retriever), content(retriever._now)
    assert other._writing is not retriever._writing
    retriever.remove([3])
    assert content(other._now) == before != content(retriever._now)
    assert other.add(*MORE).tolist() == retriever.add(*MORE).tolist()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file that the interrupt left open
def test_an_interrupt_at_any_line_of_a_save_leaves_the_old_file_or_the_new_one(made: Any, tmp_path: Path) -> None:
    other, folder = copy.copy(made).remove([3]), tmp_path / "saved"
    contents = [(r.save(folder, overwrite=True) / "retriever.safetensors").read_bytes() for r in (other, made)]
    found = []
    for line in range(1, at_new_lines(lambda: made.save(folder, overwrite=True), lambda _: None) + 1):

        def stop(number: int, line: int = line) -> None:
            if number == line:
                raise KeyboardInterrupt

        made.save(folder, overwrite=True)
        with pytest.raises(KeyboardInterrupt):
            at_new_lines(lambda: other.save(folder, overwrite=True), stop)
        found.append(contents.index((folder / "retriever.safetensors").read_bytes()))
        made.save(folder, overwrite=True)
        assert os.listdir(folder) == ["retriever.safetensors"]
    assert len(found) > 80
    assert found == sorted(found, reverse=True)


def kill_savers(folder: Path, count: int) -> tuple[int, int, int]:
    """Kill processes that save two retrievers by turns, at random moments.

    Returns:
        How often the file holds the first one, and the second one; how many unfinished files were left.
    """
    first = cc.Retriever(None, **RATES).fit(gallery=points(20_000, 1), held_out=HELD)
    second = copy.copy(first).remove(range(50))
    wanted, found, left, rng = [content(first._now), content(second._now)], [0, 0], 0, np.random.default_rng(0)
    first.save(folder)
    for _ in range(count):
        if not (child := os.fork()):
            while True:
                second.save(folder, overwrite=True)
                first.save(folder, overwrite=True)
        time.sleep(rng.uniform(0.005, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += len(os.listdir(folder)) - 1
        found[wanted.index(content(cc.Retriever.load(folder, None)._now))] += 1
    first.save(folder, overwrite=True)
    assert os.listdir(folder) == ["retriever.safetensors"]
    return *found, left


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_processes_killed_while_they_save_leave_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    # A process of its own, with one thread: a fork of several may hang.
    code = (
        "import json, sys, pathlib, torch, test_state; torch.set_num_threads(1); "
        "print(json.dumps(test_state.kill_savers(pathlib.Path(sys.argv[1]), 30)))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(cc.__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path / "saved"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    of_first, of_second, left = json.loads(done.stdout)
    assert of_first + of_second == 30
    assert min(of_first, of_second, left) > 0


def test_a_saved_retriever_of_an_earlier_format_is_refused_by_name(made: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(artifact, "VERSION", 2)
    folder = made.save(tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(
        cc.InputError, match=r"retriever\.safetensors: expected a saved retriever of version \d, got ver"
    ):
        cc.Retriever.load(folder, None)

"""A training that was interrupted ends with the same bits as one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from online_training import CHANCES, Interrupted, Interrupting, flat, make_training, states
from torch.utils.data import DataLoader, RandomSampler

from contrastive_curvature.online import Trainer, load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 3
HOW = [("last_layer", structure) for structure in ("diag", "full", "kron", "kron_lowrank")] + [("all", "diag")]
_TRUTH: dict[tuple[str, ...], list[object]] = {}


def truth(*how: str) -> list[object]:
    if how not in _TRUTH:
        trainer, loader = make_training(how[0], None, 1, *how[1:])
        trainer.fit(loader, EPOCHS)
        _TRUTH[how] = states(trainer)
    return _TRUTH[how]


@given(
    chance=st.sampled_from(CHANCES),
    how=st.sampled_from(HOW),
    every=st.integers(1, 14),
    cuts=st.lists(st.integers(1, 15), min_size=1, max_size=3),
)
def test_interrupted_anywhere(
    chance: str, how: tuple[str, str], every: int, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if chance == "numpy sampler":
        pytest.importorskip("pytorch_metric_learning.samplers")
    file = tmp_path_factory.getbasetemp() / "run.pt"
    file.unlink(missing_ok=True)
    expected = truth(chance, *how)
    for cut in cuts:
        trainer, loader = make_training(chance, file, every, *how)
        try:
            trainer.fit(Interrupting(loader, cut), EPOCHS)
        except Interrupted:
            assert cut <= 5 * EPOCHS
    trainer, loader = make_training(chance, file, every, *how)
    if file.exists():
        torch.randn(5)  # where the generators stand then is of no effect
    trainer.fit(Interrupting(loader, 10**6), EPOCHS)
    assert trainer.steps == 4 * EPOCHS
    assert states(trainer) == expected


@pytest.mark.parametrize("kind", ["sampler", "sampler with replacement", "workers"])
def test_interrupted_where_numbers_are_drawn_on_the_way(kind: str, tmp_path: Path) -> None:
    """Samplers that draw more points than there are, as they go; workers, which every epoch seeds anew."""

    def make(file: Path | None) -> tuple[Trainer, DataLoader[object]]:
        trainer, loader = make_training("augmented" if kind == "workers" else "none", file)
        if kind == "workers":
            return trainer, DataLoader(loader.dataset, 6, shuffle=True, num_workers=1)
        generator = torch.Generator().manual_seed(1)
        sampler = RandomSampler(loader.dataset, "with" in kind, num_samples=100, generator=generator)
        return trainer, DataLoader(loader.dataset, 6, sampler=sampler)

    whole, loader = make(None)
    whole.fit(loader, 2)
    expected = states(whole)
    for cut in (9,) if kind == "workers" else (5, 12):
        trainer, loader = make(tmp_path / "run.pt")
        with pytest.raises(Interrupted):
            trainer.fit(Interrupting(loader, cut), 2)
    trainer, loader = make(tmp_path / "run.pt")
    trainer.fit(loader, 2)
    assert states(trainer) == expected


def test_a_finished_training_returns_at_once_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    trainer, loader = make_training("augmented", file)
    trainer.fit(loader, 2)
    ended, written = states(trainer), file.stat().st_mtime_ns
    again, loader = make_training("augmented", file)
    cut = Interrupting(loader, 1)
    again.fit(cut, 2)
    assert cut.count == 0
    assert file.stat().st_mtime_ns == written
    assert states(again) == ended
    longer, loader = make_training("augmented", file)
    longer.fit(loader, EPOCHS)
    assert states(longer) == truth("augmented", "last_layer", "diag")


SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from contrastive_curvature.online import load_checkpoint
from online_training import make_training

def start(file, slow):
    child = os.fork()  # a process of its own, without the seconds that imports take
    if child:
        return child
    trainer, loader = make_training("augmented", Path(file), 2, "all")
    if slow:
        trainer.step.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    trainer.fit(loader, 3)
    os._exit(0)

whole, killed = sys.argv[1:]
assert os.waitpid(start(whole, False), 0)[1] == 0
victim = start(killed, True)
while not Path(killed).exists() or load_checkpoint(killed)["steps"] < 6:
    assert os.waitpid(victim, os.WNOHANG) == (0, 0)
    time.sleep(0.02)
os.kill(victim, signal.SIGKILL)
signalled = os.WTERMSIG(os.waitpid(victim, 0)[1])
at = load_checkpoint(killed)["steps"]
assert os.waitpid(start(killed, False), 0)[1] == 0
print(json.dumps([signalled, at]))
"""


def test_really_killed(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(whole), str(killed)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    signalled, at = json.loads(done.stdout)
    assert signalled == signal.SIGKILL
    assert 6 <= at < 12
    assert load_checkpoint(whole)["steps"] == 12
    assert flat(load_checkpoint(whole)) == flat(load_checkpoint(killed))

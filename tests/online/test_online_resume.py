"""A training that was interrupted ends with the same bits as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from online_training import CHANCES, Interrupted, Interrupting, make_training, states
from tables import each
from torch.utils.data import DataLoader, RandomSampler

from contrastive_curvature.online import Trainer

EPOCHS = 3
HOW = [("last_layer", structure) for structure in ("diag", "full", "kron", "kron_lowrank")] + [("all", "diag")]
_TRUTH: dict[tuple[str, ...], list[object]] = {}


def truth(*how: str) -> list[object]:
    if how not in _TRUTH:
        trainer, loader = make_training(how[0], None, 1, *how[1:])
        trainer.fit(loader, EPOCHS)
        _TRUTH[how] = states(trainer)
    return _TRUTH[how]


@settings(max_examples=12)
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


@each("kind", ["sampler with replacement", "workers"])
def test_interrupted_where_numbers_are_drawn_on_the_way(kind: str, tmp_path: Path) -> None:
    """Samplers that draw more points than there are, as they go; workers, which every epoch seeds anew."""

    def make(file: Path | None) -> tuple[Trainer, DataLoader[object]]:
        trainer, loader = make_training("augmented" if kind == "workers" else "none", file)
        if kind == "workers":
            return trainer, DataLoader(loader.dataset, 6, shuffle=True, num_workers=1)
        generator = torch.Generator().manual_seed(1)
        sampler = RandomSampler(loader.dataset, True, num_samples=100, generator=generator)
        return trainer, DataLoader(loader.dataset, 6, sampler=sampler)

    (tmp_path / "run.pt").unlink(missing_ok=True)
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

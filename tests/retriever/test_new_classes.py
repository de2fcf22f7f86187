"""Queries of classes that nobody knows: what limits their answers."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature.retriever.answers import Answers
from contrastive_curvature.retriever.evidence import Embedded, Searched, evidence
from contrastive_curvature.retriever.rule import certified

RATES = {"wrong_answers": 0.2, "false_matches": 0.2, "false_alarms": 0.05}
Points = tuple[NDArray[np.float32], NDArray[np.int64]]


def points(n: int, seed: int, classes: int = 6) -> Points:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return (3 * np.eye(6, 8)[y] + 1.2 * rng.normal(size=(n, 8))).astype(np.float32), y


TRAIN, HELD, MORE, ASKED = points(120, 1), points(200, 2), points(30, 3), points(150, 4)


def frozen() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.Dropout(0.5), nn.Tanh())


@cache
def made() -> cc.Retriever:
    return cc.Retriever(frozen(), **RATES, head=True).fit(*TRAIN, held_out=HELD)


def below(x: NDArray[np.float32]) -> torch.Tensor:
    with torch.no_grad():
        return nn.functional.normalize(frozen().eval()(torch.from_numpy(x)), dim=1)


class Exact:
    def __init__(self, vectors: torch.Tensor) -> None:
        self.vectors = vectors

    def search(self, vectors: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        top = (vectors @ self.vectors.T).topk(k)
        return 1 - top.values, top.indices


def same(first: Answers, second: Answers) -> bool:
    texts = np.array_equal(first.decision, second.decision) and np.array_equal(first.label, second.label)
    return texts and np.allclose(first.confidence, second.confidence) and np.allclose(first.p_value, second.p_value)


def test_a_head_is_answered_for_what_the_frozen_encoder_says() -> None:
    retriever = made()
    state, answers = retriever._now, retriever(ASKED[0])
    done = answers.decision == "answer"
    nearest = TRAIN[1][(below(ASKED[0]) @ below(TRAIN[0]).T).argmax(1).numpy()]
    assert 0.3 < done.mean() < 1
    np.testing.assert_array_equal(answers.label[done], nearest[done])
    assert (answers.label != nearest).any()
    # The limit is that of a search of the frozen outputs alone.
    labels = torch.from_numpy(TRAIN[1])
    held, absent = state.compared(state.held, state.truth, None)
    alone = [
        Searched(evidence(Embedded.alone(below(HELD[0])), below(TRAIN[0]), labels, truth)[0], held.novelty, held.right)
        for truth in (None, torch.from_numpy(HELD[1]))
    ]
    np.testing.assert_allclose(held.present, alone[0].evidence, rtol=1e-4, atol=1e-4)
    limit = certified(retriever.rates, *alone).present_limit
    np.testing.assert_allclose(state.rule.present_limit, limit, rtol=1e-3)
    above = [Searched(found.evidence, found.novelty, found.right) for found in (held, absent)]
    assert not np.isclose(limit, certified(retriever.rates, *above).present_limit, rtol=0.1)


def together(*parts: Points) -> Points:
    x, y = zip(*parts, strict=True)
    return np.concatenate(x), np.concatenate(y)


def test_what_is_below_the_head_is_added_removed_learned_saved_and_searched_without_an_index(tmp_path: Path) -> None:
    la = made().la

    def refitted(**given: Any) -> cc.Retriever:
        return cc.Retriever(la, **RATES).fit(**{"gallery": TRAIN, "held_out": HELD, **given})

    grown, shrunk, learned, fed = (copy.copy(made()) for _ in range(4))
    grown.add(*MORE)
    shrunk.remove(range(90, 120))
    fed.learn(*MORE, "answered")
    cases = {
        "fitted": (made(), refitted()),
        "add": (grown, refitted(gallery=together(TRAIN, MORE))),
        "remove": (shrunk, refitted(gallery=(TRAIN[0][:90], TRAIN[1][:90]))),
        "learn": (learned.learn(*MORE, "random"), refitted(held_out=together(HELD, MORE))),
        "save": (fed, cc.Retriever.load(fed.save(tmp_path / "saved"), frozen())),
        "index": (made(), cc.Retriever(la, **RATES, index=Exact(la(TRAIN[0]).mu)).fit(gallery=TRAIN, held_out=HELD)),
    }
    for name, (first, second) in cases.items():
        if name == "save":
            for changed in (first, second):
                changed.remove([3])
        assert same(first(ASKED[0]), second(ASKED[0])), name
    assert not same(grown(ASKED[0]), made()(ASKED[0]))


def test_a_head_that_makes_matches_worse_is_not_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wrong = (TRAIN[0], rng.permutation(TRAIN[1]))
    retriever = cc.Retriever(frozen(), **{**RATES, "wrong_answers": 0.4}, head=True)
    with pytest.warns(UserWarning, match="held-out queries have a right match with a head, .* without: the outputs"):
        retriever.fit(*wrong, gallery=TRAIN, held_out=HELD)
    answers = retriever(ASKED[0])
    np.testing.assert_array_equal(answers.label, TRAIN[1][(below(ASKED[0]) @ below(TRAIN[0]).T).argmax(1).numpy()])
    assert (answers.decision == "answer").mean() > 0.3
    assert same(cc.Retriever.load(retriever.save(tmp_path / "saved"), frozen())(ASKED[0]), answers)

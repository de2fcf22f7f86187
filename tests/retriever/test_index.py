"""What an index of the user's own returns to a retriever is checked by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tables import each
from torch import Tensor

import contrastive_curvature as cc

N, DIM = 60, 8
VECTORS = torch.nn.functional.normalize(torch.randn(N, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
HELD = torch.nn.functional.normalize(VECTORS + 0.1, dim=1)


class Changed:
    """An exact index whose hits a function changes."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        self.change = change

    def search(self, vectors: Tensor, k: int) -> Any:
        top = (vectors @ VECTORS.T).topk(k)
        return self.change(1 - top.values, top.indices)


def fitted(change: Callable[[Tensor, Tensor], Any]) -> cc.Retriever:
    labels = torch.arange(N) % 3
    retriever = cc.Retriever(None, wrong_answers=None, false_matches=None, false_alarms=0.1, index=Changed(change))
    return retriever.fit(gallery=(VECTORS, labels), held_out=(HELD, labels))


def first(value: Tensor, number: float) -> Tensor:
    out = value.clone()
    out[0, 0] = number
    return out


def test_arrays_and_tensors_of_any_kind_of_number_are_taken() -> None:
    wanted = fitted(lambda d, i: (d, i))(HELD)
    for change in (
        lambda d, i: (d.numpy(), i.numpy()),
        lambda d, i: (d.double(), i.int()),
        lambda d, i: (d.numpy().astype(np.float64), i.numpy().astype(np.uint64)),
    ):
        found = fitted(change)(HELD)
        np.testing.assert_array_equal(found.neighbour, wanted.neighbour)
        np.testing.assert_array_equal(found.decision, wanted.decision)


@each(
    "change, kind, message",
    [
        (
            lambda *found: found[0],
            cc.InputTypeError,
            r"index: expected a pair \(distances, identifiers\).*got a Tensor",
        ),
        (lambda d, i: (d, i, i), cc.InputTypeError, "index: expected a pair"),
        (lambda d, i: (d[:, 1:], i), cc.InputError, r"index: expected distances of shape \(60, 20\), got \(60, 19\)"),
        (lambda d, i: (d, i[1:]), cc.InputError, r"index: expected identifiers of shape \(60, 20\), got \(59, 20\)"),
        (lambda d, i: (d, i.double()), cc.InputTypeError, "index: expected identifiers that are integers, got float64"),
        (lambda d, i: (d, i.numpy().astype(str)), cc.InputTypeError, "index: expected identifiers that are integers"),
        (lambda d, i: (d.numpy().astype(str), i), cc.InputTypeError, "index: expected distances that are numbers"),
        (lambda d, i: (first(d, torch.nan), i), cc.InputError, "index: expected distances to the points.*nan with"),
        (lambda d, i: (50 * d, i), cc.InputError, r"index: expected distances to the points.*la\(x\)\.mu"),
        (lambda d, i: (1 - d, i), cc.InputError, "index: expected distances to the points.*1 - cosine"),
        # As of a flat index that numbers its points again after a removal, and of one with numbers of its own.
        (lambda d, i: (d, i - (i > 40).long()), cc.InputError, "index: expected.*(once a query|IndexIDMap)"),
        (lambda d, i: (d, (i + 1) % N), cc.InputError, "index: expected distances to the points.*IndexIDMap"),
        (lambda d, i: (d, first(i, int(i[0, 1]))), cc.InputError, "index: expected each identifier once a query"),
        (lambda d, i: (d, i + 1000), cc.InputError, "index: expected identifiers of the gallery.*such as 1"),
    ],
)
def test_hits_refused(change: Callable[[Tensor, Tensor], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fitted(change)


def test_a_hit_that_is_missing_is_a_hit_less() -> None:
    # An approximate index looks at a part of the points; the rest of the hits are -1, at any distance.
    def part(distances: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        missing = torch.arange(ids.shape[1]) >= 3
        return distances.masked_fill(missing, 3.4e38), ids.masked_fill(missing, -1)

    found, wanted = fitted(part)(HELD), fitted(lambda d, i: (d, i))(HELD)
    np.testing.assert_array_equal(found.neighbour, wanted.neighbour)
    none = fitted(lambda d, i: (d * torch.nan, torch.full_like(i, -1)))(HELD)
    assert (none.confidence < wanted.confidence).mean() > 0.9


def test_cosines_are_those_of_the_stored_points() -> None:
    def rounded(distances: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return distances.mul(400).round().div(400), ids

    found, wanted = fitted(rounded)(HELD), fitted(lambda d, i: (d, i))(HELD)
    np.testing.assert_array_equal(found.neighbour, wanted.neighbour)
    np.testing.assert_allclose(found.confidence, wanted.confidence)

"""The one codec: what comes back is what went in, and nothing else than known classes is made."""

import io
import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contrastive_curvature.codec import NOT_SAVED, TensorTable, check_seal, from_tree, packed, sealed, to_tree, unpacked
from contrastive_curvature.errors import InputError, UnsupportedError


@dataclass(frozen=True, eq=False)
class Inner:
    sums: list[list[Tensor]]
    names: dict[int, tuple[str, float]]


@dataclass(frozen=True, eq=False)
class Outer:
    inner: Inner | None
    number: float = 0.5
    sample: Any = field(default=None, metadata=NOT_SAVED)


def value() -> Outer:
    rows = torch.arange(6.0).view(3, 2)
    return Outer(Inner([[rows, rows[1]]], {3: ("a", 1.0)}), 2.0, sample=object())


def test_dataclasses_come_back_from_torch_and_from_json() -> None:
    tree, table, file = to_tree(value()), TensorTable(), io.BytesIO()
    plain = packed(tree, table, "x")
    assert [tensor.shape for tensor in table.tensors.values()] == [(3, 2), (2,)]
    torch.save(tree, file)
    # A view does not bring the rest of its memory along.
    assert tree["inner"]["sums"][0][1].untyped_storage().nbytes() == 8
    file.seek(0)
    for again in (torch.load(file, weights_only=True), unpacked(plain, table.tensors)):
        found = from_tree("x", again, (Outer, Inner))
        assert (found.number, found.sample, found.inner.names) == (2.0, None, {3: ("a", 1.0)})
        for one, other in zip(found.inner.sums[0], value().inner.sums[0], strict=True):
            assert torch.equal(one, other)


class Row(NamedTuple):
    at: np.ndarray
    limit: float


def test_named_tuples_and_arrays_come_back() -> None:
    table = TensorTable()
    plain = packed(to_tree([Row(np.arange(3), -math.inf)]), table, "x")
    (row,) = from_tree("x", unpacked(json.loads(json.dumps(plain, allow_nan=False)), table.tensors), (Row,))
    assert (type(row), row.at.tolist(), row.at.dtype, row.limit) == (Row, [0, 1, 2], np.int64, -math.inf)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(
    st.recursive(
        PLAIN | st.just(torch.tensor([[1.0, -0.0]])),
        lambda part: st.lists(part) | st.tuples(part, part) | st.dictionaries(st.from_regex("[a-z_]+"), part),
        max_leaves=12,
    )
)
def test_any_tree_comes_back(value: Any) -> None:
    table = TensorTable()
    plain = json.loads(json.dumps(packed(value, table, "state"), allow_nan=False))
    # repr tells types and signed zeros apart.
    assert repr(unpacked(plain, table.tensors)) == repr(value)


def test_other_classes_and_fields_are_refused() -> None:
    tree = to_tree(value())
    for wrong, known, words in (
        (tree, [Outer], "x: expected one of Outer, got Inner"),
        ({"$class": ["Outer"]}, [Outer], "one of Outer"),
        ({**tree, "more": 1}, [Outer, Inner], "x: expected the fields of Outer, got others .*more"),
    ):
        with pytest.raises(InputError, match=words):
            from_tree("x", wrong, known)
    with pytest.raises(UnsupportedError, match=r"x\.a\.1: a function cannot be saved"):
        packed({"a": [1, value]}, TensorTable(), "x")


def test_a_seal_sees_every_change_of_its_entries() -> None:
    state = sealed({"a": torch.ones(2), "b": None, "data": 1}, ("a", "b"))
    check_seal({**state, "data": 2}, ("a", "b"))
    whole = sealed({"a": torch.ones(2), "b": None})
    check_seal(dict(reversed(whole.items())))
    for wrong, words in (
        ({**whole, "a": torch.ones(2).double()}, "damaged"),
        ({**whole, "a": torch.tensor([1.0, 2.0])}, "damaged"),
        ({**whole, "c": 1}, "damaged"),
        ({"a": whole["a"], "b": None}, "an earlier version"),
        (3, "a int"),
    ):
        with pytest.raises(InputError, match=f"state_dict.*{words}"):
            check_seal(wrong)

"""Checkpoint files: whole or absent, plain content only, and nothing in a file is ever run."""

from __future__ import annotations

import pickle
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.online import checkpoint, load_checkpoint, save_checkpoint

CONTENT: dict[str, Any] = {"weight": torch.arange(2000.0), "steps": 3, "python": random.getstate()}

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(torch.tensor),
)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@given(content=st.dictionaries(st.text(), plain, max_size=3))
def test_what_is_saved_comes_back(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pt"
    save_checkpoint(path, content)
    assert equal(load_checkpoint(path), content)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_to_the_device_that_is_asked_for(device: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", {"weight": torch.ones(2, device=device)})
    assert load_checkpoint(str(tmp_path / "a"), device)["weight"].device.type == device
    assert load_checkpoint(tmp_path / "a")["weight"].device.type == "cpu"


def test_what_optimisers_and_schedulers_keep_is_plain(tmp_path: Path) -> None:
    content: dict[str, Any] = {"ordered": OrderedDict(a=torch.ones(2)), "milestones": Counter({3: 1})}
    content |= {"size": torch.Size([2]), "state": nn.Linear(2, 1).state_dict()}
    save_checkpoint(tmp_path / "a", content)
    assert equal(load_checkpoint(tmp_path / "a"), content)


@given(data=st.data())
def test_a_damaged_file_is_refused_or_unharmed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    save_checkpoint(path, CONTENT)
    raw = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(("cut", "flip", "noise")))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "flip":
        # In the last 1,500 bytes is the directory of the archive, where torch looks its entries up.
        first = data.draw(st.sampled_from((0, len(raw) - 1500)))
        for place in data.draw(st.lists(st.integers(first, len(raw) - 1), min_size=1, max_size=6)):
            raw[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = bytearray(data.draw(st.binary(max_size=200)))
    path.write_bytes(bytes(raw))
    try:
        # Bits that pad the archive, or name its dates, hold nothing.
        assert equal(load_checkpoint(path), CONTENT)
    except cc.InputError as error:
        assert str(path) in str(error)  # noqa: PT017  refused or the same: both are right


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(cc.InputError, match="a checkpoint of version 3, got no such file"):
        load_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(cc.InputError, match=r"cannot be read.*Remove it to start anew"):
        load_checkpoint(path)
    for other in ({"weight": torch.ones(2)}, [1, 2], torch.ones(2)):
        torch.save(other, path)
        with pytest.raises(cc.InputError, match="another program's file"):
            load_checkpoint(path)
    for version in ({"version": 1}, {"version": 2}, {"version": 4}):
        torch.save({"format": checkpoint.FORMAT, "content": {}, **version}, path)
        with pytest.raises(cc.InputError, match=r"got version (1|2|4).*release of contrastive_curvature"):
            load_checkpoint(path)


class Harm:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "a", tmp_path / "trace"
    content = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "content": {"x": Harm(trace)}}
    torch.save(content, path)
    with pytest.raises(cc.InputError, match=r"more than tensors, numbers and strings.*would run code"):
        load_checkpoint(path)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    with pytest.raises(cc.InputError, match="cannot be read"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(cc.InputError, match="cannot be read"):
        load_checkpoint(path)
    assert not trace.exists()
    # The harm is a real one.
    pickle.loads(pickle.dumps(content))
    assert trace.exists()

"""Checkpoint files: whole or absent, plain content only, and nothing in a file is ever run."""

from __future__ import annotations

import errno
import os
import pickle
import random
import resource
import stat
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


def test_what_optimisers_and_devices_keep_is_plain(tmp_path: Path) -> None:
    content: dict[str, Any] = {"ordered": OrderedDict(a=torch.ones(2)), "milestones": Counter({3: 1})}
    content |= {"size": torch.Size([2]), "state": nn.Linear(2, 1).state_dict()}
    save_checkpoint(tmp_path / "a", content)
    assert equal(load_checkpoint(tmp_path / "a"), content)
    for device in DEVICES:
        save_checkpoint(tmp_path / "a", {"weight": torch.ones(2, device=device)})
        assert load_checkpoint(str(tmp_path / "a"), device)["weight"].device.type == device
        assert load_checkpoint(tmp_path / "a")["weight"].device.type == "cpu"


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
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(cc.InputError, match="another program's file"):
        load_checkpoint(path)
    for version in ({"version": 2}, {"version": 4}):
        torch.save({"format": checkpoint.FORMAT, "content": {}, **version}, path)
        with pytest.raises(cc.InputError, match=r"got version (2|4).*release of contrastive_curvature"):
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


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, {"step": 1})

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for where, name in ((os, "replace"), (os, "fsync"), (torch, "save")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, crash)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(path, {"weight": torch.zeros(1)})
        assert load_checkpoint(path) == {"step": 1}
        assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_is_full_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The system's own reason reaches the user, where torch's writer hides it; and the old file stays."""
    path = tmp_path / "a"
    save_checkpoint(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            save_checkpoint(path, {"step": 2, "weight": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_stays_a_link_and_the_file_has_the_mode_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "run.pt"
    link.symlink_to(Path("far") / "real.pt")  # a target that is not there yet
    before = os.umask(0o077)
    try:
        save_checkpoint(link, {"step": 1})
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert stat.S_IMODE((tmp_path / "far" / "real.pt").stat().st_mode) == 0o600
    with pytest.raises(cc.InputError, match=r"a file in a folder that exists, got no folder .*nowhere"):
        save_checkpoint(tmp_path / "nowhere" / "a", {})

"""A process group of one process: where its tensors are, and what an exchange does when something fails."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices import DEVICES
from torch import distributed

import contrastive_curvature as cc
from contrastive_curvature.fit import exchange
from contrastive_curvature.fit.exchange import ProcessGroup, check_agreed, present_exchange

BACKENDS = [(device, backend) for device in DEVICES for backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl")]
pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.parametrize(
        ("device", "backend"), [pair for pair in BACKENDS if pair[0] == "cuda" or pair[1] == "gloo"]
    ),
]


@pytest.fixture
def alone(backend: str, tmp_path: Path) -> Iterator[ProcessGroup]:
    distributed.init_process_group(backend, f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield ProcessGroup()
    finally:
        distributed.destroy_process_group()


def test_what_is_exchanged_arrives(alone: ProcessGroup, device: str, backend: str) -> None:
    del device, backend
    for content in (b"", b"\0", bytes(range(256)) * 1000, {"a": 3}):
        assert alone.merge(content, operator.add) == content
        assert alone.gather(content) == [content]
    check_agreed(alone, {"options": "these"})


def test_what_is_merged_comes_in_the_order_of_the_ranks(
    alone: ProcessGroup, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device, backend
    alone.rank, alone.count = 1, 3

    def received(box: list[Any], source: int) -> None:
        assert (box[0] is None) is (source != 1)
        box[0] = "abc"[source]

    monkeypatch.setattr(distributed, "broadcast_object_list", received)
    monkeypatch.setattr(alone, "_gathered", lambda _: [])
    assert alone.merge("b", operator.add) == "abc"


def test_a_fit_inside_has_the_same_exchange(alone: ProcessGroup, device: str, backend: str) -> None:
    del device, backend
    with alone.together():
        assert present_exchange() is alone
        with present_exchange().together():
            assert alone.gather("mine") == ["mine"]
        assert alone._inside
    assert present_exchange() is not alone
    assert not alone._inside


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, cc.InputError])
def test_own_errors_are_raised_as_they_are(
    alone: ProcessGroup, error: Any, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device, backend

    def fails(*_: str) -> str:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "broadcast_object_list", lambda *_: None)
        patch.setattr(alone, "_gathered", lambda _: [])
        patch.setattr(alone, "count", 2)
        with pytest.raises(error):
            alone.merge("mine", fails)
    with pytest.raises(error), alone.together():
        fails()
    assert alone.gather("mine") == ["mine"]


def test_waiting_is_said_once(
    alone: ProcessGroup, device: str, backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device, backend
    monkeypatch.setattr(exchange, "_WAIT_QUIETLY", 0.01)
    with caplog.at_level(logging.INFO, logger="contrastive_curvature"):
        alone._wait(time.sleep, 0.5)
    assert [record.message for record in caplog.records] == [
        "process 0 of 1 waits for the others: each of them has to fit"
    ]


def test_a_group_that_is_lost_is_told_nothing(
    alone: ProcessGroup, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device, backend
    calls: list[str] = []

    def gone(*_: Any) -> None:
        calls.append("all_gather")
        msg = "Connection closed by peer\nand where"
        raise RuntimeError(msg)

    monkeypatch.setattr(distributed, "all_gather_object", gone)
    wanted = (
        r"process 0 of 1 lost the others during a fit: .*timeout of init_process_group \(Connection closed by peer\)"
    )
    with pytest.raises(cc.ProcessError, match=wanted), alone.together():
        alone.gather("mine")
    assert calls == ["all_gather"]
    with pytest.raises(ZeroDivisionError) as raised, alone.together():
        raise ZeroDivisionError
    assert "lost the others" in raised.value.__notes__[0]


def test_facts_that_differ_are_named(
    alone: ProcessGroup, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device, backend
    monkeypatch.setattr(alone, "count", 2)
    other = {"loss": "that", "more": "x"}
    monkeypatch.setattr(alone, "gather", lambda mine: [mine, other])
    wanted = "loss: expected the same in all 2 processes, got this in process 0, that in process 1"
    with pytest.raises(cc.InputError, match=wanted):
        check_agreed(alone, {"loss": "this", "more": "x"})
    with pytest.raises(cc.InputError, match=r"more: .* got None in process 0, x in process 1"):
        check_agreed(alone, {"loss": "that"})
    check_agreed(alone, {"loss": "that", "more": "x"})

"""Ray is stopped where it was started for a job, and left alone where it was running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from devices import DEVICES

from contrastive_curvature.jobs import ray_parts

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Module:
    """What is used of Ray."""

    def __init__(self, running: bool) -> None:
        self.running, self.calls = running, []

    def is_initialized(self) -> bool:
        return self.running

    def init(self) -> None:
        self.running = True
        self.calls.append("init")

    def shutdown(self) -> None:
        self.running = False
        self.calls.append("shutdown")


def runtime(monkeypatch: pytest.MonkeyPatch, running: bool) -> tuple[Any, Module]:
    module = Module(running)
    monkeypatch.setattr(ray_parts, "ray_data", lambda: (module, SimpleNamespace()))
    return ray_parts.Ray(), module


def test_what_was_started_is_stopped(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    found, module = runtime(monkeypatch, running=False)

    def interrupted() -> None:
        with found:
            assert found.start() is module
            found.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert module.calls == ["init", "shutdown"]


def test_what_was_running_goes_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    found, module = runtime(monkeypatch, running=True)
    with found:
        found.start()
    assert module.calls == []


def test_without_work_nothing_is_started(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    found, module = runtime(monkeypatch, running=False)
    with found:
        pass
    assert module.calls == []

"""Ray is stopped where it was started for a job, and left alone where it was running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from devices import DEVICES

import contrastive_curvature as cc
from contrastive_curvature.io.jobs import ray_runtime
from contrastive_curvature.io.jobs.ray_runtime import Resources

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

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def shutdown(self) -> None:
        self.running = False
        self.calls.append("shutdown")


def runtime(monkeypatch: pytest.MonkeyPatch, running: bool) -> tuple[Any, Module]:
    module = Module(running)
    monkeypatch.setattr(ray_runtime, "ray_data", lambda: (module, SimpleNamespace()))
    return ray_runtime.Ray(), module


def test_what_was_started_is_stopped(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    found, module = runtime(monkeypatch, running=False)

    def interrupted() -> None:
        with found:
            assert found.start(Resources()) is module
            found.start(Resources())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert module.calls == ["init", "shutdown"]


def test_what_was_running_goes_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    found, module = runtime(monkeypatch, running=True)
    with found:
        found.start(Resources())
    assert module.calls == []


def test_without_work_nothing_is_started(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    found, module = runtime(monkeypatch, running=False)
    with found:
        pass
    assert module.calls == []


@pytest.mark.parametrize("resources", [Resources(num_gpus=1), Resources(num_cpus=5), Resources(num_gpus=0.5)])
def test_what_this_machine_does_not_have_is_refused(
    resources: Resources, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del device
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found, module = runtime(monkeypatch, running=False)

    def start() -> None:
        with found:
            found.start(resources)

    with pytest.raises(cc.InputError, match="at most what Ray has, 4 cores and 0 GPUs"):
        start()
    assert module.calls == ["init", "shutdown"]
    # A cluster may grow: Ray waits, and the log says so.
    found, module = runtime(monkeypatch, running=True)
    start()
    assert "Ray waits until the cluster has grown" in caplog.text
    found, module = runtime(monkeypatch, running=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    start()

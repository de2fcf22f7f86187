"""Ray is stopped where it was started for a job, and left alone where it was running."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from devices import DEVICES

import contrastive_curvature as cc
from contrastive_curvature.io.jobs import on_ray

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Module:
    """What is used of Ray until processes start."""

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


def calls(monkeypatch: pytest.MonkeyPatch, running: bool, parts: list[int], **resources: float) -> list[str]:
    """What a job does with Ray, which has no processes here."""
    module = Module(running)
    monkeypatch.setattr(on_ray, "need", lambda *_: module)
    options: dict[str, Any] = {"workers": None, "num_cpus": 1, "num_gpus": 0, "max_retries": 3, "progress_bar": False}
    # The module has no processes.
    with suppress(AttributeError), on_ray._Processes(None, **(options | resources)) as processes:  # type: ignore[arg-type]
        processes.run(print, parts, "embeddings")
    return module.calls


def test_what_was_started_is_stopped_and_what_was_running_goes_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert calls(monkeypatch, running=False, parts=[0]) == ["init", "shutdown"]
    assert calls(monkeypatch, running=True, parts=[0]) == []
    assert calls(monkeypatch, running=False, parts=[]) == []


@pytest.mark.parametrize("resources", [{"num_gpus": 1}, {"num_cpus": 5}, {"num_gpus": 0.5}])
def test_what_this_machine_does_not_have_is_refused(
    resources: dict[str, float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(cc.InputError, match="at most what Ray has, 4 cores and 0 GPUs"):
        calls(monkeypatch, running=False, parts=[0], **resources)
    # A cluster may grow: Ray waits, and says so.
    assert calls(monkeypatch, running=True, parts=[0], **resources) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert calls(monkeypatch, running=False, parts=[0], **resources) == ["init", "shutdown"]

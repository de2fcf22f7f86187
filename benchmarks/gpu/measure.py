"""Time and memory of calls on any device: a GPU works on after a call has returned, and has memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import machine

__all__ = ["count_flop", "describe", "finished", "measure_peak", "measure_time", "wait"]

_T = TypeVar("_T")
_MIB = 2**20


def wait(device: torch.device | str) -> None:
    """Until the device has done what it was given; a CPU has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def finished(function: Callable[[], _T], device: torch.device | str) -> Callable[[], _T]:
    """The same call, which returns when the device has done its work."""
    if torch.device(device).type != "cuda":
        return function

    def call() -> _T:
        out = function()
        torch.cuda.synchronize(device)
        return out

    return call


def describe(device: torch.device | str) -> dict[str, Any]:
    """The machine as :func:`benchmarks.machine.describe` has it; with an accelerator, its name and CUDA's version."""
    about: dict[str, Any] = machine.describe()
    if torch.device(device).type == "cuda":
        about["accelerator"] = torch.cuda.get_device_name(device)
        about["cuda"] = torch.version.cuda
    return about


def measure_time(function: Callable[[], object], repetitions: int, device: torch.device | str) -> dict[str, float]:
    """As :func:`benchmarks.machine.measure_time`; on a GPU by the clock alone, which stands for the processor too.

    What the processor takes to start kernels says nothing about a GPU's work.
    """
    wait(device)
    times = machine.measure_time(finished(function, device), repetitions)
    return times if torch.device(device).type != "cuda" else {**times, "cpu_seconds": times["seconds"]}


def measure_peak(function: Callable[[], _T], device: torch.device | str) -> tuple[_T, float]:
    """As :func:`benchmarks.machine.measure_peak`; on a GPU the MiB of its memory, exactly."""
    if torch.device(device).type != "cuda":
        return machine.measure_peak(function)
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = function()
    wait(device)
    return out, (torch.cuda.max_memory_allocated(device) - before) / _MIB


def count_flop(function: Callable[[], object]) -> int | None:
    """Floating-point operations of matrix products and convolutions in one call; ``None`` where torch cannot count."""
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            function()
    except Exception:  # a mode that sees every operation meets transforms that forbid modes, each with its own error
        return None
    return int(counter.get_total_flops())

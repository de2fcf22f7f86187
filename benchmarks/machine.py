"""What a benchmark ran on, and how its time and memory are taken."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = [
    "describe",
    "mean_and_deviation",
    "measure_peak",
    "measure_time",
    "run_apart",
    "write_atomically",
    "write_results",
]

_T = TypeVar("_T")


def describe() -> dict[str, str | int | float]:
    """The machine, its software, how busy it was at the start, and the date."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def mean_and_deviation(values: list[float]) -> str:
    """Of several seeds; of one seed only its value."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def write_results(folder: Path, name: str, result: dict[str, Any], text: str) -> None:
    """Write a measurement as ``NAME.json`` and ``NAME.md`` into a folder, which is made if need be, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it, and an interrupted write leaves the old one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp gives a file that nobody else may read; results are no secret.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def run_apart(module: str, case: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run a case in a process of its own, so that no memory of another one is counted or reused."""
    command = [sys.executable, "-W", "ignore", "-m", module, "--case", json.dumps(case)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **environment, "PYTHONPATH": path}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


def measure_time(function: Callable[[], object], repetitions: int) -> dict[str, float]:
    """Seconds of a call, the fastest of several: by the clock, and of processor time.

    On a busy machine the clock is unfair to long calls, since only a short one can slip between other people's jobs;
    processor time leaves out the waiting (in threads too, with ``OMP_WAIT_POLICY=PASSIVE``).
    """
    wall, cpu = [], []
    for _ in range(repetitions):
        start, used = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return {"seconds": min(wall), "median_seconds": statistics.median(wall), "cpu_seconds": min(cpu)}


def measure_peak(function: Callable[[], _T]) -> tuple[_T, float]:
    """Run once; MiB of resident memory at its highest, above what was resident before (the inputs among it).

    Linux lets a process reset its high-water mark. Where it cannot be reset, a call that stays below an earlier peak
    counts as zero: measure the small ones first, in a fresh process.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak_mib()
    out = function()
    return out, _peak_mib() - before


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

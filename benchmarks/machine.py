"""What every benchmark shares: its command line, what it ran on, time and memory of calls, and its result files.

A benchmark says what is measured on what, runs its cases (each in a process of its own, so that no memory of another
one is counted or reused), prints a table, and writes it as ``NAME.md`` beside the figures in ``NAME.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from contrastive_curvature.artifact import write_whole

RESULTS = Path(__file__).parent / "results"

Case = dict[str, Any]
_T = TypeVar("_T")
_MIB = 2**20


def options(description: str | None, folder: Path = RESULTS) -> argparse.ArgumentParser:
    """A command line with ``--out`` and ``--device``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where torch computes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=folder, help="folder of the results (default: %(default)s)")
    return parser


def measure_cases(
    name: str,
    description: str | None,
    make_cases: Callable[[argparse.Namespace], Iterable[Case]],
    measure: Callable[[Case], Case],
    render: Callable[[Case], str],
    arguments: Sequence[str] | None = None,
    add: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> Case:
    """Run a script that has cases: read its command line, measure every case, write the results.

    Args:
        name: Of the script and of its result files.
        description: Of its command line.
        make_cases: The cases, from the options; ``threads`` of a case is the number of torch's threads.
        measure: Figures of one case.
        render: The results as Markdown.
        arguments: Of the command line.
        add: Adds the script's own options.
    """
    parser = options(description)
    parser.add_argument("--quick", action="store_true", help="small sizes, in this process; the figures mean nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    add(parser)
    given = parser.parse_args(arguments)
    if given.case:
        case = json.loads(given.case)
        torch.set_num_threads(case.get("threads", torch.get_num_threads()))
        print(json.dumps(measure(case)))
        return case
    results: Case = {"machine": describe(given.device), "quick": given.quick, "cases": []}
    for case in make_cases(given):
        print("...", *(value for value in case.values() if isinstance(value, str)), file=sys.stderr)
        found = measure(case) if given.quick else run_apart(f"benchmarks.{name}", case)
        results["cases"].append({**case, **found})
        write_results(given.out, name, results, render(results), show=False)
    print(render(results))
    return results


def run_apart(module: str, case: Case, **environment: str) -> Case:
    """Run a case in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", module, "--case", json.dumps(case)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    # Threads that wait must not count as work.
    variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment, "PYTHONPATH": path}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    out: Case = json.loads(done.stdout.splitlines()[-1])
    return out


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine, its software, how busy it was at the start, and the date."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    about: dict[str, Any] = {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if torch.device(device).type == "cuda":
        about |= {"accelerator": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return about


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in words, for a sentence."""
    place = machine.get("accelerator", f"{machine['cores']} cores of {machine['cpu']}")
    return f"{place}, torch {machine['torch']}, {machine['date']}, load {machine['load']} at the start"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, without a line break at its end."""
    first, *others = ("| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def write_results(folder: Path, name: str, result: Case, text: str, show: bool = True) -> None:
    """Write ``NAME.json`` and ``NAME.md`` into a folder, which is made if need be, and print the latter."""
    write_atomically(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_atomically(folder / f"{name}.md", text)
    if show:
        print(text)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text.encode()))


def finished(function: Callable[[], _T], device: torch.device | str) -> Callable[[], _T]:
    """The same call, which returns when the device has done its work: a GPU works on after a call has returned."""
    if torch.device(device).type != "cuda":
        return function

    def call() -> _T:
        out = function()
        torch.cuda.synchronize(device)
        return out

    return call


def measure_time(
    function: Callable[[], object], repetitions: int, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Seconds of a call, the fastest of several: by the clock, and of processor time.

    On a busy machine the clock is unfair to long calls, since only a short one can slip between other people's jobs;
    processor time leaves out the waiting. On a GPU the clock stands for both: what the processor takes to start kernels
    says nothing about a GPU's work.
    """
    call = finished(function, device)
    wall, cpu = [], []
    for _ in range(repetitions):
        start, used = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    fastest = min(cpu) if torch.device(device).type != "cuda" else min(wall)
    return {"seconds": min(wall), "median_seconds": statistics.median(wall), "cpu_seconds": fastest}


def take_turns(
    functions: dict[str, Callable[[], object]],
    rounds: int,
    enough: float = float("inf"),
    at_least: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call; the functions alternate, so that a busy moment of the machine strikes all of them.

    Args:
        functions: By name.
        rounds: Calls of each.
        enough: Seconds after which a slow one is not called again.
        at_least: Seconds for which the rounds go on, however many there are.
        clock: Tells the seconds: by the clock, or ``time.process_time``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    while rounds > 0 or time.perf_counter() - started < at_least:
        rounds -= 1
        for name, function in functions.items():
            if sum(seconds[name]) <= enough:
                start = clock()
                function()
                seconds[name].append(clock() - start)
    return seconds


def measure_peak(function: Callable[[], _T], device: torch.device | str = "cpu") -> tuple[_T, float]:
    """Run once; MiB of memory at its highest, above what was held before: resident memory, or that of the GPU.

    Linux lets a process reset its high-water mark. Where it cannot be reset, a call that stays below an earlier peak
    counts as zero: measure the small ones first, in a fresh process.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        out = finished(function, device)()
        return out, (torch.cuda.max_memory_allocated(device) - held) / _MIB
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak_mib()
    out = function()
    return out, _peak_mib() - before


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def watch_memory(function: Callable[[], _T], kind: str = "VmRSS") -> tuple[_T, float]:
    """Run once; MiB of memory at its highest above what there was before, looked at every 2 ms (Linux).

    The high-water mark of the process would not do where the import of torch reached a higher one. Freed memory that
    the allocator keeps is given back first (glibc), because it would not be counted when it is used again.

    Args:
        function: What to run.
        kind: Line of ``/proc/self/status``: resident memory, or ``"RssAnon"``, without pages of mapped files.
    """

    def now() -> float:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{kind}:")), 0.0)

    def look() -> None:
        while not over.wait(0.002):
            seen.append(now())

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    seen, over = [now()], threading.Event()
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        out = function()
        seen.append(now())
    finally:
        over.set()
        watcher.join()
    return out, max(seen) - seen[0]


def count_flop(function: Callable[[], object]) -> int | None:
    """Floating-point operations of matrix products and convolutions in one call; ``None`` where torch cannot count."""
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            function()
    except Exception:  # a mode that sees every operation meets transforms that forbid modes, each with its own error
        return None
    return int(counter.get_total_flops())

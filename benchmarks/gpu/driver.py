"""What is run on a GPU: one part after another, each in a process with a time limit, and an account."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import table, write_results

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"
LEAST_SECONDS = 20.0
"""A part is not begun with less time than this."""
GRACE_SECONDS = 40.0
"""What a part that is asked to end has for writing what it knows, before it is killed."""
_SHOWN_LINES = 15
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Of tests, whose processes share the cores."""
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", "--tb=short", "-rfEs")
_ALONE = ("laplace", "fit", "hessian", "losses", "network", "hosts")
_SUITE = {
    "contract": ("tests/laplace/test_contract.py",),
    "tests_laplace": ("tests/laplace", "--deselect", "tests/laplace/test_contract.py"),
    "tests_curvature": tuple(f"tests/{name}" for name in _ALONE if name != "laplace"),
    "tests_rest": ("tests", *(f"--ignore=tests/{name}" for name in _ALONE)),
}
"""The whole suite, in pieces that can be run again one by one."""
_NEED = {"tests/docs": ("mkdocs", "mkdocstrings", "markdown_it")}
"""Folders of tests that are left out where an optional package is missing."""


class Part(NamedTuple):
    """One process.

    Args:
        name: In file names and on the command line.
        command: Arguments after the name of the interpreter, which is the driver's own.
        minutes: Its time limit.
        goes_on: Whether a part that ran into its limit goes on, when it is called again, from where it was stopped.
    """

    name: str
    command: tuple[str, ...]
    minutes: float = 5
    goes_on: bool = False


def parts_of(results: Path, work: Path, data: Path, rehearse: bool) -> list[Part]:
    """Everything, in under forty minutes on one H200; rehearsed on the CPU in about two: tiny sizes, a few tests."""
    on = ("--device", "cpu" if rehearse else "cuda", "--out", str(results))
    jobs = "1" if rehearse else str(max(1, min(14, (os.cpu_count() or 2) - 2)))
    quick = ("--quick",) if rehearse else ()
    lacking = [folder for folder, names in _NEED.items() if not all(find_spec(name) for name in names)]
    chosen = (*(f"--ignore={folder}" for folder in lacking), "-k", "cuda")
    shared = ("-n", jobs) if find_spec("xdist") else ()
    tests = [Part(name, (*_PYTEST, *what, *chosen, *shared), 6) for name, what in _SUITE.items()]
    sizes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ("--seeds", "0", "1", "2", "3", "4")
    if rehearse:
        tests = [Part("contract", (*_PYTEST, *_SUITE["contract"], "-k", "TestTorchFunc and float32"))]
        sizes = ("--points", "1000", "2000", "--structures", "diag")
        rows = ("--seeds", "0", "1", "--methods", "deterministic", "norm", "--")
        rows += ("--train-size", "60", "--test-size", "20", "--epochs", "1", "--n-samples", "2")
    images = () if rehearse else ("--data-root", str(data))
    table2 = ("--data-root", str(data), "--work", str(work / "table2"), "--jobs", jobs, *rows)
    return [
        Part("rates", ("-m", "benchmarks.gpu.rates", *on, *quick)),
        *tests,
        Part("curvature", ("-m", "benchmarks.curvature", *on, *images, *quick)),
        Part("backends", ("-m", "benchmarks.backends", *on, *quick)),
        Part("products", ("-m", "benchmarks.products", *on, *quick)),
        Part("scale", ("-m", "benchmarks.scale", *on, *sizes)),
        Part("steps", ("-m", "benchmarks.steps", *on, *quick)),
        Part("fractions", ("-m", "benchmarks.gpu.fractions", str(results))),
        Part("table2", ("-m", "benchmarks.gpu.table2", *on, *table2), 5 if rehearse else 20, goes_on=True),
    ]


def run_parts(
    parts: Sequence[Part],
    results: Path,
    logs: Path,
    machine: dict[str, Any],
    seconds: float,
    again: Sequence[str] = (),
) -> int:
    """Run what an earlier call has not finished.

    Args:
        parts: What to run, in this order.
        results: Folder of small files: those of the parts, and ``gpu.json`` and ``gpu.md``, the account.
        logs: Folder of the parts' output.
        machine: What the account says of the machine.
        seconds: For all of it.
        again: Parts to run though they are finished.

    Returns:
        Exit status: 0 when all parts are finished, 1 when one failed, 3 when time was over before all were done.
    """
    logs.mkdir(parents=True, exist_ok=True)
    earlier = results / "gpu.json"
    account = json.loads(earlier.read_text(encoding="utf-8"))["parts"] if earlier.is_file() else {}
    end = time.monotonic() + seconds
    for part in parts:
        if part.name not in again and account.get(part.name, {}).get("status") == FINISHED:
            print(f"{part.name}: finished earlier")
            continue
        left = end - time.monotonic()
        if left >= LEAST_SECONDS:
            account[part.name] = _run(part, left, logs / f"{part.name}.log")
        else:
            account[part.name] = {"status": UNFINISHED, "why": "not begun: no time was left", "seconds": 0.0}
        write_results(results, "gpu", {"machine": machine, "parts": account}, _render(machine, account), show=False)
        print(f"{part.name}: {account[part.name]['status']} {account[part.name]['why']}".rstrip())
    states = [account[part.name]["status"] for part in parts]
    if UNFINISHED in states:
        print("unfinished; the same command goes on")
    return 1 if FAILED in states else 3 if UNFINISHED in states else 0


def _run(part: Part, left: float, log: Path) -> dict[str, Any]:
    limit = min(60 * part.minutes, left)
    print(f"{part.name}: running, at most {limit / 60:.1f} minutes; its output is in {log}", flush=True)
    start = time.monotonic()
    status = run_limited([sys.executable, *part.command], limit, log)
    lines = [line[:300] for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]]
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if status == 0:
        # Of tests, the line with their number.
        why = lines[-1] if lines and "pytest" in part.command else ""
        return {**found, "status": FINISHED, "why": why}
    if status is None and (part.goes_on or limit < 60 * part.minutes):
        return {**found, "status": UNFINISHED, "why": f"stopped after {limit / 60:.1f} minutes"}
    why = f"exit status {status}" if status is not None else f"over its limit of {part.minutes:g} minutes"
    return {**found, "status": FAILED, "why": why, "last_lines": lines}


def run_limited(command: Sequence[str], seconds: float, log: Path) -> int | None:
    """Run a command with everything it starts, and end all of it when its time is over, as by Ctrl-C.

    Returns:
        Its exit status; ``None`` when its time was over.
    """
    with log.open("ab") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell starts what runs in the background with interruptions ignored, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**os.environ, **(_ONE_THREAD if "pytest" in command else {})},
        )
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, signal.SIGINT)
                child.wait(GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _render(machine: dict[str, Any], account: dict[str, dict[str, Any]]) -> str:
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    rows = [[name, entry["status"], f"{entry['seconds']:.0f}", entry["why"]] for name, entry in account.items()]
    parts = ["# What ran on the GPU", f"`python -m benchmarks.gpu`: {about}.", table(["part", "", "seconds", ""], rows)]
    for name, entry in account.items():
        if entry["status"] == FAILED:
            parts.append("\n".join([f"## {name}: the end of its output\n", "```text", *entry["last_lines"], "```"]))
    return "\n\n".join(parts) + "\n"

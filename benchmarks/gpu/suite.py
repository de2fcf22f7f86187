"""A piece of the test suite, summed up: ``python -m benchmarks.gpu.suite NAME --out FOLDER -- PYTEST-ARGUMENTS``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.machine import write_results

_MOST_LISTED = 60
_NOTHING_CHOSEN = 5
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests and write what came of them.

    Returns:
        Pytest's exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the result files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="processes, where pytest-xdist is installed")
    parser.add_argument("tests", nargs="+", help="arguments of pytest")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick"]
        command += [f"--junitxml={report}", "--tb=short", *given.tests]
        if given.jobs > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(given.jobs)]
        status = _call(command)
        found = read_report(report)
    found["command"] = " ".join(["pytest", *given.tests])
    found["status"] = status
    given.out.mkdir(parents=True, exist_ok=True)
    write_results(given.out, given.name, found, render(given.name, found))
    return status


def _call(command: list[str]) -> int:
    """Pytest ends its report when it is interrupted, and this process waits for that."""
    child = subprocess.Popen(command, env={**os.environ, **_ONE_THREAD})
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def read_report(path: Path) -> dict[str, Any]:
    """Counts, and the first line of every failure, from pytest's report; of nothing where there is none."""
    counts: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    reasons: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    for case in _cases(path):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        counts["passed" if outcome is None else outcome.tag] += 1
        slowest.append((float(case.get("time", 0)), name))
        if outcome is None:
            continue
        message = (outcome.get("message") or "").splitlines()
        line = message[0][:300] if message else ""
        if outcome.tag == "skipped":
            reasons[line] += 1
        else:
            failures.append({"test": name, "why": line})
    return {
        "counts": dict(counts),
        "skipped": dict(reasons),
        "failures": failures[:_MOST_LISTED],
        "slowest": [{"test": name, "seconds": seconds} for seconds, name in sorted(slowest, reverse=True)[:5]],
    }


def _cases(path: Path) -> list[ElementTree.Element]:
    try:
        return list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []


def render(name: str, found: dict[str, Any]) -> str:
    """The counts as Markdown."""
    counts = ", ".join(f"{number} {outcome}" for outcome, number in found["counts"].items()) or "no test ran"
    lines = [f"# {name}", "", f"`{found['command']}`: {counts}."]
    if found["status"] == _NOTHING_CHOSEN:
        lines.append("No test has such a name.")
    lines += ["", *(f"- {number} skipped: {why}" for why, number in found["skipped"].items())]
    lines += [f"- `{failure['test']}`: {failure['why']}" for failure in found["failures"]]
    lines += [f"- {slow['seconds']:.1f} s: `{slow['test']}`" for slow in found["slowest"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""What an import of the package costs beside one of laplace-torch, which it stands on.

Claim measured: ``import contrastive_curvature`` takes at most half a second longer than ``import laplace``. Both are
imported in fresh processes that take turns, with the files in the page cache; the least of several rounds counts, in
seconds of the clock and of the processor (the latter hardly moves when the machine is busy with something else).

Run: ``python -m benchmarks.import_time [--rounds 7] [--modules 10]``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

HOST, PACKAGE = "laplace", "contrastive_curvature"
LIMIT = 0.5
"""Seconds that the package may add to the import of its host."""

_SCRIPT = """
import json, time
clock, processor = time.perf_counter(), time.process_time()
import {module}
print(json.dumps([time.perf_counter() - clock, time.process_time() - processor]))
"""


def seconds_of(module: str) -> tuple[float, float]:
    """Seconds of one import in a process of its own: of the clock, and of the processor."""
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    clock, processor = json.loads(done.stdout.splitlines()[-1])
    return clock, processor


def slowest_modules(number: int) -> list[tuple[str, int]]:
    """Modules of the package with the most microseconds of their own, without those that they import."""
    command = [sys.executable, "-W", "ignore", "-X", "importtime", "-c", f"import {PACKAGE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = re.findall(rf"^import time:\s+(\d+) \|\s+\d+ \|\s+({PACKAGE}[\w.]*)$", done.stderr, re.MULTILINE)
    return sorted(((name, int(own)) for own, name in lines), key=lambda line: -line[1])[:number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="imports of each, after one that is not counted")
    parser.add_argument("--modules", type=int, default=10, help="how many of the slowest modules are listed")
    options = parser.parse_args()
    if options.rounds < 1 or options.modules < 0:
        parser.error("--rounds: expected 1 or more; --modules: 0 or more")
    taken: dict[str, list[tuple[float, float]]] = {HOST: [], PACKAGE: []}
    for turn in range(options.rounds + 1):
        for module, seconds in taken.items():
            one = seconds_of(module)
            if turn:
                seconds.append(one)
    for kind, name in enumerate(("clock", "processor")):
        host, ours = (min(one[kind] for one in taken[module]) for module in (HOST, PACKAGE))
        print(
            f"{name:9}  import {HOST} {host:.2f} s  import {PACKAGE} {ours:.2f} s  "
            f"difference {ours - host:.2f} s (at most {LIMIT})  ratio {ours / host:.2f}"
        )
    for module, own in slowest_modules(options.modules):
        print(f"{own / 1000:8.1f} ms  {module}")


if __name__ == "__main__":
    main()

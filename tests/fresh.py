"""Python in a process of its own, where nothing is imported yet."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["run"]

ROOT = Path(__file__).resolve().parent.parent


def run(script: str) -> tuple[Any, str]:
    """The JSON that a fresh process prints as its last line, and what stands before it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    before, _, last = done.stdout.rstrip("\n").rpartition("\n")
    return json.loads(last), before

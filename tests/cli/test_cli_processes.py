"""What only a real process shows: Ctrl-C in the middle of a fit, and a file that outgrows the limit of the system."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import points

SLOW = """
import time
from pathlib import Path
from torch import nn


class Slow(nn.Linear):
    def forward(self, x):
        if len(x) == 300:
            Path("started").touch()
            time.sleep(600)
        return super().forward(x)


def encoder():
    return Slow(12, 4)
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX systems")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "contrastive_curvature", *(str(each) for each in arguments)]


def environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def test_an_interrupted_fit_leaves_nothing(place: Path) -> None:
    Path("slow.py").write_text(SLOW)
    found = points(300, 2)
    np.savez("inputs.npz", inputs=found["features"], labels=found["labels"])
    before = sorted([*os.listdir(), "started"])
    fit = command("fit", "inputs.npz", "--out", "below/p", "--encoder", "slow:encoder", "--batch-size", 300)
    # A shell starts what runs in the background with interruptions ignored, and its children inherit that.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(fit, env=environment(), preexec_fn=hears, **pipes) as process:
        try:
            while not Path("started").exists():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert [line for line in err.splitlines() if line][-1] == "error: interrupted; no result was written"
    assert "Traceback" not in err
    assert sorted(os.listdir()) == before


def test_a_file_that_outgrows_the_limit(place: Path) -> None:
    np.savez("many.npz", features=points(3000, 6)["features"])
    Path("scores.csv").write_text("before")
    names = sorted(os.listdir())
    score = " ".join(command("score", "posterior", "many.npz", "--out", "scores.csv"))
    limited = subprocess.run(
        ["bash", "-c", f"ulimit -f 64; exec {score}"], env=environment(), capture_output=True, text=True, check=False
    )
    assert limited.returncode == 1, limited.stderr
    assert "a file is too large" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert (sorted(os.listdir()), Path("scores.csv").read_text()) == (names, "before")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_streams_that_the_shell_closed(place: Path, closed: str) -> None:
    score = " ".join(command("score", "posterior", "new.npz", "--out", "scores.csv"))
    done = subprocess.run(
        ["bash", "-c", f"{score} {closed}"], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert len(Path("scores.csv").read_text().splitlines()) == 41

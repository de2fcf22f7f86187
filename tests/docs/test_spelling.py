"""The spelling of pages, code and comments, by codespell's list of usual mistakes (``[tool.codespell]``)."""

import subprocess
import sys

from markdown_pages import ROOT


def test_no_usual_mistakes():
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml"), "."]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")

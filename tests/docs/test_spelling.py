"""The spelling of pages, code and comments, by codespell's list of usual mistakes (``[tool.codespell]``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from markdown_pages import ROOT


def codespell(*paths: str | Path) -> subprocess.CompletedProcess[str]:
    config = str(ROOT / "pyproject.toml")
    command = [sys.executable, "-m", "codespell_lib", "--toml", config, *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_no_usual_mistakes():
    found = codespell(".")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_mistakes_are_found(tmp_path):
    page = tmp_path / "page.md"
    mistakes = "neig" + "bour", "sep" + "erate"  # in parts, for the test above
    page.write_text("The {} is {}.\n".format(*mistakes), encoding="utf-8")
    found = codespell(page)
    assert found.returncode == 65  # codespell's: mistakes found
    assert all(mistake in found.stdout for mistake in mistakes)


def test_british_spelling_is_no_mistake(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Normalise the colour of the neighbour; a generalised centre.\n", encoding="utf-8")
    found = codespell(page)
    assert (found.returncode, found.stdout) == (0, "")

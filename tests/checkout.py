"""The files that belong to the checkout: those that git tracks, or would add."""

import subprocess
from pathlib import Path

import pytest

__all__ = ["files", "needed"]

ROOT = Path(__file__).resolve().parent.parent

needed = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked source archive has no list of its files")


def files(*folders: str) -> list[Path]:
    """The files below these folders, or all, without those that git ignores, such as caches of every kind."""
    command = ["git", "ls-files", "-coz", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if (ROOT / name).is_file()]

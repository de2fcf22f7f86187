"""What the scripts that judge feature files share: their options, the files, and the results that they keep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["chosen_files", "file_options", "results_of_others"]

_RESULTS = Path(__file__).parents[1] / "results"


def file_options(description: str | None) -> argparse.ArgumentParser:
    """A command line with ``--cache``, ``--only`` and ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("runs/transfer"), help="folder with the feature files")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="feature files (default: all of them); the results of others are kept"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS)
    return parser


def chosen_files(
    parser: argparse.ArgumentParser, given: argparse.Namespace, names: Sequence[str] | None = None
) -> list[Path]:
    """The feature files to judge, of those that are there; ends the program where there are none.

    Args:
        parser: Of :func:`file_options`.
        given: What it read.
        names: Without ``--only``; every file of the folder by default.
    """
    wanted = given.only or names or sorted(path.stem for path in given.cache.glob("*.npz"))
    paths = [path for path in (given.cache / f"{name}.npz" for name in wanted) if path.exists()]
    if not paths:
        parser.error(f"--cache: no such feature file in {given.cache}; python -m benchmarks.transfer makes them")
    return paths


def results_of_others(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """What an earlier run found for the encoders that ``--only`` leaves out; nothing without it."""
    before = given.out / f"{name}.json"
    if given.only is None or not before.exists():
        return {}
    found: dict[str, Any] = json.loads(before.read_text(encoding="utf-8"))["encoders"]
    return found

"""What the scripts that judge feature files share: their options, the files, and the results that they keep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, write_results
from benchmarks.transfer.feature_file import FeatureFile, load_features

__all__ = ["chosen_files", "file_options", "judge_files", "results_of_others"]

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
    """The feature files to judge; ends the program where there are none, or one of ``--only`` is missing.

    Args:
        parser: Of :func:`file_options`.
        given: What it read.
        names: Without ``--only``, those of them that are there; every file of the folder by default.
    """
    there = sorted(path.stem for path in given.cache.glob("*.npz"))
    if not there:
        parser.error(f"--cache: no feature file in {given.cache}; python -m benchmarks.transfer makes them")
    if given.only is not None:
        missing = [name for name in given.only if name not in there]
        if missing:
            parser.error(f"--only: no {', '.join(missing)} in {given.cache}; there are {', '.join(there)}")
        chosen = list(dict.fromkeys(given.only))
    else:
        chosen = [name for name in (there if names is None else names) if name in there]
        if not chosen:
            parser.error(f"--cache: none of {', '.join(names or ())} in {given.cache}; there are {', '.join(there)}")
    return [given.cache / f"{name}.npz" for name in chosen]


def judge_files(
    description: str | None,
    name: str,
    judge: Callable[[FeatureFile], Mapping[str, Any]],
    render: Callable[[Mapping[str, Any], Mapping[str, Any]], str],
    settings: Mapping[str, Any],
) -> None:
    """The whole of a script that judges every feature file apart, and keeps what it has after each of them.

    Args:
        description: Of the command line.
        name: Of the files that are written.
        judge: Figures of one feature file.
        render: Markdown, from the figures of every encoder and the machine.
        settings: What the figures depend on, for the JSON.
    """
    parser = file_options(description)
    given = parser.parse_args()
    machine, paths = describe(), chosen_files(parser, given)
    results = results_of_others(given, name)
    for path in paths:
        results[path.stem] = judge(load_features(path))
        results = dict(sorted(results.items()))
        write_results(given.out, name, {"machine": machine, **settings, "encoders": results}, render(results, machine))


def results_of_others(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """What an earlier run found for the encoders that ``--only`` leaves out; nothing without it."""
    before = given.out / f"{name}.json"
    if given.only is None or not before.exists():
        return {}
    found: dict[str, Any] = json.loads(before.read_text(encoding="utf-8"))["encoders"]
    return found

"""Command line of the table over encoders."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contrastive_curvature.errors import ContrastiveCurvatureError

if TYPE_CHECKING:
    from benchmarks.transfer.recipes.recipe import Recipe

_FOLDERS = {"data_root": "data", "cache": "runs/transfer", "output": "benchmarks/results"}


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing of the table, or judge one feature file.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0; 1 when an encoder that was named with ``--only`` was left out; 2 when something was refused.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    _check(parser, given)
    try:
        return _judge_file(given) if given.features is not None else _run_recipes(parser, given)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; start again with the same options to go on", file=sys.stderr)
        return 130


def _judge_file(given: argparse.Namespace) -> int:
    from benchmarks.transfer.run import judge_features, write_table

    name = given.name or given.features.stem
    output = given.output or Path(_FOLDERS["cache"])
    result = judge_features(given.features, name, name, output, again=given.again)
    print(write_table(output, result))
    print(f"{output / name}.json, {name}.md; plots and scores in {name}/")
    return 0


def _run_recipes(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    from benchmarks.transfer.recipes import RECIPES

    if given.list:
        print("\n".join(f"{recipe.name}: {recipe.title}" for recipe in RECIPES.values()))
        return 0
    strange = [name for name in given.only or () if name not in RECIPES]
    if strange:
        parser.error(f"--only: no encoder is named {', '.join(strange)}; --list shows all")
    chosen: list[Recipe] = [RECIPES[name] for name in given.only or RECIPES]
    from benchmarks.transfer.run import RESULTS, run_recipes

    folders = {name: getattr(given, name) or Path(default) for name, default in _FOLDERS.items()}
    left_out = run_recipes(chosen, **folders, seed=given.seed or 0, again=given.again)
    print(f"{len(chosen) - len(left_out)} encoders; {folders['output'] / RESULTS}.md")
    return 1 if left_out and given.only else 0


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse options that would have no effect, and names that are no file names."""
    useless = ("name",) if given.features is None else ("only", "data_root", "cache", "seed", "list")
    if named := [name for name in useless if getattr(given, name)]:
        without = "without" if given.features is None else "with"
        parser.error(f"--{named[0].replace('_', '-')} has no effect {without} --features")
    if given.again:
        from benchmarks.transfer.rows import all_rows

        rows = [row.name for row in all_rows()]
        if strange := [name for name in given.again if name not in rows]:
            parser.error(f"--again: no row is named {', '.join(strange)}; there are {', '.join(rows)}")
    if given.name is not None and not re.fullmatch(r"\w[\w.-]*", given.name):
        parser.error(f"--name: expected letters, digits, '_', '-' and '.', got {given.name!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description="Does the answer transfer? A table over encoders, kinds of data and kinds of unknown input. Trains "
        "or loads every encoder whose data is there, keeps its features in the cache folder, judges all scores, and "
        "writes one JSON file an encoder and a summary. What is there is not made again.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("the table").add_argument
    add("--only", nargs="+", metavar="NAME", help="encoders (default: all)")
    add("--list", action="store_true", help="print the names of all encoders, and stop")
    add("--data-root", type=Path, metavar="FOLDER", help=f"where the data is (default: {_FOLDERS['data_root']})")
    add("--cache", type=Path, metavar="FOLDER", help=f"feature files, scores, plots (default: {_FOLDERS['cache']})")
    add("--seed", type=int, metavar="SEED", help="of the training (default: 0)")
    add = parser.add_argument_group("one feature file, anybody's").add_argument
    add(
        "--features",
        type=Path,
        metavar="FILE.npz",
        help="arrays train_features (N, F), train_labels (N,), test_features, test_labels, weight (D, F), bias (D,), "
        "unknown_NAME (K, F) for any number of names; further ones, and folders of feature folders: "
        "benchmarks/transfer/feature_file.py",
    )
    add("--name", help="of the result (default: that of the file)")
    add = parser.add_argument_group("both").add_argument
    results, cache = _FOLDERS["output"], _FOLDERS["cache"]
    add("--output", type=Path, metavar="FOLDER", help=f"results (default: {results}; with --features {cache})")
    add(
        "--again",
        nargs="*",
        metavar="ROW",
        help="judge anew, as after a change of the library: all rows, or those with these names in the JSON files",
    )
    return parser

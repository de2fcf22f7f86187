"""What the rules of the two answers were chosen on: each encoder judged by the rule that the others choose.

    python -m benchmarks.transfer.choose --cache runs/transfer

Needs the feature files and the results of ``python -m benchmarks.transfer``. Writes ``transfer_choice.json`` and
``transfer_choice.md``. An encoder that shares its data set and trunk with others is left out with all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe, write_atomically
from benchmarks.transfer.choice_table import choice_table, to_json
from benchmarks.transfer.compact import compact_of
from benchmarks.transfer.gaps import questions
from benchmarks.transfer.quantities import Encoder
from benchmarks.transfer.results import Result, read_results
from benchmarks.transfer.run import RESULTS
from benchmarks.transfer.study import Study, references, study
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected

__all__ = ["compare", "main"]


def compare(results: Sequence[Result], cache: Path) -> Study:
    """Compare all rules over the encoders that have a result and a feature file.

    Args:
        results: Of the judge.
        cache: Folder of the feature files.

    Raises:
        InputError: They are of fewer than two families, so that none can be left out.
    """
    encoders = []
    for result in results:
        name = result["name"]
        if (cache / f"{name}.npz").is_file():
            encoders.append(Encoder(name, compact_of(cache / f"{name}.npz", cache / name)))
            print(f"{name}: read", flush=True)
    asked = [question for result in results for question in questions(result)]
    return study(encoders, references(asked))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, write JSON and Markdown.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0, or 2 when something is missing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer.choose",
        description="Leave-one-encoder-out choice of the rules behind uncertainty and novelty.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--cache",
        type=Path,
        default=Path("runs/transfer"),
        metavar="FOLDER",
        help="feature files (default: %(default)s)",
    )
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="FOLDER", help="where the judge wrote its, "
        "and where these are written (default: %(default)s)")  # fmt: skip
    given = parser.parse_args(argv)
    try:
        results = read_results(given.results / RESULTS)
        if not results:
            hint = "Run python -m benchmarks.transfer first."
            raise InputError(expected("--results", f"a folder {RESULTS} with results", str(given.results), hint))
        found = compare(results, given.cache)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = describe()
    write_atomically(given.results / f"{RESULTS}_choice.json", json.dumps(to_json(found, machine), indent=1) + "\n")
    text = choice_table(found, machine)
    write_atomically(given.results / f"{RESULTS}_choice.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The table over encoders: from recipe or feature file to result, without making again what is there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe, write_atomically
from benchmarks.transfer import results
from benchmarks.transfer.feature_file import load_features, save_features
from benchmarks.transfer.judge import judge
from benchmarks.transfer.plots import draw_all
from benchmarks.transfer.recipes import RECIPES
from benchmarks.transfer.rows import all_rows
from benchmarks.transfer.tables import encoder_table, summary
from contrastive_curvature.errors import ContrastiveCurvatureError

_WIDTH_OF_HALF = 4096
"""Features of more numbers than this are kept in half precision: a feature file would fill gigabytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing of the table, or judge one feature file; 1 when an encoder was left out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description="Does the answer transfer? A table over encoders, kinds of data and kinds of unknown input. Trains "
        "or loads every encoder whose data is there, keeps its features in the cache folder, judges all scores, and "
        "writes one JSON file an encoder and a summary. What is there is not made again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", choices=RECIPES, default=list(RECIPES), help="encoders (default: all)")
    add("--data-root", type=Path, default=Path("data"), metavar="FOLDER", help="where the data is (%(default)s)")
    cache = Path("runs/transfer")
    add("--cache", type=Path, default=cache, metavar="FOLDER", help="feature files, scores, plots (%(default)s)")
    features = "one feature file, anybody's: arrays train_features (N, F), train_labels (N,), test_features, "
    features += "test_labels, weight (D, F), bias (D,), unknown_NAME (K, F) for any number of names; further ones: "
    add("--features", type=Path, metavar="FILE.npz", help=f"{features}benchmarks/transfer/feature_file.py")
    add("--name", help="of its result (default: that of the file)")
    output = f"results (default: benchmarks/results; with --features {cache})"
    add("--output", type=Path, metavar="FOLDER", help=output)
    rows = "judge anew, as after a change of the library: all rows, or those with these names in the JSON files"
    add("--again", nargs="*", metavar="ROW", help=rows)
    given = parser.parse_args(argv)
    if given.features is not None:
        name, output = given.name or given.features.stem, given.output or cache
        result = judge_features(given.features, name, name, output, output, given.again)
        print(write_table(output, result))
        print(f"{output / name}.json, {name}.md; plots and scores in {name}/")
        return 0
    output, left_out = given.output or Path("benchmarks/results"), []
    for name in given.only:
        title, make = RECIPES[name]
        path = given.cache / f"{name}.npz"
        try:
            if not path.is_file():
                print(f"{name}: making its features", flush=True)
                start = time.perf_counter()
                content = make(given.data_root, given.cache, 0)
                save_features(path, content, half=content.weight.shape[1] >= _WIDTH_OF_HALF)
                print(f"{name}: features made in {time.perf_counter() - start:.0f} s", flush=True)
            judge_features(path, name, title, output / "transfer", given.cache, given.again)
        except (ContrastiveCurvatureError, FileNotFoundError, ModuleNotFoundError) as error:
            left_out.append(name)
            print(f"{name}: left out. {error}", flush=True)
    write_summary(output)
    return int(bool(left_out) and given.only != list(RECIPES))


def judge_features(
    features: Path, name: str, title: str, output: Path, extras: Path, again: Sequence[str] | None = None
) -> results.Result:
    """Judge one feature file; write ``NAME.json``, and plots and scores into a folder ``NAME``.

    Where a result of the same feature file is there, only the rows that it lacks are judged and added to it, without
    new plots and scores.

    Args:
        features: The feature file.
        name: Of the result.
        title: In tables.
        output: Folder of the result.
        extras: Where the folder of plots and scores is made, which are no results to commit.
        again: Names of rows to judge anew where a result of the same feature file is there; all of them if empty.

    Returns:
        The result, as it is in the file.
    """
    path, key = output / f"{name}.json", results.key_of(features)
    found = None if again is not None and not again else results.read_result(path, key)
    wanted = all_rows() if found is None else results.missing_rows(found, again or ())
    if found is not None and not wanted:
        print(f"{name}: result is there", flush=True)
        return found
    judgement = judge(load_features(features), wanted)
    heading = {"name": name, "title": title, "version": results.VERSION, "key": key}
    result = {**heading, **judgement.figures, "machine": describe()}
    result = results.write_result(path, result if found is None else results.with_rows(found, result))
    if found is None:
        results.save_scores(extras / name / "scores.npz", judgement)
        draw_all(extras / name, judgement, title)
    skipped = f"; left out: {', '.join(result['skipped'])}" if result["skipped"] else ""
    print(f"{name}: judged in {result['seconds']:.0f} s{skipped}", flush=True)
    return result


def write_summary(output: Path) -> None:
    """Write the table of each result of ``OUTPUT/transfer``, and the summary of all."""
    every = results.read_results(output / "transfer")
    for result in every:
        write_table(output / "transfer", result)
    write_atomically(output / "transfer.md", summary(every))


def write_table(output: Path, result: results.Result) -> str:
    """Write and give the table of one encoder."""
    text = encoder_table(result) + "\n"
    write_atomically(output / f"{result['name']}.md", text)
    return text

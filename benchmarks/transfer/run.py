"""From recipe or feature file to result, without making again what is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import describe, write_atomically
from benchmarks.transfer.feature_file import load_features, save_features
from benchmarks.transfer.judge import judge
from benchmarks.transfer.plots import draw_all
from benchmarks.transfer.results import (
    VERSION,
    Result,
    key_of,
    missing_rows,
    read_result,
    read_results,
    save_scores,
    with_rows,
    write_result,
)
from benchmarks.transfer.rows import all_rows
from benchmarks.transfer.tables import encoder_table, summary
from contrastive_curvature.errors import ContrastiveCurvatureError

if TYPE_CHECKING:
    from benchmarks.transfer.recipes.recipe import Recipe

RESULTS = "transfer"
"""Folder of the results of single encoders, and name of the summary."""

_WIDTH_OF_HALF = 4096
"""Features of more numbers than this are kept in half precision: a feature file would fill gigabytes."""


def _say(line: str) -> None:
    # A run takes hours, and its output may go to a file.
    print(line, flush=True)


def run_recipes(
    recipes: Iterable[Recipe],
    data_root: Path,
    cache: Path,
    output: Path,
    seed: int = 0,
    again: Sequence[str] | None = None,
    say: Callable[[str], None] = _say,
) -> dict[str, str]:
    """Make the feature files and results that are missing, and the summary of all results.

    A feature file that is there is never made again: delete it for that.

    Args:
        recipes: Encoders.
        data_root: Where images and sentences are.
        cache: Folder of the feature files, of the scores and plots, and of what recipes keep.
        output: Folder of the results.
        seed: Of the training; one above 0 is part of the name.
        again: As in :func:`judge_features`.
        say: Called with one line about each encoder.

    Returns:
        Name -> reason of the encoders that were left out.
    """
    left_out: dict[str, str] = {}
    for recipe in recipes:
        name = recipe.name if seed == 0 else f"{recipe.name}-seed{seed}"
        title = recipe.title if seed == 0 else f"{recipe.title}, seed {seed}"
        path = cache / f"{name}.npz"
        try:
            if not path.is_file():
                start = time.perf_counter()
                say(f"{name}: making its features")
                content = recipe.make(data_root, cache, seed)
                save_features(path, content, half=content.features >= _WIDTH_OF_HALF)
                del content
                say(f"{name}: features made in {time.perf_counter() - start:.0f} s")
            judge_features(path, name, title, output / RESULTS, again=again, extras=cache, say=say)
        except (ContrastiveCurvatureError, FileNotFoundError) as error:
            left_out[name] = str(error)
            say(f"{name}: left out. {error}")
    write_summary(output)
    return left_out


def judge_features(
    features: Path,
    name: str,
    title: str,
    output: Path,
    *,
    again: Sequence[str] | None = None,
    extras: Path | None = None,
    say: Callable[[str], None] = _say,
) -> Result:
    """Judge one feature file; write ``NAME.json``, and plots and scores into a folder ``NAME``.

    Where a result of the same feature file is there, only the rows that it lacks are judged and added to it, without
    new plots and scores.

    Args:
        features: The feature file.
        name: Of the result.
        title: In tables.
        output: Folder of the result.
        again: Names of rows to judge anew where a result of the same feature file is there; all of them if empty.
        extras: Where the folder of plots and scores is made, which are no results to commit; ``output`` by default.
        say: Called with one line about it.

    Returns:
        The result, as it is in the file.

    Raises:
        InputError: The feature file is damaged, or does not have what is needed.
    """
    path, extras = output / f"{name}.json", output if extras is None else extras
    # What cannot be read has a better error than its key.
    content = None if features.is_file() else load_features(features)
    key = key_of(features)
    found = None if again is not None and not again else read_result(path, key)
    wanted = None
    if found is not None:
        absent = missing_rows(found)
        wanted = [row for row in all_rows() if row in absent or row.name in (again or ())]
        if not wanted:
            say(f"{name}: result is there")
            return found
    content = content or load_features(features)
    judgement = judge(content, wanted)
    heading = {"name": name, "title": title, "version": VERSION, "key": key}
    result = {**heading, **judgement.figures, "machine": describe()}
    result = write_result(path, result if found is None else with_rows(found, result))
    if found is None:
        save_scores(extras / name / "scores.npz", judgement)
        draw_all(extras / name, judgement, title)
    skipped = f"; left out: {', '.join(result['skipped'])}" if result["skipped"] else ""
    say(f"{name}: judged in {result['seconds']:.0f} s{skipped}")
    return result


def write_summary(output: Path) -> Path:
    """Write the table of each result of a folder, and the summary of all."""
    path = output / f"{RESULTS}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_results(output / RESULTS)
    for result in results:
        write_table(output / RESULTS, result)
    write_atomically(path, summary(results))
    return path


def write_table(output: Path, result: Result) -> str:
    """Write and give the table of one encoder."""
    text = encoder_table(result) + "\n"
    write_atomically(output / f"{result['name']}.md", text)
    return text

"""The results page, its plots and the README's table say what the committed results say."""

from __future__ import annotations

import re

import pytest
from markdown_pages import ROOT

from benchmarks import results_plots
from benchmarks.transfer.families import families_table
from benchmarks.transfer.results import read_results

RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table() -> str:
    return families_table(read_results(ROOT / "benchmarks" / "results" / "transfer"))


def rows(markdown: str, first: str) -> dict[str, dict[str, str]]:
    """The table whose head begins with a cell, by the first cell of a row and the head of a column."""
    lines = markdown.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    head, _, *body = (line for line in lines[start:])
    names = [cell.strip() for cell in head.strip("|").split("|")]
    found = {}
    for line in body:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0]] = dict(zip(names[1:], cells[1:], strict=True))
    return found


def test_the_page_has_the_table_of_the_script(table):
    assert table in RESULTS


def test_the_readme_shows_columns_of_the_same_table(table):
    short, whole = rows((ROOT / "README.md").read_text(encoding="utf-8"), "encoders"), rows(table, "encoders")
    assert short.keys() == whole.keys()
    names = {"known? 10-NN": "known? 10-NN, embedding"}
    for family, cells in short.items():
        assert cells == {name: whole[family][names.get(name, name)] for name in cells}


def test_the_plot_has_the_numbers_of_the_table(table):
    whole = rows(table, "encoders")
    scores = {
        "right": {"uncertainty": "`uncertainty`", "minus norm": "minus norm"},
        "known": {"novelty": "`novelty`", "minus norm": "minus norm", "10-NN, embedding": "10-NN, embedding"},
    }
    points = results_plots.transfer_points()
    for question, names in scores.items():
        for score, title in names.items():
            drawn = {family: f"{value:.3f}" for family, value in points[question][score].items()}
            wanted = {
                re.sub(r" \(\d+\)$", "", family): cells[f"{question}? {title}"] for family, cells in whole.items()
            }
            assert drawn == wanted


def test_every_plot_is_drawn_committed_and_shown(tmp_path):
    results_plots.main(["--out", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(results_plots.PLOTS)
    for name in results_plots.PLOTS:
        assert f"(images/results/{name}.svg)" in RESULTS
        assert (results_plots.OUT / f"{name}.svg").is_file()

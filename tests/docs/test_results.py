"""The results page, its plots and the README's table say what the committed results say."""

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


def test_the_page_shows_columns_of_the_tables_of_the_script(table):
    assert table in (ROOT / "benchmarks" / "results" / "families.md").read_text(encoding="utf-8")
    for first in ("right neighbour?", "known input?"):
        whole, shown = rows(table, first), rows(RESULTS, first)
        assert whole.keys() == shown.keys()
        for family, cells in shown.items():
            assert len(cells) >= 3
            assert cells.items() <= whole[family].items()


def test_the_readme_shows_columns_of_the_same_tables(table):
    readme = rows((ROOT / "README.md").read_text(encoding="utf-8"), "encoders")
    right, known = rows(table, "right neighbour?"), rows(table, "known input?")
    assert readme.keys() == right.keys() == known.keys()
    for family, cells in readme.items():
        rivals = known[family]["best other that stores no inputs"], known[family]["best other that does"]
        assert cells == {
            "right? `uncertainty`": right[family]["`uncertainty`"],
            "right? best other": right[family]["best other without a gallery"],
            "known? `novelty`": known[family]["`novelty`"],
            "known? best other": max(rivals, key=lambda cell: float(cell.split()[0])),
        }


def test_the_plot_has_the_numbers_of_the_tables(table):
    points = results_plots.transfer_points()
    for question, first, score in (("right", "right neighbour?", "uncertainty"), ("known", "known input?", "novelty")):
        drawn = {family: f"{value:.3f}" for family, value in points[question][score].items()}
        wanted = {re.sub(r" \(\d+\)$", "", family): cells[f"`{score}`"] for family, cells in rows(table, first).items()}
        assert drawn == wanted


def test_every_plot_is_drawn_committed_and_shown(tmp_path):
    results_plots.main(["--out", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(results_plots.PLOTS)
    for name in results_plots.PLOTS:
        assert f"(images/results/{name}.svg)" in RESULTS
        assert (results_plots.OUT / f"{name}.svg").is_file()

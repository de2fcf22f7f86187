"""The code of the recipes runs: each page's ``python`` blocks, one after the other, as a reader copies them."""

import re
from pathlib import Path

import pytest
from page_code import run_blocks

PAGES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
RECIPES = sorted(page for page in PAGES.glob("*.md") if page.name != "index.md")

pytestmark = [
    # What the tools themselves warn of at their import or at their first use; ours to show, not to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def blocks(page: str) -> list[tuple[int, str]]:
    """Each fenced ``python`` block, with the number of lines above it."""
    return [
        (page.count("\n", 0, found.start(1)), found[1])
        for found in re.finditer(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_recipe_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = blocks(page.read_text(encoding="utf-8"))
    assert found
    run_blocks(page, found, capsys)
    assert "assert " in found[-1][1], "the last block shows what comes out, and checks it"


def test_every_recipe_is_listed():
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert listed == {page.name for page in RECIPES}
    assert len(RECIPES) >= 10

"""The code of the recipes runs: the first block of a page, then those of a section, as a reader copies them.

What no extra of the package brings is skipped by name. To run all:
``pip install langchain-core llama-index-core haystack-ai``, in an environment of its own.
"""

import re
from pathlib import Path

import pytest
from page_code import run_blocks

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "recipes").glob("*.md"))

pytestmark = [
    # What the tools themselves warn of at their import or at their first use; ours to show, not to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Blocks = list[tuple[int, str]]


def sections(page: Path) -> dict[str, Blocks]:
    """Return the ``python`` blocks with the number of lines above each, by section; "" is the beginning."""
    text, found = page.read_text(encoding="utf-8"), dict[str, Blocks]()
    title = ""
    for match in re.finditer(r"^## ([^\n]*)|^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        title = match[1] or title
        if match[2]:
            found.setdefault(title, []).append((text.count("\n", 0, match.start(2)), match[2]))
    return found


RECIPES = [(page, title) for page in PAGES for title in sections(page) if title]


@pytest.mark.parametrize(("page", "title"), RECIPES, ids=[title for _, title in RECIPES])
def test_recipe_runs_and_prints_what_it_says(page, title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    first, blocks = sections(page)[""], sections(page)[title]
    for name in re.findall(r"^(?:from|import) (\w+)", "".join(code for _, code in first + blocks), re.MULTILINE):
        pytest.importorskip(name)
    run_blocks(page, first + blocks, capsys)
    for _, code in blocks:
        assert code.count("\n") < 40, "a recipe is short"
        assert "\nassert " in code, "a recipe checks what comes out"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"recipes/(\w+)\.md", (PAGES[0].parents[2] / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.stem for page in PAGES]
    assert len(RECIPES) >= 14

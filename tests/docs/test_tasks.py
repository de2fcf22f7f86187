"""The code of the task pages runs, where their data are, and prints what the pages say."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))
FOLDERS = {"DATA_ROOT": ROOT.parent / "shared" / "data", "FEATURES_ROOT": ROOT.parent / "cache" / "transfer"}
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def words_and_numbers(printed: str) -> tuple[list[str], list[float]]:
    numbers = [float(found.replace(",", "")) for found in _NUMBER.findall(printed)]
    return _NUMBER.sub("#", printed).split(), numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_first_block_prints_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    code = re.search(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    said = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert code, "no ```py block"
    assert said, "no ```text block with what it prints"
    assert code[1].count("\n") <= 65, "more than one screen"
    # the empty lines make a traceback show the page's own line numbers
    compiled = compile("\n" * text.count("\n", 0, code.start(1)) + code[1], str(page), "exec")
    monkeypatch.chdir(tmp_path)
    for variable, folder in FOLDERS.items():
        monkeypatch.setenv(variable, os.environ.get(variable, str(folder)))
    try:
        exec(compiled, {"__name__": "__main__"})
    except FileNotFoundError as error:
        pytest.skip(f"the data of this page are not there: {error}")
    words, numbers = words_and_numbers(capsys.readouterr().out)
    wanted, figures = words_and_numbers(said[1])
    assert words == wanted
    assert numbers == pytest.approx(figures, rel=0.25)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"tasks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.stem for page in PAGES]
    assert PAGES

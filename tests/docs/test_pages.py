"""Pages: spelling, links, and the first block of code of each task."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_pages import ROOT, markdown_files, read_page


def test_no_usual_mistakes():
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml"), "."]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


PAGES = markdown_files()


@cache
def anchors(path: Path) -> set[str]:
    return read_page(path.read_text(encoding="utf-8")).anchors


def dead_links(path: Path, text: str) -> list[str]:
    dead = []
    for link in read_page(text).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
        if not target.is_relative_to(ROOT) or (parts.path and not target.exists()):
            dead.append(link)
        elif parts.fragment and target.suffix == ".md":
            here = read_page(text).anchors if target == path else anchors(target)
            dead += [] if unquote(parts.fragment) in here else [link]
    return dead


def test_links_lead_somewhere():
    dead = {str(path.relative_to(ROOT)): dead_links(path, path.read_text(encoding="utf-8")) for path in PAGES}
    assert {page: links for page, links in dead.items() if links} == {}


TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.stem)
def test_first_block_prints_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    code = re.search(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    said = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert code, "no ```py block"
    assert said, "no ```text block with what it prints"
    assert code[1].count("\n") <= 65, "more than one screen"
    assert max(map(len, code[1].splitlines())) <= 88, "the end of a line is cut"
    # the empty lines make a traceback show the page's own line numbers
    compiled = compile("\n" * text.count("\n", 0, code.start(1)) + code[1], str(page), "exec")
    monkeypatch.chdir(tmp_path)
    exec(compiled, {"__name__": "__main__"})
    assert capsys.readouterr().out == said[1]


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"tasks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.stem for page in TASKS]
    assert TASKS

"""The site builds strictly and without a network, and its pages read as they do in the repository."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markdown
import pytest
from markdown_it import MarkdownIt
from markdown_pages import ROOT, markdown_files, without_front_matter

_SHOWN = ("table", "tr", "li", "ul", "ol", "h1", "h2", "h3", "h4", "pre", "strong", "em", "a", "img")
_FORMULA = re.compile(r"(?s)^\$\$$.*?^\$\$$|(?<![`$])\$(?=\S)[^$`]+?(?<=\S)\$(?![`$\d])", re.MULTILINE)
_FOREIGN = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\"' >]*")
_FOREIGN_STYLE = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] += 1


def tags(html: str) -> dict[str, int]:
    parser = _Tags()
    parser.feed(html)
    return {tag: parser.count[tag] for tag in _SHOWN}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    places = {page.relative_to(site).as_posix() for page in pages}
    assert {"index.html", "quickstart.html", "changelog.html", "reference/losses.html"} <= places
    assert "benchmarks/results/transfer.html" in places
    for page in pages:
        assert _FOREIGN.findall(page.read_text(encoding="utf-8")) == [], page
    for style in site.rglob("*.css"):
        assert not _FOREIGN_STYLE.search(style.read_text(encoding="utf-8")), style
    losses = (site / "reference/losses.html").read_text(encoding="utf-8")
    assert 'id="contrastive_curvature.SupConLoss"' in losses
    assert not re.search(r":(?:class|func|meth):`|\.\. math::", losses)


def test_the_search_finds_what_people_look_for(site):
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))

    def words(text: str) -> set[str]:
        return set(re.split(index["config"]["separator"], re.sub(r"<[^>]*>", " ", text).lower())) - {""}

    sections = [(each["location"], words(f"{each['title']} {each['text']}")) for each in index["docs"]]
    for query, page in {
        "OOD": "decide.html",
        "cache": "tasks/cache.html",
        "rerank": "tasks/rerank.html",
        "reranker": "tasks/rerank.html",
        "1:N": "tasks/verify.html",
        "gallery size": "tasks/verify.html",
        "FPIR": "tasks/verify.html",
        "open set": "tasks/verify.html",
        "abstention": "tasks/no_answer.html",
        "reject option": "decide.html",
        "false positive rate": "decide.html",
        "coverage": "statistics.html",
        "covariate shift": "statistics.html",
        "out-of-distribution": "decide.html",
        "quality": "tasks/quality.html",
        "drift": "tasks/drift.html",
        "verification": "tasks/verify.html",
        "p-value": "decide.html",
        "threshold": "decide.html",
        "evaluate": "report.html",
        "report": "command_line.html",
        "alpha": "decide.html",
    }.items():
        found = {place.partition("#")[0] for place, there in sections if words(query) <= there}
        assert page in found, query


def test_a_page_reads_the_same_in_the_repository_and_on_the_site():
    """A list without an empty line above it, or code in a list, is one thing on GitHub and another on the site."""
    extensions = ["attr_list", "md_in_html", "tables", "pymdownx.superfences"]
    for path in markdown_files():
        text = _FORMULA.sub("x", without_front_matter(path.read_text(encoding="utf-8")))
        site = tags(markdown.markdown(text, extensions=extensions))
        assert site == tags(MarkdownIt("commonmark").enable("table").render(text)), path

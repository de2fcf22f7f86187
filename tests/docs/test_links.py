"""Links between the pages of the repository lead somewhere: files exist, and so do the headings that are named."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_pages import ROOT, markdown_files, read_page, slug

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


def test_there_are_pages_of_every_kind():
    names = {str(path.relative_to(ROOT)) for path in PAGES}
    assert {"README.md", "CHANGELOG.md", "docs/theory.md", "docs/recipes/index.md"} <= names
    assert "benchmarks/results/transfer.md" in names


def test_dead_links_are_found():
    for text, dead in (
        ("[a](none.md)", ["none.md"]),
        ("![a](images/none.png)", ["images/none.png"]),
        ("[a](theory.md#no-such-heading)", ["theory.md#no-such-heading"]),
        ("# A heading\n\n[a](#a-heading) [b](#another)", ["#another"]),
        ("[a](../../elsewhere.md)", ["../../elsewhere.md"]),
        ("[a](theory.md#the-output-hessian) [b](https://example.org/x) `[c](none.md)`", []),
        ("```\n[a](none.md)\n```", []),
    ):
        assert dead_links(ROOT / "docs" / "page.md", text) == dead


def test_anchors_are_those_of_github():
    for heading, anchor in (
        ("`uncertainty`: the angle, larger for short outputs", "uncertainty-the-angle-larger-for-short-outputs"),
        ("What a batch may be?", "what-a-batch-may-be"),
        ("The structure `kron_lowrank`", "the-structure-kron_lowrank"),
        ("float16, bfloat16 – float32", "float16-bfloat16--float32"),
    ):
        assert read_page(f"## {heading}\n").anchors == {anchor}
        assert slug(heading) == anchor
    assert read_page("# a\n\n# a\n").anchors == {"a", "a-1"}

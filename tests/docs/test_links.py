"""Links between the pages of the repository lead somewhere: files exist, and so do the headings that are named."""

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_pages import ROOT, markdown_files, read_page

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

"""The Markdown files of the repository, as GitHub and editors read them."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
_PARSER = MarkdownIt("commonmark").enable("table")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


class Page(NamedTuple):
    """What a page links to, and what can be linked to in it."""

    links: list[str]
    anchors: set[str]


def markdown_files() -> list[Path]:
    """All pages that are written or committed here, but those of tools and environments."""
    found = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    for folder in ("docs", "benchmarks"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(found)


def without_front_matter(text: str) -> str:
    return _FRONT_MATTER.sub("", text)


def tokens(text: str) -> list[Token]:
    """The blocks of a page, and what stands in their lines, in one list."""
    blocks = _PARSER.parse(without_front_matter(text))
    return [token for block in blocks for token in (block, *(block.children or ()))]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, no punctuation, a hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read_page(text: str) -> Page:
    """Links and images of a page, outside code; anchors of its headings, the second of a name with ``-1``."""
    links, anchors, seen = [], set(), Counter[str]()
    found = tokens(text)
    for token, after in zip(found, [*found[1:], None], strict=False):
        if token.type == "link_open":
            links.append(str(token.attrs["href"]))
        elif token.type == "image":
            links.append(str(token.attrs["src"]))
        elif token.type == "heading_open" and after is not None:
            heading = "".join(child.content for child in after.children or () if child.type in ("text", "code_inline"))
            name = slug(heading)
            anchors.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return Page(links, anchors)

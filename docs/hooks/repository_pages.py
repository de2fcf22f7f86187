"""Pages of the repository that stand outside docs, in the site: the changelog, how to contribute, all results.

Links between Markdown files are written for the repository, where GitHub and editors follow them. This hook adds what
:data:`PAGES`, :data:`FILES` and :data:`FOLDERS` name, and turns links that leave docs into links to the copies. A link
to a file that is not in the site is left as it is, and the strict build names it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository by their place in the site."""

FILES = ("CITATION.cff", "LICENSE", "benchmarks/transfer/feature_file.py")
"""Files that pages link to, which are no pages."""

FOLDERS = ("benchmarks/results",)
"""Folders whose Markdown files have the same place in the site as in the repository."""

LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<after>#[^)\s]*)?(?=[)\s])")
CODE = re.compile(
    r"^(?P<mark>`{3,}|~{3,})[^\n]*\n.*?^(?P=mark)|(?<!`)(?P<tick>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=tick)(?!`)",
    re.MULTILINE | re.DOTALL,
)


def site_place(path: str) -> str:
    """Where a file of the repository stands in the site, both as paths from their roots; elsewhere, the same path."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/")


def repository_place(page: str) -> str:
    """The reverse of :func:`site_place`, for a page."""
    for path, place in PAGES.items():
        if page == place:
            return path
    return page if page.startswith(FOLDERS) else f"docs/{page}"


def rewrite(markdown: str, page: str) -> str:
    """Turn the repository's links in a page into the site's.

    Args:
        markdown: The page's text.
        page: Its place in the site, such as ``"threshold.md"``.

    Returns:
        The text with every relative link pointing to the target's place in the site. Code is left as it is.
    """
    here, there = posixpath.dirname(repository_place(page)), posixpath.dirname(page)

    def turned(link: re.Match[str]) -> str:
        target = link["target"]
        if ":" in target or target.startswith("/"):
            return link[0]
        place = site_place(posixpath.normpath(posixpath.join(here, target)))
        return f"{link['before']}{posixpath.relpath(place, there or '.')}{link['after'] or ''}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(turned, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(turned, markdown[end:])])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside docs."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, place in PAGES.items():
        if (ROOT / path).is_file() and files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for path in FILES:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.INCLUDED))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.md")):
            place = path.relative_to(ROOT).as_posix()
            found = File.generated(config, place, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(found)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn the links of a page; result files are not searched."""
    if page.file.src_uri.startswith(FOLDERS):
        page.meta["search"] = {"exclude": True}
    return rewrite(markdown, page.file.src_uri)

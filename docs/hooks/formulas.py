"""Formulas between dollar signs become MathML, which browsers draw by themselves: no script, no font, no network."""

from __future__ import annotations

import html
import re
from typing import Any

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def with_mathml(page: str) -> str:
    """Replace the formulas that pymdownx.arithmatex has marked in a page."""
    from latex2mathml.converter import convert

    def drawn(match: re.Match[str]) -> str:
        display = "inline" if match["tag"] == "span" else "block"
        return str(convert(html.unescape(match["latex"]), display=display))

    return FORMULA.sub(drawn, page)


def on_page_content(content: str, **_: Any) -> str:
    """Draw the formulas of a page."""
    return with_mathml(content)

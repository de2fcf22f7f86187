"""Names in tables break after a dot, an underscore, a bracket, a slash or an equals sign, and not inside a word."""

from __future__ import annotations

import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+")
PLACE = re.compile(r"(?<=[\w)\]][._(\[/=])(?=[a-zA-Z])")


def with_breaks(page: str) -> str:
    """Mark the places in the tables of a page where a narrow screen may break a name."""
    return TABLE.sub(lambda table: CODE.sub(lambda code: PLACE.sub("<wbr>", code[0]), table[0]), page)


def on_page_content(content: str, **_: Any) -> str:
    """Mark the places of a page."""
    return with_breaks(content)

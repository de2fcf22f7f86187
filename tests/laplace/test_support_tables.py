"""The tables of what each backend can do are those that the contract gives now."""

import re
from pathlib import Path

import backend_tables as support

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/backends.md",)


def test_pages_are_up_to_date() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(r"<!-- backends: \w+", text), f"{page} has no marks"
        assert support.rewrite(text) == text, f"{page} is out of date: run `make tables`"

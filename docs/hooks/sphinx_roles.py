"""Docstrings as the site shows them: references and formulas are written for Sphinx there, and Markdown here.

An extension of Griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?P<short>~)?(?P<name>[^`]+)`")
FORMULA = re.compile(r"^(?P<indent> *)\.\. math::[ ]*\n(?P<body>(?:(?P=indent) +\S[^\n]*\n?)+)", re.MULTILINE)
LITERAL = re.compile(r"(?<=\S)::$", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """Turn Sphinx's roles into code, its formulas into code blocks in LaTeX, and ``::`` at the end of a line into ``:``."""

    def code(role: re.Match[str]) -> str:
        name = re.sub(r"\s+", "", role["name"]).lstrip(".")
        return f"`{name.rpartition('.')[2] if role['short'] else name}`"

    def block(formula: re.Match[str]) -> str:
        indent = formula["indent"]
        lines = formula["body"].rstrip().splitlines()
        inside = min(len(line) - len(line.lstrip()) for line in lines)
        return "\n".join([f"{indent}```latex", *(indent + line[inside:] for line in lines), f"{indent}```", ""])

    return LITERAL.sub(":", ROLE.sub(code, FORMULA.sub(block, docstring)))


class SphinxRoles(Extension):
    """Applies :func:`as_markdown` to every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Rewrite the docstring of one object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

"""Docstrings as the site shows them: references and formulas are written for Sphinx there, and Markdown here.

An extension of Griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

PACKAGE = "contrastive_curvature"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?P<short>~)?(?P<name>[^`]+)`")
FORMULA = re.compile(r"^(?P<indent> *)\.\. math::[ ]*\n(?P<body>(?:(?P=indent) +\S[^\n]*\n?)+)", re.MULTILINE)
LITERAL = re.compile(r"(?<=\S)::$", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """Translate a docstring.

    Args:
        docstring: With Sphinx's roles, formulas in LaTeX, and ``::`` before literal blocks.

    Returns:
        The same with code in the place of roles, linked where a full path is given and the reference has it; with
        formulas as code blocks, since nothing that draws them works without a network; and with ``:`` for ``::``.
    """

    def code(role: re.Match[str]) -> str:
        path = re.sub(r"\s+", "", role["name"]).lstrip(".")
        shown = path.rpartition(".")[2] if role["short"] or path.startswith(PACKAGE) else path
        if not path.startswith(f"{PACKAGE}."):
            return f"`{shown}`"
        return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'

    def block(formula: re.Match[str]) -> str:
        indent, lines = formula["indent"], formula["body"].rstrip().splitlines()
        inside = min(len(line) - len(line.lstrip()) for line in lines)
        return "\n".join([f"{indent}```latex", *(indent + line[inside:] for line in lines), f"{indent}```", ""])

    return LITERAL.sub(":", ROLE.sub(code, FORMULA.sub(block, docstring)))


class SphinxRoles(Extension):
    """Applies :func:`as_markdown` to every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

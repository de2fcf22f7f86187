"""Docstrings as the site shows them: references and formulas are written for Sphinx there, and Markdown here.

An extension of Griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib as mpl
from griffe import Extension, Object
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image

PACKAGE = "contrastive_curvature"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?P<short>~)?(?P<name>[^`]+)`")
FORMULA = re.compile(r"^(?P<indent> *)\.\. math::[ ]*\n(?P<body>(?:(?P=indent) +\S[^\n]*\n?)+)", re.MULTILINE)
LITERAL = re.compile(r"(?<=\S)::$", re.MULTILINE)


NOT_IN_MATHTEXT = (
    (r"\\[bB]igg?[lr]?\b", ""),
    (r"\\frac(\d)(\\\w+)", r"\\frac{\1}{\2}"),
    (r"\\frac\b", r"\\dfrac"),
    (r"\\tfrac *(\d)(\d)", r"\\frac{\1}{\2}"),
)
"""What Matplotlib lacks of LaTeX, with what stands for it; and large fractions, which are read more easily."""


def drawn(formula: str) -> str:
    """Draw a formula in LaTeX, as outlines in the colour of the text, so that browsers load nothing for it.

    Raises:
        ValueError: Matplotlib does not know a command of it.
    """
    for lacking, instead in NOT_IN_MATHTEXT:
        formula = re.sub(lacking, instead, formula)
    file = io.BytesIO()
    with mpl.rc_context({"mathtext.fontset": "stix", "svg.hashsalt": "formula"}):
        math_to_image(f"${formula}$", file, format="svg", prop=FontProperties(size=13))
    svg = file.getvalue().decode()
    size = re.search(r'width="[^"]*" height="[^"]*" viewBox="[^"]*"', svg)
    outlines = re.search(r'<g id="text_1">(.*)</g>\s*</g>\s*</svg>', svg, re.DOTALL)
    if size is None or outlines is None:
        msg = "Matplotlib writes other SVG than it did"
        raise ValueError(msg)
    body = " ".join(re.sub(r"<!--.*?-->", "", outlines[1], flags=re.DOTALL).split())
    label = html.escape(formula)
    return f'<div class="formula"><svg role="img" aria-label="{label}" fill="currentColor" {size[0]}>{body}</svg></div>'


def as_markdown(docstring: str) -> str:
    """Translate a docstring.

    Args:
        docstring: With Sphinx's roles, formulas in LaTeX, and ``::`` before literal blocks.

    Returns:
        The same with code in the place of roles, linked where a full path is given and the reference has it; with
        drawn formulas; and with ``:`` for ``::``.
    """

    def code(role: re.Match[str]) -> str:
        path = re.sub(r"\s+", "", role["name"]).lstrip(".")
        shown = path.rpartition(".")[2] if role["short"] or path.startswith(PACKAGE) else path
        if not path.startswith(f"{PACKAGE}."):
            return f"`{shown}`"
        return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'

    def block(formula: re.Match[str]) -> str:
        return f"{formula['indent']}{drawn(' '.join(formula['body'].split()))}\n"

    return LITERAL.sub(":", ROLE.sub(code, FORMULA.sub(block, docstring)))


class SphinxRoles(Extension):
    """Applies :func:`as_markdown` to every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

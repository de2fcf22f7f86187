"""Packages that a report needs, which are not needed otherwise."""

from __future__ import annotations

import importlib

from contrastive_curvature.errors import UnsupportedError

__all__ = ["check_packages"]

_MISSING = {
    "jinja2": "evaluate: the page is made with Jinja2. Type: pip install jinja2.",
    "matplotlib": "evaluate: plots are drawn with matplotlib. Type: pip install matplotlib. Or write only the page: "
    "to_html.",
    "PIL": "evaluate: pictures of inputs need Pillow. Type: pip install pillow. Or show none, with n_shown=0.",
}


def check_packages(*names: str) -> None:
    """Refuse what needs a package that is not installed.

    Args:
        *names: ``"jinja2"``, ``"matplotlib"`` or ``"PIL"``.

    Raises:
        UnsupportedError: One of them cannot be imported; the message has what to type.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise UnsupportedError(_MISSING[name]) from None

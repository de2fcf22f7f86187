"""Texts of users as UTF-8 can hold them."""

from __future__ import annotations

__all__ = ["readable"]


def readable(text: str) -> str:
    r"""A text with what UTF-8 cannot hold written out, as ``\xff`` for a byte of a file name that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        return text
    try:
        # A name of a file that is no UTF-8 has its bytes as surrogates.
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()

"""What a command says: progress and warnings on stderr, the result on stdout as lines or as one JSON object."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from contrastive_curvature.apps.cli.errors import printable
from contrastive_curvature.apps.cli.texts import readable

__all__ = ["Console", "common_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Console:
    """Where a command writes.

    Args:
        as_json: Print one JSON object on stdout in place of lines.
        quiet: No progress bars, and nothing on stdout but the JSON object.

    Attributes:
        warnings: Texts of the library's warnings so far; they are part of the JSON object.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.warnings: list[str] = []

    @property
    def progress(self) -> bool | None:
        """``progress_bar=`` for the library: ``False`` where nobody looks, else ``None`` (bars after ten seconds)."""
        # Without a stream where the shell closed it.
        return None if not self.quiet and sys.stderr is not None and sys.stderr.isatty() else False

    def note(self, text: str) -> None:
        """A line on stderr for people; not with ``--quiet`` or ``--json``."""
        if not self.quiet and not self.as_json:
            click.echo(printable(text), err=True)

    def warn(self, text: str) -> None:
        """A warning: a line on stderr, and an entry of the JSON object; each text once."""
        text = printable(" ".join(text.split()))
        if text not in self.warnings:
            self.warnings.append(text)
            if not self.as_json:
                click.echo(f"warning: {text}", err=True)

    def result(self, values: Mapping[str, Any], *lines: str) -> None:
        """The result of the command, printed once at its end.

        Args:
            values: Plain numbers, texts, lists and mappings, for JSON. Numbers that are not finite become null.
            *lines: The same for people.
        """
        if self.as_json:
            click.echo(json.dumps(_plain({**values, "warnings": self.warnings}), allow_nan=False))
        elif not self.quiet:
            click.echo("\n".join(readable(printable(line)) for line in lines))

    @contextmanager
    def showing_warnings(self) -> Iterator[None]:
        """Turn the library's warnings into lines; those that other packages have for programmers are left out."""

        def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
            ours = category.__module__.startswith("contrastive_curvature") or filename.startswith(_PACKAGE)
            if ours and not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
                self.warn(str(message))

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield


def common_options(command: _Command) -> _Command:
    """The options ``--json``, ``--quiet`` and ``--traceback``; the command is called with a :class:`Console` first."""

    def run(*args: Any, as_json: bool, quiet: bool, traceback: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        console = Console(as_json=as_json, quiet=quiet)
        with console.showing_warnings():
            return command(console, *args, **kwargs)

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    run.__click_params__ = list(getattr(command, "__click_params__", ()))  # type: ignore[attr-defined]
    for option in (
        click.option("--traceback", is_flag=True, help="Show Python's traceback of an error."),
        click.option("-q", "--quiet", is_flag=True, help="No progress bars and no lines; errors and warnings stay."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; errors as JSON on stderr."),
    ):
        option(run)
    run.__click_params__.sort(key=lambda each: each.name in ("as_json", "quiet", "traceback"), reverse=True)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)

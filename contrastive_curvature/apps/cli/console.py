"""Input and output of a command: its result on stdout; progress, warnings and errors, one line each, on stderr."""

from __future__ import annotations

import errno
import importlib
import json
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import contrastive_curvature
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, NotFittedError, UnsupportedError

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.sources import Source

BAD_INPUT = 2
"""Exit code where the arguments or the files are not what the command takes."""

FAILED = 1
"""Exit code of anything else: the disk is full, the memory is not enough, a defect of this program."""

INTERRUPTED = 130
"""Exit code of Ctrl-C, as the shells count it: 128 plus the number of the signal."""

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is too large",
}
_BAD_INPUTS = (
    *(InputError, UnsupportedError, NotFittedError),
    *(FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError),
)
# C0 and C1, Unicode line ends, and the characters that change the writing direction.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


Result = tuple[Mapping[str, Any], *tuple[str, ...]]
"""What a command returns: values for JSON, and lines for people that say the same."""


class Console:
    """Output of a command.

    Args:
        as_json: Print one JSON object on stdout in place of lines.
        quiet: Show no progress bars, and print nothing on stdout but the JSON object.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.warnings: list[str] = []

    @property
    def progress(self) -> bool | None:
        """Value of ``progress_bar=``: ``False`` without a terminal, else ``None`` (bars after ten seconds)."""
        # A stream is None if the shell closed it.
        return None if not self.quiet and sys.stderr is not None and sys.stderr.isatty() else False

    def note(self, text: str) -> None:
        """Write a line for people on stderr; not with ``--quiet`` or ``--json``."""
        if not self.quiet and not self.as_json:
            click.echo(printable(text), err=True)

    def warn(self, text: str) -> None:
        """Write each warning once: as a line on stderr, or as an entry of the JSON object."""
        text = printable(" ".join(text.split()))
        if text not in self.warnings:
            self.warnings.append(text)
            if not self.as_json:
                click.echo(f"warning: {text}", err=True)

    def result(self, values: Mapping[str, Any], *lines: str) -> None:
        """Print the result of a command."""
        on_stderr = values.get("file") == "-"  # the table has stdout for itself
        if self.as_json:
            click.echo(json.dumps({**values, "warnings": self.warnings}, allow_nan=False, default=str), err=on_stderr)
        elif not self.quiet:
            click.echo("\n".join(printable(line) for line in lines), err=on_stderr)

    @contextmanager
    def showing_warnings(self) -> Iterator[None]:
        """Convert the library's warnings into lines; drop warnings of other packages for programmers."""

        def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
            ours = category.__module__.startswith("contrastive_curvature") or filename.startswith(package)
            if ours and not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
                self.warn(str(message))

        package = contrastive_curvature.__path__[0]
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield


class Job(NamedTuple):
    """One call of a command.

    Attributes:
        console: Output of the command.
        options: Arguments and options by name.
        sources: Opened inputs, by the option that names them.
    """

    console: Console
    options: SimpleNamespace
    sources: Mapping[str, Source]


def report(error: BaseException, *, as_json: bool, with_traceback: bool) -> int:
    """Print an error on stderr as one line, or as one JSON object, and return the exit code."""
    # click converts Ctrl-C and the end of a file into an Abort.
    if isinstance(error, click.Abort) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return BAD_INPUT
    if with_traceback:
        traceback.print_exception(error)
    code, line = _exit_code(error), printable(" ".join(_text(error).split()))
    plain = {"error": line, "kind": type(error).__name__, "exit_code": code}
    click.echo(json.dumps(plain) if as_json else f"error: {line}", err=True)
    return code


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return error.exit_code
    bad_path = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG)
    return BAD_INPUT if bad_path or isinstance(error, _BAD_INPUTS) else FAILED


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; no result was written"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{error.format_message()} See: {error.ctx.command_path} --help"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror:
        what = _FULL.get(error.errno or 0, error.strerror)
        done = " Nothing was written under that name." if error.errno in _FULL else ""
        return f"{error.filename or 'writing the result'}: {what}.{done}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({error}). Use a smaller --batch-size, or fewer inputs."
    if isinstance(error, ContrastiveCurvatureError):
        return str(error)
    return f"{type(error).__name__}: {error}. The same command with --traceback shows where."


def readable(text: str) -> str:
    r"""Escape the bytes of a name that are not UTF-8, as ``\xff``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def printable(text: str) -> str:
    """Also escape control characters: a name in an unknown file could clear or move the line."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), readable(text))


def needed(module: str, argument: str, install: str) -> Any:
    """Import a module of an optional package; raise with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(argument, f"{package} to be installed", "none", f"Run: pip install {install}") from error


@contextmanager
def their_code(argument: str, wanted: str, hint: str = "") -> Iterator[None]:
    """Convert an error of other people's code into an error of the argument that names the code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(argument, wanted, reason, f"{hint} --traceback shows where.".strip()) from error

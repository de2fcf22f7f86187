"""Exit codes, and the one line that an error becomes."""

from __future__ import annotations

import errno
import json
import re
import sys
import traceback

import click

from contrastive_curvature.errors import (
    DivergenceError,
    InputError,
    NotFittedError,
    ProcessError,
    UnsupportedError,
    expected,
)

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "INTERRUPTED",
    "BadInputError",
    "exit_code",
    "line_of",
    "missing",
    "printable",
    "report",
]

BAD_INPUT = 2
"""The arguments or the files are not what the command takes."""

FAILED = 1
"""Anything else: the disk is full, the memory is not enough, a defect of this program."""

INTERRUPTED = 130
"""Ctrl-C, as the shells count it: 128 plus the number of the signal."""

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is too large",
}
_PATHS = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
# Those of C0 and C1, line ends of Unicode, and what turns the direction of writing.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PLACES = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


def printable(text: str) -> str:
    """A text whose control characters are written out: a name in a foreign file could clear or move the line."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def missing(argument: str, package: str, run: str) -> str:
    """The message where a package is missing.

    Args:
        argument: What needs it.
        package: Its name.
        run: What to type to install it.
    """
    return expected(argument, f"{package} to be installed", "none", f"Run: {run}")


class BadInputError(click.ClickException):
    """A file or an argument that the command cannot take; the message is one sentence that says what to do."""

    exit_code = BAD_INPUT


def exit_code(error: BaseException) -> int:
    """The status that a command ends with after this error."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return error.exit_code
    cause = error.__cause__
    if isinstance(error, (ProcessError, DivergenceError)) or (isinstance(cause, OSError) and cause.errno in _FULL):
        return FAILED
    if isinstance(error, (InputError, UnsupportedError, NotFittedError)):
        return BAD_INPUT
    if isinstance(error, OSError) and (isinstance(error, _PLACES) or error.errno in _PATHS):
        return BAD_INPUT
    return FAILED


def line_of(error: BaseException) -> str:
    """What is printed after ``error: ``, without a line break."""
    return printable(" ".join(_text(error).split()))


def _text(error: BaseException) -> str:
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
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
    if type(error).__module__.startswith("contrastive_curvature."):
        return str(error)
    return f"{type(error).__name__}: {error}. The same command with --traceback shows where."


def report(error: BaseException, *, as_json: bool, with_traceback: bool) -> int:
    """Print an error on stderr, and give the exit code.

    Args:
        error: What ended the command.
        as_json: One JSON object with the keys ``error``, ``kind`` and ``exit_code`` in place of the line.
        with_traceback: Python's traceback before the line.
    """
    # click takes the end of a file for an interruption at a prompt, of which there are none here.
    if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):
        error = error.__cause__
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return BAD_INPUT
    code = exit_code(error)
    if with_traceback and sys.stderr is not None:
        traceback.print_exception(error, file=sys.stderr)
    line = line_of(error)
    plain = {"error": line, "kind": type(error).__name__, "exit_code": code}
    click.echo(json.dumps(plain) if as_json else f"error: {line}", err=True)
    return code

"""The command with its sub-commands, which are imported when they are used."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import contrastive_curvature
from contrastive_curvature.apps.cli.errors import FAILED, report

__all__ = ["COMMANDS", "CommandGroup", "cli", "main"]

NAME = "contrastive-curvature"

COMMANDS = {
    "fit": ("fit:fit", "Fit a posterior to a trained encoder, and save it."),
    "score": ("score:score", "Write mu, kappa, uncertainty and p-value of inputs to CSV or Parquet."),
    "search": ("search:search", "Search a gallery: neighbours, P(match), no match."),
    "evaluate": ("evaluate:evaluate", "Measure a posterior: all metrics, plots, one HTML page."),
    "info": ("info:info", "Show what is in a saved posterior."),
    "completion": ("completion:completion", "Print the completion script of a shell."),
}
"""Name -> (module:attribute inside ``contrastive_curvature.apps.cli``, its line in ``--help``)."""


class CommandGroup(click.Group):
    """A group that imports a command when it is used, and turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        found: click.Command = getattr(importlib.import_module(f"contrastive_curvature.apps.cli.{module}"), attribute)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # click would print an empty line before it tells of an interruption.
            raise click.Abort from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called.

        Raises:
            click.UsageError: There is none of that name; the message has the nearest one.
        """
        # The completion of a shell asks too, and takes no error.
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], COMMANDS, 1) or [", ".join(COMMANDS)]
            msg = f"No such command {args[0]!r}. Did you mean {near[0]}?"
            raise click.UsageError(msg, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; in stand-alone mode the process ends with the exit code."""
        given = list(sys.argv[1:] if args is None else args)
        code = self._run(given, prog_name or NAME, complete_var, **extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, given: list[str], prog_name: str, complete_var: str | None, **extra: Any) -> int:
        try:
            found = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
            # A reader that went away, as `| head`, shows at the last.
            if sys.stdout is not None:
                sys.stdout.flush()
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else FAILED
        except BrokenPipeError:
            _close_stdout()
            return FAILED
        except BaseException as error:  # Ctrl-C and defects too are told in one line
            return report(error, as_json="--json" in given, with_traceback="--traceback" in given)
        return found if isinstance(found, int) else 0


def _close_stdout() -> None:
    # Python would flush again at its end, and complain.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(contrastive_curvature.__version__, prog_name=NAME)
def cli() -> None:
    """How sure is an embedding? Fit a Laplace posterior to a trained encoder, and use it.

    \b
    contrastive-curvature fit train.npz --out posterior --calibrate validation.npz
    contrastive-curvature score posterior new.npz --out scores.csv
    contrastive-curvature search posterior --gallery train.npz --queries new.npz --out hits.csv

    Exit codes: 0 fine, 2 wrong usage or bad input, 1 anything else, 130 Ctrl-C.
    """  # noqa: D301


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code.

    Args:
        argv: Arguments after the command's name; those of the process by default.
    """
    cli.main(argv)
    raise AssertionError

"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.errors import expected

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.sources import Columns

__all__ = [
    "PATH",
    "SHARE",
    "check_device",
    "computing_options",
    "json_object",
    "key_values",
    "source_options",
    "take_columns",
]

_SOURCES = ("source", "test", "unknown", "gallery", "queries", "validation", "calibration")
"""Parameters of the commands that are paths of sources."""

_Command = TypeVar("_Command", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


class _Share(click.FloatRange):
    """A number in (0, 1); NaN, which compares with nothing, is refused too."""

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True, max_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not in the range 0<x<1.", param, ctx)
        return found


SHARE = _Share()


def source_options(command: _Command) -> _Command:
    """``--encoder``, ``--encoder-options`` and the columns of tables."""
    for option in (
        click.option("--id-column", metavar="NAME", help="Identifiers in a .csv or .jsonl (default: row numbers)."),
        click.option("--label-column", metavar="NAME", default="label", show_default=True, help="Classes in a table."),
        click.option("--text-column", metavar="NAME", default="text", show_default=True, help="Texts in a table."),
        click.option(
            "--encoder-options",
            metavar="JSON",
            callback=lambda _, __, value: json_object("--encoder-options", value),
            help="Arguments by name for the function, timm.create_model or SentenceTransformer, as a JSON object.",
        ),
        click.option(
            "--encoder",
            metavar="SPEC",
            help="module:function (runs your code: a function that returns the encoder, or (encoder, transform)), "
            "timm:NAME, or sentence-transformers:NAME_OR_FOLDER. A saved posterior remembers the latter two.",
        ),
    ):
        command = option(command)
    return command


def computing_options(command: _Command) -> _Command:
    """``--batch-size`` and ``--device``."""
    for option in (
        click.option("--device", default="cpu", show_default=True, help="As torch names it: cpu, cuda, cuda:1."),
        click.option(
            "--batch-size", type=click.IntRange(min=1), default=256, show_default=True, help="Inputs at once."
        ),
    ):
        command = option(command)
    return command


def take_columns(options: dict[str, Any]) -> Columns:
    """The columns of a table, taken out of a command's options.

    Raises:
        BadInputError: One was given, and no source has it: none is a table, or no table has such classes.
    """
    from contrastive_curvature.apps.cli.sources import Columns

    columns = Columns(options.pop("text_column"), options.pop("label_column"), options.pop("id_column"))
    context = click.get_current_context(silent=True)
    if context is not None:
        _check_columns(context, columns)
    return columns


def _check_columns(context: click.Context, columns: Columns) -> None:
    from contrastive_curvature.apps.cli.sources import TEXTS, kind_of
    from contrastive_curvature.apps.cli.tables import read_table

    names = ("text_column", "label_column", "id_column")
    given = [name for name in names if context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)]
    if not given:
        return
    paths = [context.params[name] for name in _SOURCES if context.params.get(name) is not None]
    tables = [path for path in paths if kind_of(path) == TEXTS]
    if not tables:
        option = f"--{given[0].replace('_', '-')}"
        raise BadInputError(expected(option, "it with a .csv or .jsonl", ", ".join(map(str, paths)) or "no source"))
    if "label_column" in given and all(read_table(path, columns)[1] is None for path in tables):
        wanted = f"a column with classes in {', '.join(map(str, tables))}"
        raise BadInputError(expected("--label-column", wanted, f"{columns.label!r}, which has none"))


def check_device(name: str) -> str:
    """A device that computes here.

    Raises:
        BadInputError: torch knows no such device, or it is not there.
    """
    import torch

    try:
        float(torch.zeros(1, device=name) + 1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInputError(expected("--device", "a device of this machine", f"{name!r} ({reason})")) from error
    return name


def json_object(argument: str, text: str | None) -> dict[str, Any]:
    """A JSON object; an empty one for no text.

    Raises:
        BadInputError: Something else.
    """
    if text is None:
        return {}
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadInputError(expected(argument, """a JSON object, as '{"num_classes": 128}'""", f"{text!r}"))
    return found


def _refuse_constant(name: str) -> None:
    # NaN is no JSON, and no file of JSON could keep it.
    raise ValueError(name)


def key_values(argument: str, texts: tuple[str, ...]) -> dict[str, Any]:
    """``NAME=VALUE`` options; a value is read as JSON, or else as a text.

    Raises:
        BadInputError: There is no ``=``, or a name comes twice.
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise BadInputError(expected(argument, "NAME=VALUE", f"{text!r}"))
        if name in out:
            raise BadInputError(expected(argument, f"{name} once", "it twice"))
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out

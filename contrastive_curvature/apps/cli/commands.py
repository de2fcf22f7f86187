"""What a user can type: ``contrastive-curvature``, its commands and their options; torch is imported when they run."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class

import contrastive_curvature
from contrastive_curvature.apps.cli.console import BadInputError, Console, console_options, report

_NAME = "contrastive-curvature"

_PATH = click.Path(path_type=Path)
_SOURCE = click.Path(exists=True, allow_dash=True, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
_LIMIT = click.FloatRange(0, 1, min_open=True)
_POSITIVE = click.FloatRange(0, min_open=True)


class _Group(click.Group):
    """A group that turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of use."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; ``report`` is ``evaluate``, whose result it is."""
        return super().get_command(ctx, "evaluate" if cmd_name == "report" else cmd_name)

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
        try:
            code = super().main(given, prog_name or _NAME, complete_var, standalone_mode=False, **extra) or 0
        except Exception as error:  # defects too are told in one line
            code = report(error, as_json="--json" in given, with_traceback="--traceback" in given)
        if standalone_mode:
            sys.exit(code)
        return code


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, by default with the arguments of the process, and end the process with its exit code."""
    cli.main(argv)
    raise AssertionError


def _json_object(_: click.Context, option: click.Parameter, text: str | None) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}", parse_constant=_refuse_constant)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise BadInputError(option.opts[0], """a JSON object, as '{"num_classes": 128}'""", f"{text!r}")
    return options


def _json(_: click.Context, option: click.Parameter, text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        raise BadInputError(option.opts[0], "JSON", f"{text!r}") from None


def _refuse_constant(name: str) -> None:
    # NaN is no JSON, and no file of JSON could keep it.
    raise ValueError(name)


def _key_values(_: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` options; a value is read as JSON, or else as a text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise BadInputError(option.opts[0], "NAME=VALUE", f"{text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _table_name(_: click.Context, option: click.Parameter, path: Path) -> Path:
    if str(path) in ("-", "/dev/stdout"):
        return Path("-")
    if path.suffix.lower() not in (".csv", ".parquet"):
        wanted = "a name that ends in .csv or .parquet, or - for stdout"
        raise BadInputError(f"{option.opts[0]} {path}", wanted, f"{path.name!r}")
    if not path.parent.is_dir():
        wanted = "a file in a folder that exists"
        raise BadInputError(f"{option.opts[0]} {path}", wanted, f"no folder {path.parent}")
    return path


def _check_searched(options: dict[str, Any]) -> None:
    """Refuse a search in nothing, or in an index that is there and yet to be written."""
    index = options["index"]
    if index is None:
        if options["gallery"] is None:
            raise BadInputError("--gallery, --index", "one of them", "neither")
        return
    if options["gallery"] is not None and index.exists():
        hint = "Leave --gallery out to search it, or name a new file."
        raise BadInputError(f"--index {index}", "a new file, with --gallery", "one that is there", hint)
    if options["gallery"] is None and not index.exists():
        hint = "Give --gallery to write it."
        raise BadInputError(f"--index {index}", "an index", "no such file", hint)


def _refuse_both(options: dict[str, Any], first: str, second: str) -> None:
    if options[first] is not None and options[second] is not None:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in (first, second))
        raise BadInputError(names, "one of them", "both")


_table_option = click.option(
    "--out",
    type=_PATH,
    required=True,
    callback=_table_name,
    help="File that is written: .csv or .parquet; - for CSV on stdout.",
)

_prior_strength_option = click.option(
    "--prior-strength",
    type=_POSITIVE,
    help="Prior precision as a multiple of the mean curvature (default: 0.01).",
)
_prior_precision_option = click.option(
    "--prior-precision", type=_POSITIVE, help="Prior precision itself, in place of --prior-strength."
)


def _data_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all commands that read a SOURCE share."""
    for option in (
        click.option("--device", default="cpu", help="As torch names it: cpu, cuda, cuda:1."),
        click.option("--batch-size", type=click.IntRange(min=1), default=256, help="Inputs at once."),
        click.option(
            "--skip-unreadable", is_flag=True, help="Leave out broken images, and name them; reads every image twice."
        ),
        click.option("--id-column", metavar="NAME", help="Identifiers in a .csv or .jsonl (default: row numbers)."),
        click.option("--label-column", metavar="NAME", help="Classes in a table (default: label)."),
        click.option("--text-column", metavar="NAME", help="Texts in a table (default: text)."),
        click.option(
            "--encoder-options",
            metavar="JSON",
            callback=_json_object,
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


def _command(
    module: str, *sources: str, labelled: bool = False, short_help: str, example: str
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that has its help and refuses options that do not go together.

    A command opens its sources, which refuses missing and malformed ones before torch is imported; calls the function
    of its name in a module of this folder, which computes and writes; and prints the result that this returns.

    Args:
        module: In ``contrastive_curvature.apps.cli``.
        *sources: Options that name sources.
        labelled: Whether SOURCE must have classes.
        short_help: A line of the list of commands.
        example: Words that follow the name of the command.
    """

    def decorate(check: Callable[..., None]) -> click.Command:
        name = check.__name__

        @functools.wraps(check)
        def run(as_json: bool, quiet: bool, **options: Any) -> None:
            console = Console(as_json=as_json, quiet=quiet)
            with console.showing_warnings():
                check(options)
                if sources:
                    from contrastive_curvature.apps.cli.readers import Columns
                    from contrastive_curvature.apps.cli.sources import open_sources

                    columns = Columns(*(options.pop(f"{each}_column") for each in Columns._fields))
                    paths, skip = {each: options.pop(each) for each in sources}, options.pop("skip_unreadable")
                    options["sources"] = open_sources(paths, columns, skip_unreadable=skip)
                    if labelled:
                        options["sources"]["source"].check_classes("SOURCE")
                work = getattr(importlib.import_module(f"contrastive_curvature.apps.cli.{module}"), name)
                console.result(*work(console, **options))

        epilog = f"Example: {_NAME} {name} {example}"
        return cli.command(name, short_help=short_help, epilog=epilog)(run)

    return decorate


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
)
@click.version_option(contrastive_curvature.__version__, prog_name=_NAME)
def cli() -> None:
    """How sure is an embedding? Fit a Laplace posterior to a trained encoder, and use it.

    \b
    contrastive-curvature fit train.npz --out posterior --calibrate validation.npz
    contrastive-curvature score posterior new.npz --out scores.csv
    contrastive-curvature search posterior --gallery train.npz --queries new.npz --out hits.csv

    Exit codes: 0 fine, 2 wrong usage or bad input, 1 anything else, 130 Ctrl-C.
    """  # noqa: D301


@_command(
    "fit",
    "source",
    "calibrate",
    "held_out",
    "gallery",
    labelled=True,
    short_help="Fit a posterior to a trained encoder, and save it.",
    example="train.npz --out posterior --calibrate validation.npz --loss supcon",
)
@click.argument("source", type=_SOURCE)
@click.option("--out", type=_PATH, required=True, help="Folder of the posterior; it is made.")
@click.option("--overwrite", is_flag=True, help="Replace a saved posterior in that folder; other files in it stay.")
@click.option("--last-layer", type=_SOURCE, help="An .npz with weight (D, F) and bias (D,), for a feature folder.")
@click.option("--calibrate", type=_SOURCE, help="Inputs that the encoder was not trained on: p-values.")
@click.option(
    "--calibration-share", type=_SHARE, help="Calibrate with this share of SOURCE, which is then left out of the fit."
)
@click.option(
    "--loss",
    default="contrastive",
    help="A loss of the library that needs labels only, as infonce, supcon, siglip, triplet or logistic.",
)
@click.option("--margin", type=float, help="Of the losses contrastive and triplet (defaults 0.7 and 0.2).")
@click.option("--temperature", type=float, help="Of the losses infonce and supcon.")
@click.option(
    "--loss-option",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_key_values,
    help="Another argument of the loss; repeatable.",
)
@click.option(
    "--weights", type=click.Choice(["last_layer", "all"]), default="last_layer", help="Which weights get a posterior."
)
@click.option(
    "--structure",
    type=click.Choice(["kron_lowrank", "diag", "kron", "full", "lowrank"]),
    help="Of the posterior's precision (default: kron_lowrank for the last layer, kron for all weights).",
)
@_prior_strength_option
@_prior_precision_option
@click.option(
    "--option",
    "curvature",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_key_values,
    help="Another entry of backend_kwargs.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of every random choice.")
@click.option("--held-out", type=_SOURCE, help="Queries with classes that did not train the encoder: a retriever.")
@click.option("--gallery", type=_SOURCE, help="What the retriever searches (default: SOURCE).")
@click.option("--wrong-answers", type=_LIMIT, default=0.02, help="At most this share of its answers; 1: any.")
@click.option(
    "--false-matches", type=_LIMIT, default=0.05, help="At most this share of queries whose class is not there; 1: any."
)
@click.option("--false-alarms", type=_LIMIT, default=0.01, help="At most this share of known queries; 1: any.")
@click.option("--confidence", type=_SHARE, default=0.9, help="With which --wrong-answers holds.")
@_data_options
@console_options
def fit(options: dict[str, Any]) -> None:
    """Fit a posterior to a trained encoder with its training data SOURCE, and save it.

    SOURCE is one of:

    \b
    .npz           features (N, F) and labels (N,), with weight (D, F) and bias (D,) of the encoder's last layer
    .npz           embeddings (N, D) and labels (N,), where nothing of the encoder is known (see below)
    .npz           inputs (N, ...) and labels (N,), with --encoder
    feature folder what contrastive_curvature.features wrote, with --last-layer or --encoder
    image folder   one folder of images for each class, with --encoder
    .csv, .jsonl   columns text and label, with --encoder
    -              the lines of a .jsonl from stdin

    The features are what the last linear layer takes in; the embedding is features @ weight.T + bias. Give them where
    you can: the library's results are of these. Embeddings alone are taken as the features of a last layer that is
    the identity. That was not evaluated there: compare it on your own data before you rely on it.

    The losses infonce, supcon, siglip, multi-similarity and triplet compare an input with those of its batch, in a
    random order: give the --batch-size of the encoder's training. All others count all pairs of the data.

    With --held-out the folder is a retriever for the commands answer, add and evaluate: it answers a query with its
    nearest point of the gallery, is unsure, or calls the query unknown, each at the rates that you choose. Its
    posterior, for the commands score and search, is the folder posterior inside it.

    --encoder module:function runs your own code, and only that. Give it again to score, search and evaluate.
    """  # noqa: D301
    _refuse_both(options, "calibrate", "calibration_share")
    if options["gallery"] is not None and options["held_out"] is None:
        raise BadInputError("--gallery", "it with --held-out", "it alone")
    _refuse_both(options, "prior_strength", "prior_precision")


@_command(
    "fit",
    "source",
    "calibrate",
    labelled=True,
    short_help="Add training data to a saved posterior.",
    example="posterior new.npz --out newer --calibrate validation.npz",
)
@click.argument("folder", type=_FOLDER)
@click.argument("source", type=_SOURCE)
@click.option("--out", type=_PATH, required=True, help="Folder of the new posterior; it is made.")
@click.option("--overwrite", is_flag=True, help="Replace a saved posterior in that folder, as FOLDER itself.")
@click.option("--calibrate", type=_SOURCE, help="Inputs that the encoder was not trained on: p-values.")
@_prior_strength_option
@_prior_precision_option
@_data_options
@console_options
def update(options: dict[str, Any]) -> None:
    """Add the training data SOURCE to the posterior in FOLDER, choose its prior and calibrate it again, and save it.

    The encoder stays as it is. Pairs of the earlier data with the new are not formed. A class has the name that it had
    in the fit, or its number where the fit had numbers; other ones are new classes. Not for the structure lowrank.
    What a SOURCE may be: contrastive-curvature fit --help.
    """
    _refuse_both(options, "prior_strength", "prior_precision")


@_command(
    "calibrate",
    "source",
    short_help="Calibrate a saved posterior with other known inputs.",
    example="posterior site.npz --out posterior-site --score uncertainty",
)
@click.argument("folder", type=_FOLDER)
@click.argument("source", type=_SOURCE)
@click.option(
    "--out", type=_PATH, help="Folder that is written (default: FOLDER itself, whose calibration is replaced)."
)
@click.option("--overwrite", is_flag=True, help="Replace a saved posterior in --out; other files in it stay.")
@click.option(
    "--score",
    type=click.Choice(["novelty", "uncertainty"]),
    default="novelty",
    help="What p-values are of: unknown kinds, or uncertain embeddings.",
)
@click.option(
    "--by-class", is_flag=True, help="Compare with inputs of the predicted class: alpha then holds for each class."
)
@_data_options
@console_options
def calibrate(options: dict[str, Any]) -> None:
    """Calibrate the posterior in FOLDER with the known inputs SOURCE, of a new site for example, without a fit.

    Afterwards at most a share alpha of inputs like those of SOURCE has a p-value of at most alpha. SOURCE needs no
    classes; it has inputs that the encoder was not trained on, 1 / alpha of them or more for the smallest alpha that
    you will use. With --by-class, that many of each predicted class.
    """


@_command(
    "score",
    "source",
    short_help="Write mu, kappa, uncertainty and p-value of inputs to CSV or Parquet.",
    example="posterior new.npz --out scores.csv --alpha 0.05",
)
@click.argument("folder", type=_FOLDER)
@click.argument("source", type=_SOURCE)
@_table_option
@click.option("--mu/--no-mu", default=True, help="Whether the embedding itself is written.")
@click.option(
    "--alpha",
    type=_SHARE,
    help="Share of known inputs that may be flagged as unknown, in the column known (default: 0.01).",
)
@_data_options
@console_options
def score(options: dict[str, Any]) -> None:
    """Write what the posterior in FOLDER says of the inputs SOURCE.

    \b
    id               name of the image in its folder, number of the row, or the identifiers that SOURCE has
    mu_0, mu_1, ...  the embedding, of norm 1
    kappa            its concentration
    uncertainty      how far it may turn, in radians; rank inputs by it
    novelty          how unlike the known inputs it is; rank unknown inputs by it
    p_value          share of known inputs that are at least as unlike them
    known            p_value > alpha

    The last three need a posterior that was calibrated, and are left out otherwise; known needs 1 / alpha - 1
    calibration inputs. Inputs are read and written in
    batches. SOURCE needs no classes; what it may be: contrastive-curvature fit --help.
    """  # noqa: D301


@_command(
    "search",
    "gallery",
    "queries",
    short_help="Search a gallery: the neighbours of each query.",
    example="posterior --gallery train.npz --queries new.npz -k 5 --out hits.csv",
)
@click.argument("folder", type=_FOLDER)
@click.option("--gallery", type=_SOURCE, help="Inputs that are searched.")
@click.option("--index", type=_PATH, help="A gallery embedded before; with --gallery, a new file.")
@click.option("--queries", type=_SOURCE, required=True, help="Inputs that are searched for.")
@click.option("-k", "k", type=click.IntRange(min=1), default=5, help="Neighbours of each query.")
@_table_option
@_data_options
@console_options
def search(options: dict[str, Any]) -> None:
    """Search a gallery with the posterior in FOLDER, and write the hits, k rows a query.

    \b
    query, rank  identifier of the query; 1 is the nearest
    neighbour    identifier of the gallery point
    label        its class, where the gallery has classes
    cosine       between query and neighbour
    uncertainty  of the query, in radians

    Whether to act on a hit, at a stated rate of errors, a retriever says: fit --held-out, then answer.

    --gallery with --index FILE embeds the gallery once, and writes it; --index FILE alone searches that. Then there are
    no labels.
    """  # noqa: D301
    _check_searched(options)


@_command(
    "retriever",
    "source",
    short_help="Answer queries, or say which are unsure or unknown, to CSV or Parquet.",
    example="retriever new.npz --out answers.csv",
)
@click.argument("folder", type=_FOLDER)
@click.argument("source", type=_SOURCE)
@_table_option
@_data_options
@console_options
def answer(options: dict[str, Any]) -> None:
    """Answer the queries SOURCE by the gallery of the retriever in FOLDER, which fit --held-out wrote.

    \b
    id          name of the image in its folder, number of the row, or the identifiers that SOURCE has
    decision    answer, unsure or unknown
    label       class of the nearest point of the gallery
    neighbour   its position in the gallery of the fit, or the identifier that add printed
    confidence  probability that it is right
    p_value     share of the held-out queries that are at least as unlike the known inputs

    The last line says what is promised. SOURCE needs no classes; what it may be: contrastive-curvature fit --help.
    """  # noqa: D301


@_command(
    "retriever",
    "source",
    labelled=True,
    short_help="Add points to the gallery of a retriever.",
    example="retriever new.npz --out larger",
)
@click.argument("folder", type=_FOLDER)
@click.argument("source", type=_SOURCE)
@click.option("--out", type=_PATH, help="Folder that is written (default: FOLDER itself, which is replaced).")
@click.option("--overwrite", is_flag=True, help="Replace a saved retriever in --out.")
@_data_options
@console_options
def add(options: dict[str, Any]) -> None:
    """Add SOURCE with its classes to the gallery of the retriever in FOLDER, and find its limits again.

    The last line says what is promised, and of which classes nothing is: those without a held-out query.
    """


@_command(
    "evaluate",
    "test",
    "unknown",
    "gallery",
    short_help="Measure a posterior: a report of all metrics, plots, one HTML page.",
    example="posterior --test test.npz --unknown other.npz --gallery train.npz --out report",
)
@click.argument("folder", type=_FOLDER)
@click.option(
    "--test", type=_SOURCE, required=True, help="Known inputs with classes, neither fitted nor calibrated on."
)
@click.option("--unknown", type=_SOURCE, help="Inputs of kinds that the encoder does not know.")
@click.option("--gallery", type=_SOURCE, help="Inputs with classes that are searched (default: the other test inputs).")
@click.option("--out", type=_PATH, help="Folder of its own for the report of a posterior; an earlier one is replaced.")
@click.option("-k", "ks", type=click.IntRange(min=1), multiple=True, default=(1, 5, 10), help="Ranks.")
@click.option(
    "--alpha", "alphas", type=_SHARE, multiple=True, default=(0.01, 0.02, 0.05, 0.1), help="Thresholds of the p-value."
)
@click.option("--samples", type=click.IntRange(min=0), default=30, help="Networks that vote; 0 for none.")
@click.option("--shown", type=click.IntRange(min=0), default=12, help="Inputs of each group shown.")
@click.option("--title", default="How sure is this encoder?", help="Heading of the page.")
@_data_options
@console_options
def evaluate(options: dict[str, Any]) -> None:
    """Measure the posterior in FOLDER, and write a report (the command report is the same).

    \b
    report.html       one page that needs no network: threshold slider, curves, the most and least certain inputs
    metrics.json      every number, and why a number is missing
    novelty, sparsification, reliability, det    the plots, each as .png and .svg

    Of a saved retriever, print how often it answers and errs on --test, without --out.

    Repeat -k and --alpha for several values. Without classes, unknown inputs or a calibration, the parts that need them
    say so, and the others are there. The page explains each number. What a SOURCE may be:
    contrastive-curvature fit --help.
    """  # noqa: D301


@_command(
    "files",
    "example",
    short_help="Write a posterior as ONNX, as a torch graph, or as arrays for numpy.",
    example="posterior --out scorer.npz",
)
@click.argument("folder", type=_FOLDER)
@click.option("--out", type=_PATH, required=True, help="File: .pt2, .onnx, .npz or .safetensors.")
@click.option("--example", type=_SOURCE, help="Inputs to trace a graph with (default: made up).")
@click.option("--p-value/--no-p-value", default=None, help="Whether p-values are in it (default: if calibrated).")
@click.option(
    "--dynamic-axes",
    metavar="JSON",
    callback=_json,
    help='Axes of a graph whose sizes may change: [2, 3], or {"input_ids": [1], "attention_mask": [1]}.',
)
@_data_options
@console_options
def export(options: dict[str, Any]) -> None:
    """Write the posterior in FOLDER so that it needs neither this library nor laplace-torch.

    \b
    .pt2                a graph of encoder and posterior for torch.export.load
    .onnx               the same for onnxruntime
    .npz, .safetensors  arrays for a scorer that needs numpy alone, and takes the features of the last layer
    """  # noqa: D301


@_command(
    "files",
    "source",
    labelled=True,
    short_help="Write what the last layer takes in, once for many fits.",
    example="train.npz --encoder my_encoder:encoder --out train_features",
)
@click.argument("source", type=_SOURCE)
@click.option("--out", type=_PATH, required=True, help="The feature folder; it is made.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16", "float64"]), default="float32", help="On disk."
)
@_data_options
@console_options
def features(options: dict[str, Any]) -> None:
    """Run --encoder once over SOURCE, and write what its last layer takes in, with classes and identifiers.

    The folder is a SOURCE of all commands, with the same --encoder, and of the library. A run that
    was interrupted goes on when it is called again.
    """


@_command(
    "info",
    short_help="Show what is in a saved posterior.",
    example="posterior --json",
)
@click.argument("folder", type=_FOLDER)
@console_options
def info(options: dict[str, Any]) -> None:
    """Show what is in the saved posterior FOLDER, without loading its encoder.

    Loss, structure, prior, calibration, dimensions, versions, and how score and search make the encoder.
    """


@cli.command(
    short_help="Print the completion script of a shell.",
    epilog="Example: contrastive-curvature completion bash >> ~/.bashrc",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete this command's options.

    \b
    bash: contrastive-curvature completion bash >> ~/.bashrc
    zsh:  contrastive-curvature completion zsh >> ~/.zshrc
    fish: contrastive-curvature completion fish > ~/.config/fish/completions/contrastive-curvature.fish
    """  # noqa: D301
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, _NAME, "_CONTRASTIVE_CURVATURE_COMPLETE").source())

"""The commands of ``contrastive-curvature`` and their options; torch is imported when a command runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click import Argument, Choice, FloatRange, IntRange, Option
from click.shell_completion import get_completion_class

import contrastive_curvature
from contrastive_curvature.apps.cli.console import Console, Job, report

_NAME = "contrastive-curvature"


class _Group(click.Group):
    """A group that turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of use."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; ``report`` is another name of ``evaluate``."""
        return super().get_command(ctx, "evaluate" if cmd_name == "report" else cmd_name)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **options: Any,
    ) -> Any:
        """Run a command line; in stand-alone mode the process ends with the exit code."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, prog_name or _NAME, complete_var, standalone_mode=False, **options) or 0
        except Exception as error:  # defects are also reported in one line
            code = report(error, as_json="--json" in words, with_traceback="--traceback" in words)
        if standalone_mode:
            sys.exit(code)
        return code


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of the process, and end the process with its exit code."""
    cli.main(argv)


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
)
@click.version_option(contrastive_curvature.__version__, prog_name=_NAME)
def cli() -> None:
    """How sure is an embedding? Fit a Laplace posterior to a trained encoder, and use it.

    \b
    contrastive-curvature fit train.npz --out posterior --calibrate validation.npz
    contrastive-curvature score posterior new.npz --out scores.csv
    contrastive-curvature evaluate posterior --test test.npz --out report

    The page command_line.html of the site has every command in use.

    Exit codes: 0 fine, 2 wrong usage or bad input, 1 anything else, 130 Ctrl-C.
    """  # noqa: D301


def _assignment(text: str) -> tuple[str, Any]:
    """Return name and value of ``NAME=VALUE``; the value is read as JSON if possible, otherwise as text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"expected NAME=VALUE, got {text!r}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"""expected a JSON object, as '{{"num_classes": 128}}', got {text!r}""")
    return value


_PATH = click.Path(path_type=Path)
_SOURCE = click.Path(exists=True, allow_dash=True, path_type=Path)
_LABELLED = click.Path(exists=True, allow_dash=True, path_type=Path)  # a source that must have classes
_SHARE = FloatRange(0, 1, min_open=True, max_open=True)
_RATE = FloatRange(0, 1, min_open=True)


def _option(names: str, text: str, **attributes: Any) -> Option:
    return Option(names.split(), help=text, **attributes)


# Options and arguments of several commands.
_FOLDER = Argument(["folder"], type=click.Path(exists=True, file_okay=False, path_type=Path))
_INPUTS, _TRAINING = Argument(["source"], type=_SOURCE), Argument(["source"], type=_LABELLED)
_OVERWRITE = _option("--overwrite", "Replace what an earlier run wrote there; other files stay.", is_flag=True)
_NEW_FOLDER = _option("--out", "Folder of the posterior; it is made.", type=_PATH, required=True)
_SAME_FOLDER = _option("--out", "Folder that is written (default: FOLDER itself, which is replaced).", type=_PATH)
_TABLE = _option("--out", "File that is written: .csv or .parquet; - for CSV on stdout.", type=_PATH, required=True)
_CALIBRATE = _option("--calibrate", "Inputs that the encoder was not trained on: p-values.", type=_SOURCE)
_PRIOR_STRENGTH = _option(
    "--prior-strength",
    "Prior precision as a multiple of the mean curvature (default: 0.01).",
    type=FloatRange(0, min_open=True),
)
_OF_SOURCES = (
    _option(
        "--encoder",
        "module:function (runs your code: a function that returns the encoder, or (encoder, transform)), "
        "timm:NAME, or sentence-transformers:NAME_OR_FOLDER. A saved posterior remembers the latter two.",
        metavar="SPEC",
    ),
    _option(
        "--encoder-options",
        "Arguments by name for the function, timm.create_model or SentenceTransformer, as a JSON object.",
        metavar="JSON",
        type=_json_object,
    ),
    _option("--text-column", "Texts in a table (default: text).", metavar="NAME"),
    _option("--label-column", "Classes in a table (default: label).", metavar="NAME"),
    _option("--id-column", "Identifiers in a .csv or .jsonl (default: row numbers).", metavar="NAME"),
    _option("--skip-unreadable", "Leave out broken images, and name them; reads every image twice.", is_flag=True),
    _option("--batch-size", "Inputs at once.", type=IntRange(min=1), default=256),
    _option("--device", "As torch names it: cpu, cuda, cuda:1.", default="cpu"),
)
_OF_ALL = (
    _option("--json as_json", "One JSON object on stdout; errors as JSON on stderr.", is_flag=True),
    _option("-q --quiet", "No progress bars and no lines; errors and warnings stay.", is_flag=True),
    _option("--traceback", "Show Python's traceback of an error.", is_flag=True, expose_value=False),
)


def _command(*own: click.Parameter, example: str) -> Callable[[Callable[[], None]], None]:
    """Build a command from a function that has its name and its help text.

    A command opens its sources (missing and malformed ones are refused before torch is imported), calls the function of
    the same name in :mod:`.work`, which computes and writes, and prints the result of that function.

    Args:
        *own: Arguments and options of this command, in addition to those of all commands and of all that read sources.
        example: Words after the name of the command, for an example.
    """

    def decorate(described: Callable[[], None]) -> None:
        name = described.__name__
        sources = {str(each.name): each.type for each in own if each.type in (_SOURCE, _LABELLED)}

        def run(as_json: bool, quiet: bool, **options: Any) -> None:
            console, opened = Console(as_json=as_json, quiet=quiet), {}
            with console.showing_warnings():
                if sources:
                    from contrastive_curvature.apps.cli.sources import Columns, open_sources

                    columns = Columns(*(options[f"{each}_column"] for each in Columns._fields))
                    paths = {each: options[each] for each in sources if options[each] is not None}
                    opened = open_sources(paths, columns, skip_unreadable=options["skip_unreadable"])
                    for each, source in opened.items():
                        if sources[each] is _LABELLED:
                            source.check_classes()
                from contrastive_curvature.apps.cli import work

                console.result(*getattr(work, name)(Job(console, SimpleNamespace(**options), opened)))

        params = [*own, *(_OF_SOURCES if sources else ()), *_OF_ALL]
        epilog = f"Example: {_NAME} {name} {example}"
        cli.add_command(click.Command(name, callback=run, params=params, help=described.__doc__, epilog=epilog))

    return decorate


@_command(
    _TRAINING,
    _NEW_FOLDER,
    _OVERWRITE,
    _option(
        "--last-layer",
        "An .npz with weight (D, F) and bias (D,), for a feature folder.",
        type=click.Path(exists=True, path_type=Path),
    ),
    _CALIBRATE,
    _option(
        "--calibration-share", "Calibrate with this share of SOURCE, which is then left out of the fit.", type=_SHARE
    ),
    _option(
        "--loss",
        "A loss of the library that needs labels only, as infonce, supcon, siglip, triplet or logistic.",
        default="contrastive",
    ),
    _option(
        "--loss-option",
        "An argument of the loss, as temperature=0.07 or margin=0.5; repeatable.",
        multiple=True,
        metavar="NAME=VALUE",
        type=_assignment,
    ),
    _option("--weights", "Which weights get a posterior.", type=Choice(["last_layer", "all"]), default="last_layer"),
    _option(
        "--structure",
        "Of the posterior's precision (default: kron_lowrank for the last layer, kron for all weights).",
        type=Choice(["kron_lowrank", "diag", "kron", "full", "lowrank"]),
    ),
    _PRIOR_STRENGTH,
    _option("--option", "Another entry of backend_kwargs.", multiple=True, metavar="NAME=VALUE", type=_assignment),
    _option("--seed", "Of every random choice.", type=IntRange(0, 2**63 - 1), default=0),
    _option("--held-out", "Queries with classes that did not train the encoder: a retriever.", type=_LABELLED),
    _option("--gallery", "What the retriever searches (default: SOURCE).", type=_LABELLED),
    _option(
        "--head",
        "With --held-out: train a head on the encoder's outputs, for an encoder that has not seen SOURCE.",
        is_flag=True,
    ),
    _option("--wrong-answers", "At most this share of its answers; 1: any.", type=_RATE, default=0.02),
    _option(
        "--false-matches", "At most this share of queries whose class is not there; 1: any.", type=_RATE, default=0.05
    ),
    _option("--false-alarms", "At most this share of known queries; 1: any.", type=_RATE, default=0.01),
    _option("--confidence", "With which --wrong-answers holds.", type=_SHARE, default=0.9),
    example="train.npz --out posterior --calibrate validation.npz --loss supcon",
)
def fit() -> None:
    """Fit a posterior to a trained encoder with its training data SOURCE, and save it.

    SOURCE is one of:

    \b
    .npz           features (N, F) and labels (N,), with weight (D, F) and bias (D,) of the encoder's last layer
    .npz           embeddings (N, D) and labels (N,), if the encoder is unknown (see below)
    .npz           inputs (N, ...) and labels (N,), with --encoder
    feature folder written by contrastive_curvature.features, with --last-layer or --encoder
    image folder   one folder of images for each class, with --encoder
    .csv, .jsonl   columns text and label, with --encoder
    -              the lines of a .jsonl from stdin

    The features are the inputs of the last linear layer; the embedding is features @ weight.T + bias. Use features if
    you can: the library was evaluated with features. Embeddings alone count as the features of a last layer that is the
    identity. This was not evaluated: compare it on your own data before you rely on it.

    The losses infonce, supcon, siglip, multi-similarity and triplet compare an input with the inputs of its batch, in a
    random order: give the --batch-size of the encoder's training. All others count all pairs of the data.

    With --held-out the folder is a retriever for the commands answer, add and evaluate: it answers a query with its
    nearest point of the gallery, is unsure, or calls the query unknown, each at the rates that you choose. Its
    subfolder named posterior works with the command score.

    --encoder module:function runs your own code, and only that. Give it again to score and evaluate.
    """  # noqa: D301


@_command(
    _FOLDER,
    _TRAINING,
    _NEW_FOLDER,
    _OVERWRITE,
    _CALIBRATE,
    _PRIOR_STRENGTH,
    example="posterior new.npz --out newer --calibrate validation.npz",
)
def update() -> None:
    """Add the training data SOURCE to the posterior in FOLDER, choose its prior and calibrate it again, and save it.

    The encoder stays as it is. Pairs of the earlier data with the new are not formed. Name a class as in the fit (or
    give its number, if the fit had numbers); other names are new classes. Not for the structure lowrank. What a SOURCE
    may be: contrastive-curvature fit --help.
    """


@_command(
    _FOLDER,
    _INPUTS,
    _SAME_FOLDER,
    _OVERWRITE,
    _option(
        "--score",
        "What p-values are of: unknown kinds, or uncertain embeddings.",
        type=Choice(["novelty", "uncertainty"]),
        default="novelty",
    ),
    _option("--by-class", "Compare with inputs of the predicted class: alpha then holds for each class.", is_flag=True),
    example="posterior site.npz --out posterior-site --score uncertainty",
)
def calibrate() -> None:
    """Calibrate the posterior in FOLDER with the known inputs SOURCE, of a new site for example, without a fit.

    Afterwards at most a share alpha of inputs like those of SOURCE has a p-value of at most alpha. SOURCE needs no
    classes; it has inputs that the encoder was not trained on, 1 / alpha of them or more for the smallest alpha that
    you will use. With --by-class, SOURCE needs that many inputs of each predicted class.
    """


@_command(
    _FOLDER,
    _INPUTS,
    _TABLE,
    _option("--mu/--no-mu", "Whether the embedding itself is written.", default=True),
    _option(
        "--alpha",
        "Share of known inputs that may be flagged as unknown, in the column known (default: 0.01).",
        type=_SHARE,
    ),
    example="posterior new.npz --out scores.csv --alpha 0.05",
)
def score() -> None:
    """Write embeddings and scores of the inputs SOURCE under the posterior in FOLDER.

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


@_command(_FOLDER, _INPUTS, _TABLE, example="retriever new.npz --out answers.csv")
def answer() -> None:
    """Answer the queries SOURCE by the gallery of the retriever in FOLDER, which fit --held-out wrote.

    \b
    id          name of the image in its folder, number of the row, or the identifiers that SOURCE has
    decision    answer, unsure or unknown
    label       class of the nearest point of the gallery
    neighbour   its position in the gallery of the fit, or the identifier that add printed
    confidence  probability that it is right
    p_value     share of the held-out queries that are at least as unlike the known inputs

    The last line states the promise. SOURCE needs no classes; what it may be: contrastive-curvature fit --help.
    """  # noqa: D301


@_command(_FOLDER, _TRAINING, _SAME_FOLDER, _OVERWRITE, example="retriever new.npz --out larger")
def add() -> None:
    """Add SOURCE with its classes to the gallery of the retriever in FOLDER, and find its limits again.

    The last line states the promise, and names the classes without one, which have no held-out query.
    """


@_command(
    _FOLDER,
    _option("--test", "Known inputs with classes, neither fitted nor calibrated on.", type=_SOURCE, required=True),
    _option("--unknown", "Inputs of kinds that the encoder does not know.", type=_SOURCE),
    _option("--gallery", "Inputs with classes that are searched (default: the other test inputs).", type=_SOURCE),
    _option("--out", "Folder of its own for the report of a posterior; an earlier one is replaced.", type=_PATH),
    _option("-k ks", "Ranks.", type=IntRange(min=1), multiple=True, default=(1, 5, 10)),
    _option(
        "--alpha alphas", "Thresholds of the p-value.", type=_SHARE, multiple=True, default=(0.01, 0.02, 0.05, 0.1)
    ),
    _option("--samples", "Networks that vote; 0 for none.", type=IntRange(min=0), default=30),
    _option("--shown", "Inputs of each group shown.", type=IntRange(min=0), default=12),
    _option("--title", "Heading of the page.", default="How sure is this encoder?"),
    example="posterior --test test.npz --unknown other.npz --gallery train.npz --out report",
)
def evaluate() -> None:
    """Measure the posterior in FOLDER, and write a report (the command report is the same).

    \b
    report.html       one page that needs no network: threshold slider, curves, the most and least certain inputs
    metrics.json      every number, and why a number is missing
    novelty, sparsification, reliability, det    the plots, each as .png and .svg

    For a saved retriever, print how often it answers and errs on --test, without --out.

    Repeat -k and --alpha for several values. Without classes, unknown inputs or a calibration, the parts that need
    these say so, and the other parts are complete. The page explains each number. What a SOURCE may be:
    contrastive-curvature fit --help.
    """  # noqa: D301


@_command(
    _FOLDER,
    _option("--out", "File: .pt2, .onnx, .npz or .safetensors.", type=_PATH, required=True),
    _option("--example", "Inputs to trace a graph with (default: made up).", type=_SOURCE),
    _option("--p-value/--no-p-value", "Whether p-values are in it (default: if calibrated).", default=None),
    _option(
        "--dynamic-axes",
        'Axes of a graph whose sizes may change: [2, 3], or {"input_ids": [1], "attention_mask": [1]}.',
        metavar="JSON",
        type=json.loads,
    ),
    example="posterior --out scorer.npz",
)
def export() -> None:
    """Write the posterior or the retriever in FOLDER so that it needs neither this library nor laplace-torch.

    \b
    .pt2                a graph of encoder and posterior for torch.export.load
    .onnx               the same for onnxruntime
    .npz, .safetensors  arrays for a scorer that needs numpy alone, and takes the features of the last layer;
                        of a retriever it answers
    """  # noqa: D301


@_command(
    _TRAINING,
    _option("--out", "The feature folder; it is made.", type=_PATH, required=True),
    _option("--dtype", "On disk.", type=Choice(["float32", "bfloat16", "float16", "float64"]), default="float32"),
    example="train.npz --encoder my_encoder:encoder --out train_features",
)
def features() -> None:
    """Run --encoder once over SOURCE, and write the inputs of its last layer, with classes and identifiers.

    The folder is a SOURCE of all commands, with the same --encoder, and of the library. An interrupted run continues
    when you call it again.
    """


@_command(_FOLDER, example="posterior --json")
def info() -> None:
    """Show the content of the saved posterior or retriever FOLDER, without loading its encoder.

    Loss, structure, prior, calibration, dimensions, versions, and how score and evaluate make the encoder.
    """


@cli.command(epilog=f"Example: {_NAME} completion bash >> ~/.bashrc")
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
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

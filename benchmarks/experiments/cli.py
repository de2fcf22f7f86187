"""Command line of the experiments."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.config import Config, check_config, read_data
from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.data.registry import NONE, OUTSIDE, SHUFFLED
from benchmarks.experiments.defaults import DEFAULTS, TABLE_DATA, defaults_of
from benchmarks.experiments.networks import NETWORKS
from benchmarks.experiments.plan import DEMO, Table, known_rows, plan_cells, table_rows
from contrastive_curvature import Distance, PDFix
from contrastive_curvature.errors import ContrastiveCurvatureError

_SMALL = {"digits", "fashionmnist", "mnist", SHUFFLED, NONE, None}
"""A few megabytes each: the demonstration fetches them unasked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment of one table, or go on with it.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0; 1 when a cell failed; 2 when something was refused, which happens before any training, except
        for saved curves, which are read when plots are drawn.
    """
    started = time.perf_counter()
    config = parse(argv)
    try:
        check_config(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        rows = table_rows(config.table, config.methods)
        from benchmarks.experiments.run import Runner, load_results, open_run

        data = read_data(config)
        runner = Runner(config, data, rows)
        open_run(config, data)
        # Before a training of hours, not after it: what was saved earlier goes into the report.
        load_results(config.out)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = plan_cells(rows, config.seeds)
    print(f"{_sizes(data)}; {len(cells)} cells. Run folder: {config.out}")
    try:
        text = runner.run(cells)
    except ContrastiveCurvatureError as error:
        # A cell that fails is reported, and the run goes on; this is a file of the run folder.
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "start again with the same options to go on"
        print(f"\ninterrupted; {again} (--out {config.out})", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - started
    print(f"\n{text}\n{seconds:.0f} seconds in all; figures and seed {config.seeds[0]}'s plots in\n{config.out}")
    return 1 if runner.failed else 0


def parse(argv: Sequence[str] | None = None) -> Config:
    """Turn arguments into a configuration, with the defaults of table and data set.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        The configuration, unchecked but for types and names.
    """
    options = vars(_parser().parse_args(argv))
    table = options["table"]
    name = options["data"] = options["data"] or TABLE_DATA[table][0]
    given = vars(defaults_of(table, name)) | options
    if given["ece_samples"] is None:
        given["ece_samples"] = given["n_samples"]
    if given["out"] is None:
        given["out"] = _new_folder(name, given["dim"]) if table == DEMO else Path("runs") / f"table{table}-{name}"
    given["download"] |= table == DEMO and {name, given["ood"]} <= _SMALL
    given["seeds"] = tuple(given["seeds"])
    given["methods"] = None if given["methods"] is None else tuple(given["methods"])
    return Config(**given)


def _new_folder(data: str, dim: int) -> Path:
    """A run folder of its own for each demonstration, named by the time."""
    wanted = path = Path("runs") / f"{data}-d{dim}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    number = 2
    while path.exists():
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def _sizes(data: RetrievalData) -> str:
    outside = "none" if data.ood is None else f"{len(data.ood):,} ({data.ood_title})"
    return f"{data.title}: {len(data.train):,} training, {len(data.test):,} test images; out of distribution: {outside}"


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A number, or none."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = f"{kind.__name__} or none"
    return read


def _table(text: str) -> Table:
    return int(text) if text.isdecimal() else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description="Train, predict, score, and compare: the tables of Warburg et al. (2023) beside the paper's "
        "figures, or the demonstration. A run that was interrupted goes on when it is started again with the same "
        "options.",
        epilog="Rows (--methods). Table 1: "
        + ", ".join(row.key for row in table_rows(1))
        + ". Tables 2 and 3: "
        + ", ".join(table_keys(2))
        + ". Table 4: "
        + ", ".join(table_keys(4))
        + ". demo: "
        + ", ".join(table_keys(DEMO))
        + ".",
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_training(parser)
    _add_posterior(parser)
    _add_running(parser)
    return parser


def table_keys(table: Table) -> list[str]:
    """Keys of all rows of a table, those that run only when asked for in brackets."""
    default = [row.key for row in table_rows(table)]
    return [row.key if row.key in default else f"[{row.key}]" for row in known_rows(table)]


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what").add_argument
    add("--table", type=_table, choices=list(TABLE_DATA), required=True, help="of the paper, or the demonstration")
    shown = "; ".join(f"{table}: {', '.join(names)}" for table, names in TABLE_DATA.items())
    add("--data", choices=sorted(DEFAULTS), help=f"data set, the table's first by default ({shown})")
    names = ", ".join([*OUTSIDE, SHUFFLED, NONE])
    add(
        "--ood",
        metavar="NAME",
        help=f"what stands for the unknown, sized to the network: {names} (default: the data's)",
    )
    add("--methods", nargs="+", metavar="ROW", help="rows (default: all but those in brackets, see below)")
    add("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="several give mean ± deviation (default: 0)")
    add("--train-size", type=int, metavar="N", help="training images (default: all)")
    add("--test-size", type=int, metavar="N", help="test images, in and out of distribution each (default: all)")
    add("--image-size", type=int, metavar="PIXELS", help="side of the images (default: the data set's)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training, the same for all methods").add_argument

    def add_default(option: str, what: str, **more: Any) -> None:
        shown = f"{what} (default: {_defaults(option)})"
        add(f"--{option.replace('_', '-')}", default=argparse.SUPPRESS, help=shown, **more)

    add_default("network", "encoder", choices=sorted(NETWORKS))
    add_default("dim", "latent dimension", type=int, metavar="D")
    add_default("epochs", "passes over the training images, 3 in the demonstration of 60,000", type=int, metavar="N")
    add_default("batch_size", "images a step, all pairs of which count", type=int, metavar="N")
    add_default("lr", "learning rate of RMSprop in the first epoch", type=float)
    inside = "distance in (0, 2] inside which negatives count, in training and curvature, or none: always"
    add_default("margin", inside, type=_or_none(float), metavar="DISTANCE")
    per_class = "images of each class in a batch, or none: at random"
    add_default("per_class", per_class, type=_or_none(int), metavar="N")
    precision = (
        "of the encoder's forward passes in training (default: %(default)s); bfloat16 is many times slower on a "
        "processor without instructions for it, AMX or AVX512_BF16"
    )
    add("--precision", choices=("float32", "bfloat16"), default="float32", help=precision)
    memory = "what online LAM forgets in a step, alpha of Eq. 5 (default: the paper's %(default)s)"
    add("--memory-factor", type=float, default=1e-4, metavar="ALPHA", help=memory)


def _add_posterior(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("curvature and scores").add_argument
    add(
        "--distance", choices=[str(distance) for distance in Distance], help="of the curvature (default: the library's)"
    )
    fixes = [str(fix) for fix in PDFix]
    add("--pd-fix", choices=fixes, help="of the curvature (default: the library's); full is quadratic in the images")
    add("--negative-weight", type=float, metavar="W", help="of the curvature, in [0, 1) (default: the library's)")
    add("--n-samples", type=int, default=100, metavar="N", help="samples for scores (default: %(default)s)")
    passes = "passes of MC dropout at most, for which a sample is a pass of the whole network (default: no limit)"
    add("--dropout-passes", type=int, metavar="N", help=passes)
    add("--ece-samples", type=int, metavar="N", help="samples that vote, for the ECE (default: as --n-samples)")
    features = "training images whose features the 10-NN rows search at most: for the paper's network 37 kB of memory "
    features += "and 4 ms of two cores each (default: %(default)s)"
    add("--baseline-features", type=int, default=10_000, metavar="N", help=features)


def _add_running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--data-root", type=Path, default=Path("data"), metavar="DIR", help="of all data sets (default: %(default)s)")
    download = "fetch files that are missing, where a library has them (the demonstration does so for small data sets)"
    add("--download", action="store_true", help=download)
    out = (
        "run folder; one with the same options is gone on with (default: runs/tableN-DATA, runs/DATA-dD-TIME for demo)"
    )
    add("--out", type=Path, metavar="DIR", help=out)
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--workers", type=int, default=0, metavar="N", help="processes that read images (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's)")
    add("--quiet", action="store_false", dest="progress", help="no progress bars")


def _defaults(option: str) -> str:
    """The defaults of an option, data sets with the same value together."""
    by_value: dict[str, list[str]] = {}
    for name, defaults in DEFAULTS.items():
        value = getattr(defaults, option)
        shown = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        by_value.setdefault(shown, []).append(name)
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in by_value.items())

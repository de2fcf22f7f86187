"""Command line of the retrieval experiments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.networks import NETWORKS
from benchmarks.retrieval.config import DEFAULTS, TABLE_DATA, Config, check_config, read_data
from benchmarks.retrieval.plan import known_rows, plan_cells, table_rows
from contrastive_curvature.errors import ContrastiveCurvatureError

__all__ = ["main", "parse"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment of one table, or go on with it.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0; 1 when a cell failed; 2 when something was refused, which happens before any training, except
        for saved curves, which are read when plots are drawn.
    """
    config = parse(argv)
    try:
        check_config(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        rows = table_rows(config.table, config.methods)
        from benchmarks.retrieval.run import Runner
        from benchmarks.retrieval.store import load_results, open_run

        data = read_data(config)
        runner = Runner(config, data)
        runner.check(rows)
        runner.warm_up()
        open_run(config, data)
        # Before a training of hours, not after it: what was saved earlier goes into the report.
        load_results(config.out)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = plan_cells(rows, config.seeds)
    print(f"table {config.table}, {data.title}: {len(cells)} cells. Run folder: {config.out}")
    try:
        text = runner.run(cells)
    except ContrastiveCurvatureError as error:
        # A cell that fails is reported, and the run goes on; this is a file of the run folder.
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; start again with the same options to go on ({config.out})", file=sys.stderr)
        return 130
    print(f"\n{text}\nFigures and plots are in {config.out}")
    return 1 if runner.failed else 0


def parse(argv: Sequence[str] | None = None) -> Config:
    """Turn arguments into a configuration, with the defaults of table and data set.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        The configuration, unchecked but for types and names.
    """
    given = _parser().parse_args(argv)
    name = TABLE_DATA[given.table][0] if given.data is None else given.data
    defaults = DEFAULTS[name]

    def chosen(option: str) -> Any:
        value = getattr(given, option)
        missing = value is (_UNSET if option == "per_class" else None)
        return getattr(defaults, option) if missing else value

    taken = ("network", "dim", "epochs", "batch_size", "lr", "margin", "per_class")
    return Config(
        table=given.table,
        data=name,
        **{option: chosen(option) for option in taken},
        train_size=given.train_size,
        test_size=given.test_size,
        image_size=given.image_size,
        n_samples=given.n_samples,
        ece_samples=given.n_samples if given.ece_samples is None else given.ece_samples,
        dropout_passes=given.dropout_passes,
        memory_factor=given.memory_factor,
        device=given.device,
        data_root=given.data_root,
        download=given.download,
        out=Path("runs") / f"table{given.table}-{name}" if given.out is None else given.out,
        seeds=tuple(given.seeds),
        methods=None if given.methods is None else tuple(given.methods),
        workers=given.workers,
        threads=given.threads,
        progress=not given.quiet,
    )


_UNSET = object()


def _per_class(text: str) -> int | None:
    return None if text == "none" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retrieval",
        description="Reproduce a table of Warburg et al. (2023): train, predict, score, and compare with the paper. "
        "A run that was interrupted goes on when it is started again with the same options.",
        epilog="Rows (--methods). Table 1: "
        + ", ".join(row.key for row in table_rows(1))
        + ". Tables 2 and 3: "
        + ", ".join(table_keys(2))
        + ". Table 4: "
        + ", ".join(table_keys(4))
        + ".",
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_training(parser)
    _add_running(parser)
    return parser


def table_keys(table: int) -> list[str]:
    """Keys of all rows of a table, those that run only when asked for in brackets."""
    default = [row.key for row in table_rows(table)]
    return [row.key if row.key in default else f"[{row.key}]" for row in known_rows(table)]


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what").add_argument
    add("--table", type=int, choices=sorted(TABLE_DATA), required=True)
    shown = "; ".join(f"table {table}: {', '.join(names)}" for table, names in TABLE_DATA.items())
    add("--data", choices=sorted(DEFAULTS), help=f"data set, the table's first by default ({shown})")
    add("--methods", nargs="+", metavar="ROW", help="rows (default: all but those in brackets, see below)")
    add("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="several give mean ± deviation (default: 0)")
    add("--train-size", type=int, metavar="N", help="training images (default: all)")
    add("--test-size", type=int, metavar="N", help="test images, in and out of distribution each (default: all)")
    add("--image-size", type=int, metavar="PIXELS", help="side of the images (default: the data set's)")
    add("--n-samples", type=int, default=100, metavar="N", help="samples for scores (default: %(default)s)")
    passes = "passes of MC dropout at most, for which a sample is a pass of the whole network (default: no limit)"
    add("--dropout-passes", type=int, metavar="N", help=passes)
    add("--ece-samples", type=int, metavar="N", help="samples that vote, for the ECE (default: as --n-samples)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training, the same for all methods").add_argument
    add("--network", choices=sorted(NETWORKS), help=f"default: {_defaults('network')}")
    add("--dim", type=int, metavar="D", help=f"latent dimension (default: {_defaults('dim')})")
    add("--epochs", type=int, metavar="N", help=f"passes over the training images (default: {_defaults('epochs')})")
    add("--batch-size", type=int, metavar="N", help=f"images a step (default: {_defaults('batch_size')})")
    add("--lr", type=float, help=f"learning rate of RMSprop in the first epoch (default: {_defaults('lr')})")
    add(
        "--margin", type=float, help=f"distance in (0, 2] inside which negatives count (default: {_defaults('margin')})"
    )
    memory = "what online LAM forgets in a step, alpha of Eq. 5 (default: the paper's %(default)s)"
    add("--memory-factor", type=float, default=1e-4, metavar="ALPHA", help=memory)
    per_class = f"images of each class in a batch, or none: at random (default: {_defaults('per_class')})"
    add("--per-class", type=_per_class, default=_UNSET, metavar="N", help=per_class)


def _add_running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--data-root", type=Path, default=Path("data"), metavar="DIR", help="of all data sets (default: %(default)s)")
    add("--download", action="store_true", help="fetch files that are missing, where a library has them")
    out = "run folder; one with the same options is gone on with (default: runs/tableN-DATA)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--workers", type=int, default=0, metavar="N", help="processes that read images (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's)")
    add("--quiet", action="store_true", help="no progress bars")


def _defaults(option: str) -> str:
    """The defaults of an option, data sets with the same value together."""
    by_value: dict[str, list[str]] = {}
    for name, defaults in DEFAULTS.items():
        value = getattr(defaults, option)
        shown = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        by_value.setdefault(shown, []).append(name)
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in by_value.items())

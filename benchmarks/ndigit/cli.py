"""Command line of the tables on N-digit MNIST."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.experiments.store import open_folder
from benchmarks.machine import write_atomically
from benchmarks.ndigit.config import EPOCHS, Config, check_config, read_data
from benchmarks.ndigit.document import ITERATIONS
from benchmarks.ndigit.rows import ROWS
from contrastive_curvature.errors import ContrastiveCurvatureError

__all__ = ["main", "parse"]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the tables, or go on with them.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0; 2 when something was refused; 130 when interrupted.
    """
    started = time.perf_counter()
    config = parse(argv)
    try:
        check_config(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        data = read_data(config)
        open_folder(config.out, config.identity())
        from benchmarks.ndigit.figures import draw_all
        from benchmarks.ndigit.markdown import markdown
        from benchmarks.ndigit.run import run

        results = run(config, data)
        text = markdown(results)
        write_atomically(config.out / "results.json", json.dumps(results, indent=1) + "\n")
        write_atomically(config.out / "results.md", text)
        draw_all(config, data)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; start again with the same options to go on (--out {config.out})", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - started
    print(f"\n{text}\n{seconds:.0f} seconds in all; tables and figures of seed {config.seeds[0]} in {config.out}")
    return 0


def parse(argv: Sequence[str] | None = None) -> Config:
    """Turn arguments into a configuration, unchecked but for types and choices."""
    given = vars(_parser().parse_args(argv))
    if given["dim"] is None:
        given["dim"] = given["n"]
    if given["out"] is None:
        given["out"] = Path("runs") / f"ndigit-n{given['n']}-d{given['dim']}"
    given["seeds"] = tuple(given["seeds"])
    given["methods"] = None if given["methods"] is None else tuple(given["methods"])
    return Config(**given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ndigit",
        description='Tables 1 and 2 of "Modeling uncertainty with hedged instance embedding" beside its figures: point '
        "and hedged embeddings on N-digit MNIST, and LAM on the point embedding. A run that was interrupted goes on "
        "when it is started again with the same options.",
        epilog="Rows (--methods): " + ", ".join(row.key for row in ROWS) + ".",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what").add_argument
    add("--n", type=int, choices=(2, 3), default=2, help="digits of an image (default: %(default)s)")
    add("--dim", type=int, metavar="D", help="latent dimension (default: as many as digits)")
    add("--methods", nargs="+", metavar="ROW", help="rows (default: all but hedged_mixture4)")
    add("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="several give mean ± deviation (default: 0)")
    add("--train-size", type=int, default=100_000, metavar="N", help="training images (default: %(default)s)")
    add("--test-size", type=int, default=10_000, metavar="N", help="images of each test part (default: %(default)s)")
    add("--pairs", type=int, default=10_000, metavar="N", help="test pairs of each part (default: %(default)s)")
    validate = "judge on images of the last 10,000 training digits, which training leaves out, to choose options"
    add("--validate", action="store_true", help=validate)
    add = parser.add_argument_group("training, the same for all methods").add_argument
    steps = f"training steps, a multiple of {EPOCHS}; the document has {ITERATIONS:,} (default: %(default)s)"
    network = "document: two convolutions and one fully connected layer; hidden: 256 units before the last layer"
    add("--network", choices=("hidden", "document"), default="hidden", help=network + " (default: %(default)s)")
    add("--iterations", type=int, default=20_000, metavar="N", help=steps)
    add("--batch-size", type=int, default=128, metavar="N", help="images a step (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate of Adam at the start (default: %(default)s)")
    add("--kl-weight", type=float, default=1e-4, metavar="BETA", help="of hedged embeddings (default: %(default)s)")
    precision = "of the encoder's forward passes in training (default: %(default)s)"
    add("--precision", choices=("float32", "bfloat16"), default="float32", help=precision)
    add = parser.add_argument_group("running").add_argument
    add("--data-root", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="run folder (default: runs/ndigit-nN-dD)")
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's)")
    add("--quiet", action="store_false", dest="progress", help="no progress bars")
    return parser

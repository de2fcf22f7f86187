"""``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.driver import parts_of, run_parts
from benchmarks.machine import describe

_RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_ROOTS = ("runs/data", "data", "../shared/data")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts on the GPU, or go on with them.

    Returns:
        Exit status: 0 when all is done or there is no GPU; 1 when a part failed; 3 when the time was over and the same
        command goes on.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Tests, contract, benchmarks and the paper's table 2 on a GPU. What is finished is not run again: "
        "the same command goes on.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=39, help="for all of it (default: %(default)s)")
    names = [part.name for part in parts_of(Path(), Path(), Path(), rehearse=False)]
    add("--parts", nargs="+", metavar="PART", choices=names, default=names, help=f"only these (of {', '.join(names)})")
    again = "run these again though they are finished"
    add("--again", nargs="+", metavar="PART", choices=names, default=[], help=again)
    add("--rehearse", action="store_true", help="the same chain on the CPU with tiny sizes, in about two minutes")
    add("--data-root", type=Path, metavar="DIR", help=f"of Fashion-MNIST and MNIST (default: of {', '.join(_ROOTS)})")
    add("--work", type=Path, default=Path("runs/gpu"), metavar="DIR", help="to go on from (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="where results are copied (default: benchmarks/results/gpu)")
    given = parser.parse_args(argv)
    if not (given.rehearse or torch.cuda.is_available()):
        print("torch sees no GPU on this machine: nothing is run")
        return 0
    work = given.work / ("rehearsal" if given.rehearse else "all")
    results = work / "results"
    there = [Path(root) for root in _ROOTS if Path(root, "FashionMNIST").is_dir()]
    data = given.data_root or (there[0] if there else Path(_ROOTS[0]))
    parts = [part for part in parts_of(results, work, data, given.rehearse) if part.name in given.parts]
    machine = describe("cpu" if given.rehearse else "cuda")
    status = run_parts(parts, results, work / "logs", machine, 60 * given.minutes, given.again)
    out = given.out or (results if given.rehearse else _RESULTS)
    if out != results:
        shutil.copytree(results, out, dirs_exist_ok=True)
    print(f"results: {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import Places, real_parts, rehearsed_parts

_RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_ROOTS = ("runs/data", "data", "../shared/data")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts on the GPU, or go on with them.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0 when all is done or there is no GPU; 1 when a part failed; 2 when something was refused; 3 when
        the time was over and the same command goes on.
    """
    given = _parser().parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        hint = "make lint sets up .venv; or name another one: make gpu GPU_PYTHON=python3.12 (CONTRIBUTING.md)"
        print(f"error: {sys.executable} has no torch. {hint}", file=sys.stderr)
        return 2
    import torch

    from benchmarks.gpu.driver import run_parts
    from benchmarks.machine import describe

    if not (given.rehearse or torch.cuda.is_available()):
        print("torch sees no GPU on this machine: nothing is run")
        return 0
    work = given.work / ("rehearsal" if given.rehearse else "all")
    places = Places(work / "results", work, given.data_root or _data_root())
    parts = rehearsed_parts(places) if given.rehearse else real_parts(places)
    known = [part.name for part in parts]
    chosen = given.parts or known
    unknown = [name for name in [*chosen, *given.again] if name not in known]
    if unknown:
        print(f"error: --parts: expected some of {', '.join(known)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    machine = describe("cpu" if given.rehearse else "cuda")
    wanted = [part for part in parts if part.name in chosen]
    status = run_parts(wanted, places.results, work / "logs", machine, 60 * given.minutes, given.again)
    out = given.out or (places.results if given.rehearse else _RESULTS)
    if out != places.results:
        shutil.copytree(places.results, out, dirs_exist_ok=True)
    print(f"results: {out}")
    return status


def _data_root() -> Path:
    found = [Path(root) for root in _ROOTS if (Path(root) / "FashionMNIST").is_dir()]
    return found[0] if found else Path(_ROOTS[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Tests, contract, benchmarks and the paper's table 2 on a GPU. What is finished is not run again: "
        "the same command goes on.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=39, help="for all of it (default: %(default)s)")
    names = ", ".join(part.name for part in real_parts(Places(Path(), Path(), Path())))
    add("--parts", nargs="+", metavar="PART", help=f"only these (default: {names})")
    add("--again", nargs="+", default=[], metavar="PART", help="run these again though they are finished")
    add("--rehearse", action="store_true", help="the same chain on the CPU with tiny sizes, in about two minutes")
    add("--data-root", type=Path, metavar="DIR", help=f"of Fashion-MNIST and MNIST (default: of {', '.join(_ROOTS)})")
    add("--work", type=Path, default=Path("runs/gpu"), metavar="DIR", help="to go on from (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="where results are copied (default: benchmarks/results/gpu)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

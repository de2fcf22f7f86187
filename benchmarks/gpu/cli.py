"""Command line of everything on a GPU; imports torch only where there is one to look for."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.driver import Driver
from benchmarks.gpu.parts import Part, Places, real_parts, rehearsed_parts

_RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_ROOTS = ("runs/data", "data", "../shared/data")
_TRACES = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/kfd")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts on the GPU, or go on with them.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0 when all is done or there is no GPU; 1 when a part failed; 2 when something was refused; 3 when
        the time was over and the same command goes on.
    """
    given = _parser().parse_args(argv)
    if given.rehearse:
        device = "cpu"
    else:
        line = no_gpu()
        if line is not None:
            print(line)
            return 0
        device = "cuda"
    if importlib.util.find_spec("torch") is None:
        hint = "make lint sets up .venv; or name another one: make gpu GPU_PYTHON=python3.12 (CONTRIBUTING.md)"
        print(f"error: {sys.executable} has no torch. {hint}", file=sys.stderr)
        return 2
    work = given.work / ("rehearsal" if given.rehearse else "all")
    places = Places(work / "results", work, given.data_root or _data_root())
    parts = rehearsed_parts(places) if given.rehearse else real_parts(places, device)
    chosen = given.parts or [part.name for part in parts]
    unknown = [name for name in [*chosen, *given.again] if name not in [part.name for part in parts]]
    if unknown:
        names = ", ".join(part.name for part in parts)
        print(f"error: --parts: expected some of {names}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    return _drive([part for part in parts if part.name in chosen], places, device, given)


def _drive(parts: list[Part], places: Places, device: str, given: argparse.Namespace) -> int:
    from benchmarks.machine import describe

    driver = Driver(parts, places.results, places.work / "logs", describe(device), given.pack)
    status = driver.run(60 * given.minutes, given.again)
    out = places.results if given.rehearse and given.out is None else given.out or _RESULTS
    if out != places.results:
        shutil.copytree(places.results, out, dirs_exist_ok=True)
    print(f"results: {out}")
    return status


def no_gpu() -> str | None:
    """Why there is nothing to run on, in one line; ``None`` where there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        # Without torch the operating system is asked, since a machine without a GPU needs no torch to be told so.
        there = any(Path(trace).exists() for trace in _TRACES)
        return None if there else "no GPU on this machine: nothing is run"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU on this machine: nothing is run"


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
    add("--parts", nargs="+", metavar="PART", help="only these (default: all)")
    add("--again", nargs="+", default=[], metavar="PART", help="run these again though they are finished")
    add("--rehearse", action="store_true", help="the same chain on the CPU with tiny sizes, in about two minutes")
    add("--data-root", type=Path, metavar="DIR", help=f"of Fashion-MNIST and MNIST (default: of {', '.join(_ROOTS)})")
    add("--work", type=Path, default=Path("runs/gpu"), metavar="DIR", help="to go on from (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="where results are copied (default: benchmarks/results/gpu)")
    add("--pack", type=Path, metavar="FILE", help="also write all results into one archive, a .tar.gz")
    return parser

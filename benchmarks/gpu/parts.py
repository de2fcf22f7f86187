"""What is run on a GPU, in this order, each in a process of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """One process.

    Args:
        name: In file names and on the command line.
        command: Arguments after the name of the interpreter, which is the driver's own.
        minutes: Its time limit.
        goes_on: Whether a part that ran into its limit goes on, when it is called again, from where it was stopped.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    goes_on: bool = False


@dataclass(frozen=True)
class Places:
    """Folders.

    Args:
        results: Where the parts write ``NAME.json`` and ``NAME.md``.
        work: For what is large, or needed to go on.
        data: Of the data sets.
    """

    results: Path
    work: Path
    data: Path


_ALONE = ("laplace", "fit", "hessian", "losses", "network", "hosts")
_SUITE = {
    "contract": ("tests/laplace/test_contract.py",),
    "tests_laplace": ("tests/laplace", "--deselect", "tests/laplace/test_contract.py"),
    "tests_curvature": tuple(f"tests/{name}" for name in _ALONE if name != "laplace"),
    "tests_rest": ("tests", *(f"--ignore=tests/{name}" for name in _ALONE)),
}
"""The whole suite, in pieces that can be run again one by one."""

_NEED = {"tests/stores": ("faiss", "lancedb"), "tests/docs": ("mkdocs", "mkdocstrings", "markdown_it")}
"""Folders of tests that are left out where an optional package is missing."""

_SEEDS = ("0", "1", "2", "3", "4")


def real_parts(places: Places, device: str) -> list[Part]:
    """Everything, in under forty minutes on one H200.

    Args:
        places: Folders.
        device: Torch's name of it.
    """
    results, table = str(places.results), str(places.work / "table2")
    here, jobs = device.partition(":")[0], str(max(1, min(8, (os.cpu_count() or 2) - 2)))
    on, images = ("--device", device, "--out", results), ("--data-root", str(places.data))
    lacking = [folder for folder, names in _NEED.items() if not all(find_spec(name) for name in names)]
    less = [f"--ignore={folder}" for folder in lacking]
    return [
        Part("rates", ("-m", "benchmarks.gpu.rates", *on), 2),
        *(
            Part(
                name,
                ("-m", "benchmarks.gpu.suite", name, "--out", results, "--jobs", jobs, "--", *what, *less, "-k", here),
                6,
            )
            for name, what in _SUITE.items()
        ),
        Part("curvature", ("-m", "benchmarks.curvature", *on, *images), 3),
        Part("backends", ("-m", "benchmarks.backends", *on), 5),
        Part("scale", ("-m", "benchmarks.scale", *on), 5),
        Part("steps", ("-m", "benchmarks.steps", *on), 4),
        Part("fractions", ("-m", "benchmarks.gpu.fractions", results), 1),
        Part(
            "table2",
            ("-m", "benchmarks.gpu.table2", *on, *images, "--work", table, "--jobs", jobs, "--seeds", *_SEEDS),
            20,
            goes_on=True,
        ),
    ]


def rehearsed_parts(places: Places) -> list[Part]:
    """The same chain on the CPU in about two minutes: tiny sizes, a few tests."""
    results, table = str(places.results), str(places.work / "table2")
    on, images = ("--device", "cpu", "--out", results), ("--data-root", str(places.data))
    few = ("tests/laplace/test_contract.py", "-k", "TestTorchFunc and float32")
    sizes = ("--train-size", "60", "--test-size", "20", "--epochs", "1")
    few_rows = ("--seeds", "0", "1", "--methods", "deterministic", "norm", "--", *sizes, "--n-samples", "2")
    return [
        Part("rates", ("-m", "benchmarks.gpu.rates", *on, "--quick"), 1),
        Part("contract", ("-m", "benchmarks.gpu.suite", "contract", "--out", results, "--jobs", "1", "--", *few), 2),
        Part("curvature", ("-m", "benchmarks.curvature", *on, "--quick"), 1),
        Part("backends", ("-m", "benchmarks.backends", *on, "--quick"), 1),
        Part("scale", ("-m", "benchmarks.scale", *on, "--points", "1000", "2000", "--structures", "diag"), 2),
        Part("steps", ("-m", "benchmarks.steps", *on, "--quick"), 2),
        Part("fractions", ("-m", "benchmarks.gpu.fractions", results), 1),
        Part(
            "table2",
            ("-m", "benchmarks.gpu.table2", *on, *images, "--work", table, "--jobs", "1", *few_rows),
            3,
            goes_on=True,
        ),
    ]

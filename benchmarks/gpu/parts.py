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

    def writing(self, device: str) -> tuple[str, ...]:
        """Options of a benchmark: where it computes, and where its results go."""
        return ("--device", device, "--out", str(self.results))

    def table2(self, device: str, jobs: str, *more: str, minutes: float) -> Part:
        """The part that fills table 2."""
        table = ("--data-root", str(self.data), "--work", str(self.work / "table2"), "--jobs", jobs, *more)
        return Part("table2", ("-m", "benchmarks.gpu.table2", *self.writing(device), *table), minutes, goes_on=True)


_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", "--tb=short", "-rfEs")
_ALONE = ("laplace", "fit", "hessian", "losses", "network", "hosts")
_SUITE = {
    "contract": ("tests/laplace/test_contract.py",),
    "tests_laplace": ("tests/laplace", "--deselect", "tests/laplace/test_contract.py"),
    "tests_curvature": tuple(f"tests/{name}" for name in _ALONE if name != "laplace"),
    "tests_rest": ("tests", *(f"--ignore=tests/{name}" for name in _ALONE)),
}
"""The whole suite, in pieces that can be run again one by one."""

_NEED = {"tests/indexes": ("faiss", "lancedb"), "tests/docs": ("mkdocs", "mkdocstrings", "markdown_it")}
"""Folders of tests that are left out where an optional package is missing."""


_REHEARSED = 5.0
"""Minutes of a rehearsed part; on a quiet machine it takes a few seconds."""


def real_parts(places: Places) -> list[Part]:
    """Everything, in under forty minutes on one H200.

    Args:
        places: Folders.
    """
    jobs = str(max(1, min(8, (os.cpu_count() or 2) - 2)))
    lacking = [folder for folder, names in _NEED.items() if not all(find_spec(name) for name in names)]
    chosen = [*(f"--ignore={folder}" for folder in lacking), "-k", "cuda"]
    shared = ["-n", jobs] if find_spec("xdist") else []
    on = places.writing("cuda")
    return [
        Part("rates", ("-m", "benchmarks.gpu.rates", *on), 2),
        *(Part(name, (*_PYTEST, *what, *chosen, *shared), 6) for name, what in _SUITE.items()),
        Part("curvature", ("-m", "benchmarks.curvature", *on, "--data-root", str(places.data)), 3),
        Part("backends", ("-m", "benchmarks.backends", *on), 5),
        Part("scale", ("-m", "benchmarks.scale", *on), 5),
        Part("steps", ("-m", "benchmarks.steps", *on), 4),
        Part("fractions", ("-m", "benchmarks.gpu.fractions", str(places.results)), 1),
        places.table2("cuda", jobs, "--seeds", "0", "1", "2", "3", "4", minutes=20),
    ]


def rehearsed_parts(places: Places) -> list[Part]:
    """The same chain on the CPU in about two minutes: tiny sizes, a few tests."""
    on = places.writing("cpu")
    few = ("tests/laplace/test_contract.py", "-k", "TestTorchFunc and float32")
    sizes = ("--train-size", "60", "--test-size", "20", "--epochs", "1", "--n-samples", "2")
    rows = ("--seeds", "0", "1", "--methods", "deterministic", "norm", "--", *sizes)
    return [
        Part("rates", ("-m", "benchmarks.gpu.rates", *on, "--quick"), _REHEARSED),
        Part("contract", (*_PYTEST, *few), _REHEARSED),
        Part("curvature", ("-m", "benchmarks.curvature", *on, "--quick"), _REHEARSED),
        Part("backends", ("-m", "benchmarks.backends", *on, "--quick"), _REHEARSED),
        Part("scale", ("-m", "benchmarks.scale", *on, "--points", "1000", "2000", "--structures", "diag"), _REHEARSED),
        Part("steps", ("-m", "benchmarks.steps", *on, "--quick"), _REHEARSED),
        Part("fractions", ("-m", "benchmarks.gpu.fractions", str(places.results)), _REHEARSED),
        places.table2("cpu", "1", *rows, minutes=_REHEARSED),
    ]

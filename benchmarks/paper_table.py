"""Every number of the paper's tables 1 to 4 beside ours, and why they differ.

    python -m benchmarks.paper_table

Nothing is measured: ours are of the committed results. docs/results.md gets the table of Fashion-MNIST. A run of one's
own (``python -m benchmarks.experiments``) has the paper's numbers in its ``results.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.experiments import plan
from benchmarks.experiments.data import DATASETS
from benchmarks.machine import RESULTS, table, write_atomically

_SHORT = "3 epochs of all pairs of a batch, not 20 of mined ones; 5,000 test images"
_PRIOR = f"{_SHORT}; prior and temperature by this library's rule"
_HIB = "30,000 images, 2 epochs; an encoder of its own, not PFE's module"
_LONG = "20 epochs of all pairs of a batch, not of mined ones; forward passes in bfloat16"
_PRETRAINED = "another network, pretrained on other pictures of faces, perhaps of the same people"
_PRETRAINED_PRIOR = f"{_PRETRAINED}; prior by our rule"
_FACES = (
    "Not run: the rows that train an encoder, since ResNet-50's weights are not here. Ours have MobileFaceNet; "
    "out of distribution are the test faces with shuffled quarters, not CUB-200-2011. By the released code's "
    "definitions, as the paper's: a query without a positive is wrong at 1 and in the AUSC, right at 5 and 10. "
)
OURS: dict[tuple[str, str], list[tuple[str, dict[str, tuple[str, str]]]]] = {
    ("2", "fashionmnist"): [
        # file: the paper's row -> our row, why; of several files the first that has the row
        (
            "paper_fashionmnist_d3",
            dict.fromkeys(("deterministic", "pfe", "mc_dropout"), ("", _LONG))
            | dict.fromkeys(("laplace_posthoc_diag", "laplace_online_diag"), ("", f"{_LONG}; prior by our rule")),
        ),
        (
            "table2_fashionmnist_d3",
            dict.fromkeys(("deterministic", "deep_ensemble", "pfe", "mc_dropout"), ("", _SHORT))
            | {
                "laplace_posthoc_diag": ("laplace_posthoc", _PRIOR),
                "laplace_online_diag": ("laplace_online", f"{_PRIOR}; alpha = 1e-3"),
            },
        ),
        ("methods_fashionmnist_d3", {"hib": ("", _HIB)}),
    ],
    ("1", "lfw"): [
        (
            "table1_lfw",
            {row.key: ("", _PRETRAINED_PRIOR) for row in plan.known_rows("1") if row.method in plan.POST_HOC},
        )
    ],
    ("3", "lfw"): [
        ("table3_lfw", {"deterministic": ("", _PRETRAINED), "laplace_posthoc_diag": ("", _PRETRAINED_PRIOR)})
    ],
}
"""What was run on the paper's data."""
NOT_RUN = {
    ("1", "lfw"): f"{_FACES}[All rows](table1_lfw.md); the choices on [Fashion-MNIST](table1_fashionmnist.md)",
    ("2", "cifar10"): "Not run: neither CIFAR-10 nor SVHN is here",
    ("3", "cub200"): "Not run: neither CUB-200-2011 nor Cars-196 is here, nor ResNet-50's weights",
    ("3", "lfw"): f"{_FACES}Minus the norm of the output tells these faces as well ([all rows](table3_lfw.md))",
    ("4", "msls"): "Not run: MSLS is given on request. The paper's challenge set has no public positions: only the "
    "organisers' server gives its recall",
}
"""Why the other tables and rows have no number of ours."""
_PAPERS_SCORE = "inverse_kappa_sampled"


def figures_of(file: str, row: str) -> tuple[dict[str, float], int]:
    """Means of a committed row and its number of runs; of LAM with the paper's score, 1 / kappa of sampled networks."""
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"].get(row)
    if found is None:
        return {}, 0
    variants = found["variants"]
    figures = found["figures"] | variants.get(_PAPERS_SCORE, variants.get(plan.OWN, {}))
    if "map_at_1_released" in figures:  # queries without a positive, which the paper's figures count
        figures |= {name.removesuffix("_released"): figures[name] for name in figures if name.endswith("_released")}
    return {key: value["mean"] for key, value in figures.items() if value["mean"] is not None}, len(found["seeds"])


def section(number: str, data: str) -> str:
    """One of the paper's tables on one data set: in each cell the paper's number / ours."""
    columns, lines = plan.COLUMNS[number], []
    titles = {row.key: row.title for row in plan.known_rows(number)}
    for key, paper in plan.paper_rows(number, data).items():
        ours, why = _ours(number, data, key)
        cells = [
            f"{paper[name][0]:.2f} / {f'{ours[name]:.2f}' if name in ours else '–'}" if name in paper else "–"
            for name in columns
        ]
        lines.append([titles[key], *cells, why])
    reason = NOT_RUN.get((number, data))
    head = ["", *columns.values(), *(["what differs"] if (number, data) in OURS else [])]
    text = table(head, [line[: len(head)] for line in lines])
    return f"{reason}.\n\n{text}" if reason else text


def _ours(number: str, data: str, key: str) -> tuple[dict[str, float], str]:
    for file, rows in OURS.get((number, data), ()):
        if key in rows and (RESULTS / f"{file}.json").is_file():
            name, why = rows[key]
            ours, runs = figures_of(file, name or key)
            if ours:
                return ours, f"{why}; {runs} run{'s' * (runs > 1)}"
    return {}, ""


def page() -> str:
    """All tables as Markdown."""
    parts = [
        "# The paper's tables beside ours",
        "In each cell *paper / ours*; written by `python -m benchmarks.paper_table`. LAM's rows are the paper's: a "
        "diagonal posterior of the last layer, scored by one over kappa of sampled networks. This library's default "
        "posterior and scores are in [lam_fashionmnist_d3.md](lam_fashionmnist_d3.md). A dash alone: a method without "
        "an uncertainty.",
    ]
    for number, data in plan.PAPER_TABLES:
        parts += [f"## Table {number}, {DATASETS[data].title}", section(number, data)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write ``paper.md``, and the table of Fashion-MNIST into docs/results.md in place of the one that is there."""
    write_atomically(RESULTS / "paper.md", page())
    path, new = Path(__file__).parents[1] / "docs" / "results.md", section("2", "fashionmnist")
    head, _ = new.split("\n", 1)
    before, rest = path.read_text(encoding="utf-8").split(head, 1)
    write_atomically(path, before + new + rest[rest.index("\n\n") :])
    print(page())


if __name__ == "__main__":
    main()

"""The plots of docs/results.md, from the committed results or from one's own.

    python -m benchmarks.results_plots [--out docs/images/results]
    python -m benchmarks.results_plots --results FOLDER [--data-root DIR] --out PLOTS

Nothing is measured: every figure comes from a JSON file in ``benchmarks/results``, or in a folder that a benchmark
wrote; what needs a file that is not there is left out. A run of ``benchmarks.experiments`` has the paper's plots, too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import products
from benchmarks.experiments.data import DATASETS, encoder_file, load_data, load_pretrained
from benchmarks.experiments.plots import draw_all
from benchmarks.style import COLOURS, GREY, finish, subplots
from benchmarks.transfer.families import FAMILIES, RIVALS_KNOWN, RIVALS_RIGHT, auroc, has, r_auroc
from benchmarks.transfer.results import read_results

RESULTS = Path(__file__).parent / "results"
OUT = Path(__file__).parent.parent / "docs" / "images" / "results"

_MARKERS = ("o", "s", "^", "D")
_RIGHT = {"uncertainty": ["default/uncertainty"], "best other": [*RIVALS_RIGHT]}
_RIGHT |= {"with a gallery": ["gated_labels"]}  # of RetrievalUncertainty, which is no more
_KNOWN = {"novelty": ["default/novelty"], "best other": [*RIVALS_RIGHT]}
_KNOWN |= {"that stores inputs": [*RIVALS_RIGHT, *RIVALS_KNOWN]}
_METHODS = {
    "laplace_posthoc": "LAM (post-hoc)",
    "mc_dropout": "MC dropout",
    "bayesian_triplet": "Bayesian triplet, Gaussian",
    "bayesian_triplet_vmf": "Bayesian triplet, vMF",
    "cosine_proxies": "cosine proxies",
    "nivmf": "non-isotropic proxies",
    "hib": "hedged embedding",
}


def transfer_points(folder: Path = RESULTS) -> dict[str, dict[str, dict[str, float]]]:
    """Means over the encoders of each family.

    Returns:
        For the questions ``"right"`` and ``"known"``, by the score's title and the family's: R-AUROC, or the mean AUROC
        over kinds of unknown inputs.
    """
    results = read_results(folder / "transfer")
    points: dict[str, dict[str, dict[str, float]]] = {"right": {}, "known": {}}
    for start, title in FAMILIES.items():
        mine = [result for result in results if result["name"].startswith(start)]
        if not mine:  # a family whose results are not committed
            continue
        for question, scores in (("right", _RIGHT), ("known", _KNOWN)):
            mean = r_auroc if question == "right" else auroc
            for score, names in scores.items():
                points[question].setdefault(score, {})[title] = max(
                    mean(mine, name) for name in names if has(mine, name)
                )
    return points


def plot_transfer(folder: Path) -> Figure:
    """Is the neighbour right, is the input known: every family of encoders, and the best other score beside ours."""
    figure, both = subplots(10, 4.2, 2, sharey=True)
    titles = {"right": "Is the nearest neighbour right?", "known": "Is the input of a known kind?"}
    for axes, (question, scores) in zip(both, transfer_points(folder).items(), strict=True):
        for (score, values), colour, marker in zip(scores.items(), COLOURS, _MARKERS, strict=False):
            axes.plot(list(values.values()), list(values), marker, color=colour, label=score)
        axes.axvline(0.5, color=GREY, linewidth=1, linestyle=":")
        axes.set_title(titles[question], fontsize=10)
        axes.set(xlim=(0.48, 1.02), xlabel="R-AUROC" if question == "right" else "AUROC")
        axes.grid(axis="y", alpha=0.3)
        finish(axes, columns=1)  # two legends beside each other would read as one row
    both[0].invert_yaxis()  # the first family on top
    return figure


def plot_methods(folder: Path) -> Figure:
    """The compared methods: does the uncertainty tell unknown inputs, and rank retrievals?"""
    figure, both = subplots(9, 3.4, 2, sharey=True)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in _method_files(folder)]
    rows = {run["config"]["dim"]: run["rows"] for run in runs}
    titles = {"auroc": "Unknown inputs", "ausc": "Retrievals"}
    for axes, figure_name in zip(both, titles, strict=True):
        for (dim, found), colour, marker in zip(rows.items(), COLOURS, _MARKERS, strict=False):
            figures = [found.get(name, {}).get("figures", {}).get(figure_name) for name in _METHODS]
            values = [math.nan if one is None or one["mean"] is None else one["mean"] for one in figures]
            axes.plot(values, range(len(values)), marker, color=colour, label=f"D = {dim}")
        axes.set_yticks(range(len(_METHODS)), list(_METHODS.values()))
        axes.set_title(titles[figure_name], fontsize=10)
        axes.set_xlabel(f"{figure_name.upper()}, mean over seeds")
        axes.grid(axis="y", alpha=0.3)
        finish(axes)
    both[0].set_xlim(0, 1.02)
    both[0].axvline(0.5, color=GREY, linewidth=1, linestyle=":")
    both[0].invert_yaxis()  # the first method on top
    return figure


def plot_speed(folder: Path) -> Figure:
    """The curvature of a last layer 9216 -> 3: 64 points, 5000 triplets, arccos."""
    figure, (axes,) = subplots(7, 2.8)
    cases = [case for case in _read(folder, "curvature.json")["cases"] if case["case"] == "pairwise"]
    cases = [case for case in cases if case["distance"] == "arccos" and case["pd_fix"] in ("fixed", "positive", "full")]
    ways = {"node": "node form", "chunked": "every pair, 64 at a time", "pairwise": "every pair at once"}
    for (way, title), colour, shift in zip(ways.items(), COLOURS, (-0.26, 0, 0.26), strict=False):
        seconds = [case[way]["cpu_seconds"] for case in cases]
        axes.barh([place + shift for place in range(len(cases))], seconds, height=0.24, color=colour, label=title)
    axes.set_yticks(range(len(cases)), [case["pd_fix"] for case in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set(xlabel="seconds of processor time, one thread", ylabel="pd_fix")
    finish(axes)
    return figure


def plot_products(folder: Path) -> Figure:
    """Products with the GGN and the Hessian, and what precedes the first, in gradients of the same loss."""
    figure, (axes,) = subplots(7, 3.8)
    cases = _read(folder, "products.json")["cases"]
    bars = {"before": "before the first product", "ggn": "product with the GGN", "hessian": "Hessian by autograd"}
    for (name, title), colour, shift in zip(bars.items(), COLOURS, (-0.26, 0, 0.26), strict=False):
        units = [case["seconds"][name] / case["seconds"]["gradient"] for case in cases]
        axes.barh([place + shift for place in range(len(cases))], units, height=0.24, color=colour, label=title)
    names = [f"{products.TITLES[case['network']]}, {case['loss']}, {case['points']:,}" for case in cases]
    axes.set_yticks(range(len(cases)), names)
    axes.invert_yaxis()
    axes.set_xlabel("gradients of the same loss")
    finish(axes)
    return figure


def plot_threshold(folder: Path) -> Figure:
    """The share of known inputs that ``is_known(alpha)`` flags, for every encoder."""
    figure, (axes,) = subplots(5, 3.2)
    found = _read(folder, "threshold.json")
    for values in found["encoders"].values():
        axes.plot(found["alphas"], values["split"], "o", color=COLOURS[0], alpha=0.3, markersize=5)
    axes.plot([0, 0.12], [0, 0.12], color=GREY, linewidth=1, linestyle=":")
    axes.set_xlabel("alpha")
    axes.set_ylabel("share of known inputs flagged")
    axes.set_title(f"{len(found['encoders'])} encoders, mean of {found['splits']} splits each", fontsize=10)
    finish(axes)
    return figure


PLOTS: Mapping[str, Callable[[Path], Figure]] = {
    "transfer": plot_transfer,
    "methods": plot_methods,
    "speed": plot_speed,
    "products": plot_products,
    "threshold": plot_threshold,
}
"""The plots by the name of their file."""
_NEEDED = {
    "transfer": "transfer/*.json",
    "speed": "curvature.json",
    "products": "products.json",
    "threshold": "threshold.json",
}


def _method_files(folder: Path) -> list[Path]:
    """Those of the committed results, or that of a run."""
    return sorted(folder.glob("methods_fashionmnist_d*.json")) or sorted(folder.glob("results.json"))


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _draw_run(run: Path, root: Path, out: Path) -> None:
    """Calibration curves, ROC, sparsification, and images of lowest and highest uncertainty of every seed."""
    config = _read(run, "config.json")
    sizes = (config["train_size"], config["test_size"])
    if config["epochs"]:
        data = load_data(config["data"], root, *sizes, ood=config["ood"], size=config["image_size"])
    else:
        file = encoder_file(config["network"], run)
        data = load_pretrained(file, DATASETS[config["data"]].title, *sizes, config["ood"])
    for seed in sorted(int(path.name.removeprefix("seed")) for path in run.glob("seed*")):
        draw_all(run, data, config["table"], seed, out / f"seed{seed}")
        print(out / f"seed{seed}")


def main(arguments: list[str] | None = None) -> None:
    """Draw all plots as SVG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: docs/images/results)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results, or of a run of the tables")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="of a run's data (default: %(default)s)")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "contrastive_curvature"}):  # the same bytes each time
        for name, plot in PLOTS.items():
            if _method_files(given.results) if name == "methods" else any(given.results.glob(_NEEDED[name])):
                plot(given.results).savefig(given.out / f"{name}.svg", metadata={"Date": None})
                print(given.out / f"{name}.svg")
    if (given.results / "config.json").is_file():
        _draw_run(given.results, given.data_root, given.out)


if __name__ == "__main__":
    main()

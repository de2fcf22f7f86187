"""The seven distances to proxies of one source document, trained with the same budget on one data set.

Kirchhof et al. (2022), supplement: recall@1 by the Euclidean distance (its table 4) beside that by the cosine, and how
diverse the embeddings of the training images are, within classes and in their directions (its table 5).

Run: ``python -m benchmarks.proxies --data-root DATA [--data omniglot] [--seeds 0 1] [--epochs 15] [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments import figures
from benchmarks.experiments.data import RetrievalData, load_data
from benchmarks.experiments.defaults import DEFAULTS
from benchmarks.experiments.methods.base import Setting
from benchmarks.experiments.methods.embed import unit
from benchmarks.experiments.methods.proxies import Proxies
from benchmarks.experiments.methods.proxy_step import DISTANCES
from benchmarks.machine import describe, mean_and_deviation, write_results
from contrastive_curvature import metrics
from contrastive_curvature.errors import ContrastiveCurvatureError
from contrastive_curvature.metrics.neighbors import Metric

__all__ = ["DOCUMENT_RECALL", "measure", "render"]

DOCUMENT_RECALL = {
    "l2": ("61.89 ± 0.36", "76.61 ± 0.17"),
    "cosine": ("62.01 ± 0.35", "76.94 ± 0.49"),
    "nivmf": ("63.74 ± 0.18", "78.62 ± 0.41"),
    "b_vmf": ("62.29 ± 0.34", "79.69 ± 0.15"),
    "el_vmf": ("62.49 ± 0.56", "80.17 ± 0.24"),
    "kl_vmf": ("61.68 ± 0.36", "76.65 ± 0.20"),
    "el_nivmf": ("63.69 ± 0.56", "76.37 ± 5.32"),
}
"""The document's table 4, on CUB and CARS with the Euclidean distance, in percent."""

_DOCUMENT_CHANGE = {
    "el_vmf": {"cluster_diversity": (11, 24), "feature_diversity": (6, 13)},
    "el_nivmf": {"cluster_diversity": (25, 31), "feature_diversity": (8, 14)},
}
"""Its table 5, on CUB and CARS: changes from the cosine, in percent."""
_TITLES = {
    "l2": "L2",
    "cosine": "Cos",
    "nivmf": "nivMF",
    "b_vmf": "B-vMF",
    "el_vmf": "EL-vMF",
    "kl_vmf": "KL-vMF",
    "el_nivmf": "EL-nivMF",
}
_RESULTS = Path(__file__).parent / "results"


def measure(method: Proxies, data: RetrievalData) -> dict[str, float]:
    """Figures of a trained method.

    Args:
        method: Fitted on the data.
        data: With class labels.

    Returns:
        ``recall_cosine`` and ``recall_euclidean``, recall@1 of the test images by leaving one out;
        ``cluster_diversity``, ``spectral_decay`` and ``feature_diversity`` of the training images' unit embeddings (see
        :mod:`benchmarks.experiments.figures`); ``kappa_low``, ``kappa`` and ``kappa_high``, the 5 %, 50 % and 95 %
        quantiles of the test images' concentrations; ``temperature``, the learned one.
    """
    z, trained = method.outputs(data.test), unit(method.outputs(data.plain))
    low, middle, high = z.norm(dim=1).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return {
        "recall_cosine": _recall(z, data, "cosine"),
        "recall_euclidean": _recall(z, data, "euclidean"),
        "cluster_diversity": figures.cluster_diversity(trained, data.plain.targets),
        "spectral_decay": figures.spectral_decay(trained),
        "feature_diversity": figures.feature_diversity(trained),
        "kappa_low": low,
        "kappa": middle,
        "kappa_high": high,
        "temperature": float(method.proxies["log_temperature"].exp()),
    }


def _recall(z: Tensor, data: RetrievalData, metric: Metric) -> float:
    nearest = metrics.nearest_neighbors(z, k=1, metric=metric)
    return metrics.recall_at_k(metrics.rank_by_labels(nearest, data.test.targets), 1)


def run(
    data: RetrievalData, setting: Setting, seeds: Sequence[int], distances: Sequence[str] = DISTANCES
) -> dict[str, list[dict[str, float]]]:
    """Train every distance with every seed.

    Args:
        data: With class labels.
        setting: Of all of them.
        seeds: One training each.
        distances: Of :data:`DISTANCES`.

    Returns:
        Distance -> for each seed what :func:`measure` says, and ``seconds`` of processor time that training took.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in distances}
    for seed in seeds:
        for name in distances:
            method = Proxies(setting, name)
            started = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                method.fit(data, seed, Path(folder))
            one = {"seconds": time.process_time() - started, **measure(method, data)}
            found[name].append(one)
            print(f"seed {seed}, {name}: recall@1 {one['recall_cosine']:.4f}, {one['seconds']:.0f} s", file=sys.stderr)
    return found


def render(result: dict[str, Any]) -> str:
    """Both tables."""
    machine, found, given = result["machine"], result["distances"], result["setting"]
    order = [name for name in DOCUMENT_RECALL if name in found]
    out = [
        f"# Distances to proxies on {result['title']}",
        "",
        f"`python -m benchmarks.proxies` on {machine['cpu']}, torch {machine['torch']}, {machine['date']}: D = "
        f"{given['dim']}, {given['epochs']} epochs of {result['train']:,} training images in {given['precision']}, "
        f"batches of {given['batch_size']}, {result['test']:,} test images, {len(result['seeds'])} seeds (mean ± "
        "standard deviation). The document's figures are on other images (CUB, CARS) with a ResNet-50 and D = 512.",
        "",
        "## Recall@1 (table 4)",
        "",
        "κ: concentration of the test images, the 5 %, 50 % and 95 % quantiles, each the median over the seeds. Those "
        "of Cos and nivMF are lengths that their losses do not see. t: learned temperature.",
        "",
        "| distance | cosine | Euclidean | document (Euclidean, %): CUB | CARS | κ | t | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in order:
        many = {figure: [one[figure] for one in found[name]] for figure in found[name][0]}
        kappa = " / ".join(f"{torch.tensor(many[key]).median():.3g}" for key in ("kappa_low", "kappa", "kappa_high"))
        cells = [
            mean_and_deviation(many["recall_cosine"]),
            mean_and_deviation(many["recall_euclidean"]),
            *DOCUMENT_RECALL[name],
            kappa,
            f"{fmean(many['temperature']):.3g}",
            f"{fmean(many['seconds']):.0f}",
        ]
        out.append(f"| {_TITLES[name]} | {' | '.join(cells)} |")
    if "cosine" in found:
        out += _diversity(found, order)
    return "\n".join(out) + "\n"


def _diversity(found: dict[str, list[dict[str, float]]], order: list[str]) -> list[str]:
    out = [
        "",
        "## Diversity of the training images' embeddings (table 5)",
        "",
        "Cluster diversity: variance of the distances within a class, mean over classes. Feature diversity: exp(−KL), "
        "with the divergence KL from the uniform distribution to the normalised singular values. Changes are from Cos, "
        "of the means over seeds; the document's (CUB / CARS) come without a formula.",
        "",
        "| distance | cluster diversity | change | document | KL | feature diversity | change | document |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    base = {key: fmean(one[key] for one in found["cosine"]) for key in ("cluster_diversity", "feature_diversity")}
    for name in order:
        cells = []
        for key in base:
            values = [one[key] for one in found[name]]
            if key == "feature_diversity":
                cells.append(mean_and_deviation([one["spectral_decay"] for one in found[name]]))
            printed = _DOCUMENT_CHANGE.get(name, {}).get(key)
            cells += [
                f"{fmean(values):.4f}" if key == "cluster_diversity" else mean_and_deviation(values),
                "" if name == "cosine" else f"{100 * (fmean(values) / base[key] - 1):+.1f} %".replace("-", "−"),
                "" if printed is None else f"{printed[0]:+d} % / {printed[1]:+d} %",
            ]
        out.append(f"| {_TITLES[name]} | {' | '.join(cells)} |")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Train, print the tables, write them as JSON and Markdown.

    Returns:
        Exit status: 0; 2 when something was refused.
    """
    classes = [name for name, one in DEFAULTS.items() if one.margin is not None and name != "msls"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--data", choices=classes, default="omniglot")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--train-size", type=int, help="training images (default: all)")
    parser.add_argument("--test-size", type=int, help="test images (default: all)")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--distances", nargs="+", choices=DISTANCES, default=DISTANCES)
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder for proxies_DATA.json and .md")
    given = parser.parse_args(arguments)
    try:
        _measure(given)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(given: argparse.Namespace) -> None:
    defaults, machine = DEFAULTS[given.data], describe()
    data = load_data(given.data, given.data_root, ood="none", train_size=given.train_size, test_size=given.test_size)
    setting = Setting(
        network=defaults.network,
        dim=given.dim,
        epochs=given.epochs,
        batch_size=defaults.batch_size,
        lr=defaults.lr,
        per_class=defaults.per_class,
        precision=given.precision,
        progress=False,
    )
    kept = {name: getattr(setting, name) for name in ("dim", "epochs", "batch_size", "lr", "per_class", "precision")}
    result = {
        "machine": machine,
        "data": data.name,
        "title": data.title,
        "train": len(data.train),
        "test": len(data.test),
        "seeds": given.seeds,
        "setting": kept,
        "distances": run(data, setting, given.seeds, given.distances),
    }
    write_results(given.out, f"proxies_{data.name}", result, render(result))


if __name__ == "__main__":
    sys.exit(main())

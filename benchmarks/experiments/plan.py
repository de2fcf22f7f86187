"""The tables: rows, data sets with their defaults, columns, cells (one a row and seed), and what the paper reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experiments.data import DATASETS
from contrastive_curvature.errors import InputError

DEMO = "demo"
"""The demonstration: a few rows of table 2 with every score of the posterior."""
OWN = "own"
"""A method's own score among its variants; of a method with two scores, each where it belongs."""
NOVELTY, UNCERTAINTY = "novelty", "uncertainty"
"""The two scores of such a method, each by itself: which images are unknown, and which retrievals are wrong."""
ALPHAS = (0.01, 0.05)
"""Shares of known images that may be flagged."""
MEMBERS = 5
"""Encoders in an ensemble (paper, G.4)."""
BASE = "deterministic"
"""Key of the row, and of the folder, of the encoders that other methods build on."""
POST_HOC = (BASE, "laplace_posthoc", "norm", "vmf_density", "knn_embedding", "knn_features")
"""Methods that take a trained encoder, and train nothing."""
TABLE_DATA = {
    DEMO: ("digits", "fashionmnist", "mnist"),
    "1": ("fashionmnist", "mnist", "digits", "omniglot", "omniglot_full", "lfw", "cub200", "cars196", "folder"),
    "2": ("fashionmnist", "mnist", "digits", "cifar10", "folder"),
    "3": ("omniglot", "omniglot_full", "cub200", "lfw", "cars196", "sop", "inaturalist", "inshop", "folder"),
    "4": ("msls",),
}
"""Data sets that a table can be made on, the default first."""
QUALITY = {
    "map_at_1": "mAP@1",
    "map_at_5": "mAP@5",
    "map_at_10": "mAP@10",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "ausc": "AUSC",
    "ece": "ECE",
}
"""Figures of the paper's table 2."""
COLUMNS = {
    DEMO: QUALITY | {"r_auroc": "R-AUROC"},
    "1": {"map_at_5": "mAP@5", "auroc": "AUROC", "ausc": "AUSC"},
    "2": QUALITY,
    "3": {name: title for name, title in QUALITY.items() if name != "ece"},
    "4": {f"recall_at_{k}": f"R@{k}" for k in (1, 5, 10)}
    | {"map_at_5": "mAP@5", "map_at_10": "mAP@10", "ausc": "AUSC"},
}
"""Figures of the paper's tables, and of the demonstration."""


def defaults_of(table: str, data: str) -> dict[str, Any]:
    """Network, dimension and training of one data set in one table.

    From the paper's G.1 and G.2 and, where they are silent (margin), the released configurations. Images of each class
    in a batch are ours: of classes with few images, batches drawn at random hold no positive pair, and all pairs of a
    batch count where the paper mines triplets. Three epochs of the demonstration on 60,000 images reach an mAP@1 of
    about 0.82, the paper's twenty epochs with its pair sampling 0.78.
    """
    return DATASETS[data].defaults | ({"epochs": 3} if table == DEMO and data != "digits" else {})


@dataclass(frozen=True)
class Row:
    """A method with its options.

    Args:
        key: As on the command line and in file names.
        title: As in the table.
        method: Name in :data:`benchmarks.experiments.methods.METHODS`.
        options: For it.
        default: Whether it runs when ``--methods`` says nothing.
    """

    key: str
    title: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    default: bool = True


@dataclass(frozen=True)
class Cell:
    """A row and a seed; of an ensemble the seeds of its encoders, and the first of them."""

    row: Row
    seed: int
    members: tuple[int, ...] = ()


_ABLATION = [
    Row(
        f"{when}_{distance}_{fix}",
        f"{title} {distance.capitalize()} {fix}",
        f"laplace_{when}",
        # As in the paper. With two of the fixes Kronecker factors would leave out what the others have.
        {"distance": distance, "pd_fix": fix, "posterior": "diag"},
    )
    for when, title in {"posthoc": "Post-hoc", "online": "Online"}.items()
    for distance in ("euclidean", "arccos")
    for fix in ("fixed", "positive", "full", "psd")
]
_DISTANCES = {"l2": "L2", "nivmf": "nivMF", "b_vmf": "B-vMF", "el_vmf": "EL-vMF", "kl_vmf": "KL-vMF"}
_METHODS = [
    Row(BASE, "Deterministic", BASE),
    Row("deep_ensemble", "Deep ensemble", "deep_ensemble"),
    Row("deep_ensemble_aligned", "Deep ensemble, aligned", "deep_ensemble", {"alignment": "procrustes"}),
    Row("pfe", "PFE", "pfe"),
    Row("mc_dropout", "MC dropout", "mc_dropout"),
    Row("laplace_posthoc_diag", "LAM (post-hoc), diagonal", "laplace_posthoc", {"posterior": "diag"}),
    Row("laplace_posthoc", "LAM (post-hoc)", "laplace_posthoc"),
    Row("laplace_online_diag", "LAM (online), diagonal", "laplace_online", {"posterior": "diag"}),
    Row("laplace_online", "LAM (online)", "laplace_online"),
    Row("norm", "Minus norm of raw output", "norm"),
    Row("vmf_density", "Density of von Mises-Fisher classes", "vmf_density"),
    Row("knn_embedding", "10-NN distance, embedding", "knn_embedding"),
    Row("knn_features", "10-NN distance, features", "knn_features"),
    Row("hib", "Hedged instance embedding (HIB)", "hedged"),
    Row("hib_mixture", "Hedged instance embedding, two components", "hedged", {"components": 2}, default=False),
    Row("triplet", "Triplet loss", "triplet"),
    Row("bayesian_triplet", "Bayesian triplet loss", "bayesian_triplet"),
    Row("bayesian_triplet_vmf", "Bayesian triplet loss, von Mises-Fisher", "bayesian_triplet", {"distribution": "vmf"}),
    Row("cosine_proxies", "Cosine proxies", "proxies", {"distance": "cosine"}),
    Row("nivmf", "Non-isotropic von Mises-Fisher proxies (EL-nivMF)", "proxies", {"distance": "el_nivmf"}),
    *(
        Row(f"proxies_{distance}", f"Proxies, {title}", "proxies", {"distance": distance}, default=False)
        for distance, title in _DISTANCES.items()
    ),
]
_IN_DEMO = (BASE, "laplace_posthoc", "norm", "knn_embedding", "knn_features")
# The first has the library's two scores, the others the paper's one, without and with sampling.
_DEMO_SCORES = {
    OWN: "Laplace",
    "inverse_kappa": "Laplace, 1/κ",
    "inverse_kappa_sampled": "Laplace, 1/κ of sampled networks",
}


_OF_PLACES = (BASE, "mc_dropout", "pfe", "laplace_posthoc", "laplace_online", "norm", "knn_embedding", "knn_features")
"""Methods that need no classes."""


def known_rows(table: str) -> list[Row]:
    """All rows that a table can have, in its order."""
    if table == "4":
        return [row for row in _METHODS if row.method in _OF_PLACES]
    return _ABLATION if table == "1" else _METHODS


def table_rows(
    table: str, methods: Sequence[str] | None = None, posterior: str | None = None, pretrained: bool = False
) -> list[Row]:
    """Rows of a table, in its order: those with these keys, or the default ones; of LAM's those of one posterior.

    Of a pretrained encoder only those that train nothing.
    """
    known = [row for row in known_rows(table) if row.method in POST_HOC or not pretrained]
    keys = [row.key for row in known]
    if methods is not None and not set(methods) <= set(keys):
        which = f"of table {table}{' without training' * pretrained}"
        raise InputError("--methods", f"{which}: {', '.join(keys)}", " ".join(methods))
    wanted = _IN_DEMO if table == DEMO else [row.key for row in known if row.default]
    rows = [row for row in known if row.key in (wanted if methods is None else methods)]
    other = {None: (), "diag": ({},), "default": ({"posterior": "diag"},)}[posterior]
    return [row for row in rows if not (row.method.startswith("laplace") and row.options in other)]


def score_titles(table: str, row: Row) -> dict[str, str]:
    """Scores of a row that stand in plots, and in the demonstration's table, with their titles."""
    return _DEMO_SCORES if table == DEMO and row.key == "laplace_posthoc" else {OWN: row.title}


def ensembles(seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Seeds of the encoders of each ensemble.

    As many groups of :data:`MEMBERS` as there are, in the order of their size; what is left over makes none. Where
    there are fewer seeds than that, one group is filled up with the seeds after the largest.
    """
    filled = sorted(seeds) + [max(seeds) + 1 + extra for extra in range(MEMBERS - len(seeds))]
    return [tuple(filled[start : start + MEMBERS]) for start in range(0, len(filled) - MEMBERS + 1, MEMBERS)]


def plan_cells(rows: Sequence[Row], seeds: Sequence[int]) -> list[Cell]:
    """Cells in the order in which they are computed: seed after seed, an ensemble after the last of its seeds."""
    cells = []
    groups = ensembles(seeds)
    for seed in seeds:
        cells += [Cell(row, seed) for row in rows if row.method != "deep_ensemble"]
        # Seeds that only fill a group up have no turn of their own.
        ready = [group for group in groups if [s for s in seeds if s in group][-1] == seed]
        cells += [Cell(row, group[0], group) for group in ready for row in rows if row.method == "deep_ensemble"]
    return cells


_PAPER = {
    ("1", "lfw"): """
    posthoc_euclidean_fixed     0.70±0.00 0.57±0.25 0.44±0.01
    posthoc_euclidean_positive  0.70±0.00 0.58±0.23 0.45±0.01
    posthoc_euclidean_full      0.70±0.00 0.56±0.26 0.44±0.01
    posthoc_arccos_fixed        0.69±0.00 0.53±0.20 0.46±0.02
    posthoc_arccos_positive     0.70±0.00 0.29±0.11 0.48±0.01
    posthoc_arccos_full         0.69±0.00 0.55±0.18 0.45±0.01
    online_euclidean_fixed      0.63±0.01 0.77±0.04 0.31±0.02
    online_euclidean_positive   0.70±0.00 0.38±0.10 0.47±0.01
    online_euclidean_full       0.67±0.01 0.59±0.04 0.42±0.01
    online_arccos_fixed         0.71±0.00 0.78±0.18 0.50±0.03
    online_arccos_positive      0.70±0.00 0.23±0.03 0.46±0.00
    online_arccos_full          0.71±0.00 0.70±0.12 0.51±0.01
    """,
    ("2", "fashionmnist"): """
    deterministic         0.78±0.01 0.73±0.01 0.72±0.01 - - - -
    deep_ensemble         0.69 0.62 0.59 0.41 0.46 0.61 0.04
    pfe                   0.78±0.00 0.74±0.00 0.72±0.00 0.53±0.03 0.46±0.01 0.65±0.01 0.26±0.02
    hib                   0.69±0.08 0.63±0.09 0.61±0.09 0.60±0.12 0.60±0.11 0.65±0.08 0.54±0.08
    mc_dropout            0.76±0.03 0.71±0.03 0.70±0.03 0.93±0.03 0.93±0.03 0.84±0.06 0.03±0.04
    laplace_posthoc_diag  0.78±0.00 0.74±0.00 0.72±0.00 0.96±0.02 0.96±0.02 0.86±0.01 0.03±0.00
    laplace_online_diag   0.81±0.00 0.77±0.01 0.76±0.01 0.98±0.01 0.98±0.01 0.89±0.01 0.02±0.00
    """,
    ("2", "cifar10"): """
    deterministic         0.66±0.00 0.59±0.00 0.58±0.00 - - - -
    deep_ensemble         0.66 0.61 0.59 0.42 0.67 0.72 0.02
    pfe                   0.66±0.00 0.60±0.00 0.58±0.00 0.21±0.02 0.56±0.01 0.56±0.01 0.11±0.01
    hib                   0.11±0.01 0.07±0.00 0.05±0.00 0.44±0.17 0.70±0.10 0.29±0.03 0.04±0.02
    mc_dropout            0.46±0.01 0.37±0.01 0.34±0.01 0.60±0.03 0.76±0.02 0.61±0.01 0.05±0.00
    laplace_posthoc_diag  0.66±0.00 0.60±0.00 0.58±0.00 0.50±0.11 0.69±0.07 0.81±0.01 0.23±0.01
    laplace_online_diag   0.66±0.01 0.60±0.00 0.57±0.01 0.78±0.04 0.85±0.03 0.83±0.01 0.01±0.00
    """,
    ("3", "cub200"): """
    deterministic         0.62±0.01 0.48±0.01 0.42±0.01 - - -
    deep_ensemble         0.21 0.11 0.07 0.47 0.55 0.21
    pfe                   0.62±0.01 0.50±0.01 0.43±0.01 0.44±0.16 0.50±0.08 0.61±0.02
    hib                   0.33±0.04 0.19±0.02 0.14±0.02 0.54±0.12 0.61±0.10 0.31±0.07
    mc_dropout            0.61±0.00 0.48±0.00 0.42±0.00 0.73±0.08 0.68±0.07 0.63±0.01
    laplace_posthoc_diag  0.65±0.01 0.52±0.01 0.45±0.01 0.56±0.16 0.61±0.11 0.66±0.03
    laplace_online_diag   0.61±0.00 0.48±0.00 0.42±0.00 0.80±0.03 0.75±0.03 0.63±0.01
    """,
    ("3", "lfw"): """
    deterministic         0.44±0.00 0.68±0.00 0.65±0.00 - - -
    deep_ensemble         0.36 0.57 0.54 0.52 0.64 0.33
    pfe                   0.44±0.00 0.68±0.00 0.65±0.00 0.03±0.02 0.41±0.00 0.49±0.01
    mc_dropout            0.42±0.00 0.65±0.01 0.63±0.01 0.03±0.01 0.41±0.00 0.46±0.01
    laplace_posthoc_diag  0.44±0.01 0.68±0.01 0.65±0.00 0.65±0.14 0.72±0.11 0.45±0.03
    laplace_online_diag   0.46±0.00 0.71±0.00 0.69±0.00 0.71±0.22 0.78±0.17 0.50±0.02
    """,
    ("4", "msls"): """
    deterministic         0.77 0.88 0.90 0.61 0.56 -
    mc_dropout            0.75 0.87 0.87 0.59 0.54 0.77
    pfe                   0.77 0.88 0.90 0.61 0.56 0.73
    laplace_posthoc_diag  0.76 0.86 0.89 0.60 0.55 0.74
    laplace_online_diag   0.76 0.87 0.90 0.60 0.56 0.77
    """,
}
"""Mean and standard deviation of five runs; of MSLS the validation set. Source: Warburg et al. (2023), "Bayesian Metric
Learning for Uncertainty Quantification in Image Retrieval", section 4."""
PAPER_TABLES = tuple(_PAPER)
"""Table and data set of each."""
ABLATION_DATA = "lfw"
"""What the paper's table 1 is on; it stands beside ours of any data."""


def paper_rows(table: str, data: str) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Row -> figure -> the paper's mean and deviation; nothing where it has none on these data (table 1: on LFW)."""
    rows = {}
    for line in _PAPER.get((table, ABLATION_DATA if table == "1" else data), "").strip().splitlines():
        key, *cells = line.split()
        parts = {column: cell.split("±") for column, cell in zip(COLUMNS[table], cells, strict=True) if cell != "-"}
        rows[key] = {column: (float(mean), float(std[0]) if std else None) for column, (mean, *std) in parts.items()}
    return rows

"""Rows of a table and the cells, one a row and seed, that fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contrastive_curvature.errors import InputError

Table = int | str
"""1 to 4, or :data:`DEMO`."""

DEMO = "demo"
"""The demonstration: a few rows of table 2 with every score of the posterior."""

OWN = "own"
"""A method's own score among its variants; of a method with two scores, each where it belongs."""

NOVELTY, UNCERTAINTY = "novelty", "uncertainty"
"""The two scores of such a method, each by itself: which images are unknown, and which retrievals are wrong."""

ALPHAS = (0.01, 0.05)
"""Shares of known images that may be flagged."""

BASE = "deterministic"
"""Key of the row, and of the folder, of the encoders that other methods build on."""

MEMBERS = 5
"""Encoders in an ensemble (paper, G.4)."""

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

COLUMNS: dict[Table, dict[str, str]] = {
    DEMO: QUALITY | {"r_auroc": "R-AUROC"},
    1: {"map_at_5": "mAP@5", "auroc": "AUROC", "ausc": "AUSC"},
    2: QUALITY,
    3: {name: title for name, title in QUALITY.items() if name != "ece"},
    4: {
        "recall_at_1": "R@1",
        "recall_at_5": "R@5",
        "recall_at_10": "R@10",
        "map_at_5": "M@5",
        "map_at_10": "M@10",
        "ausc": "AUSC",
    },
}
"""Figures of the paper's tables, and of the demonstration."""


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

    @property
    def is_ensemble(self) -> bool:
        """Whether it is made of the deterministic encoders of several seeds."""
        return self.method == "deep_ensemble"


@dataclass(frozen=True)
class Cell:
    """A row and a seed.

    Args:
        row: The method.
        seed: Its seed; of an ensemble the first member's.
        members: Of an ensemble, the seeds of its encoders.
    """

    row: Row
    seed: int
    members: tuple[int, ...] = ()


def _ablation() -> list[Row]:
    # As in the paper. With two of the fixes Kronecker factors would leave out what the others have.
    when = {"posthoc": "Post-hoc", "online": "Online"}
    distances = {"euclidean": "Euclidean", "arccos": "Arccos"}
    return [
        Row(
            f"{name}_{distance}_{fix}",
            f"{title} {shown} {fix}",
            f"laplace_{name}",
            {"distance": distance, "pd_fix": fix, "structure": "diag"},
        )
        for name, title in when.items()
        for distance, shown in distances.items()
        for fix in ("fixed", "positive", "full", "psd")
    ]


_METHODS = (
    Row(BASE, "Deterministic", BASE),
    Row("deep_ensemble", "Deep ensemble", "deep_ensemble"),
    Row(
        "deep_ensemble_aligned",
        "Deep ensemble, aligned",
        "deep_ensemble",
        {"alignment": "procrustes"},
    ),
    Row("pfe", "PFE", "pfe"),
    Row("mc_dropout", "MC dropout", "mc_dropout"),
    Row("laplace_posthoc", "LAM (post-hoc)", "laplace_posthoc"),
    Row("laplace_online", "LAM (online)", "laplace_online"),
    Row(
        "laplace_online_refitted",
        "LAM (online), curvature refitted at the end",
        "laplace_online",
        {"curvature": "refitted"},
        default=False,
    ),
    Row(
        "laplace_online_warm",
        "LAM (online), sampled at a tenth of the mean loss",
        "laplace_online",
        {"sampling_temperature": 0.1},
        default=False,
    ),
    Row("norm", "Minus norm of raw output", "norm"),
    Row("vmf_density", "Density of von Mises-Fisher classes", "vmf_density"),
    Row("knn_embedding", "10-NN distance, embedding", "knn_embedding"),
    Row("knn_features", "10-NN distance, features", "knn_features"),
    Row("hib_point", "Point of the hedged embedding", "hedged_point", default=False),
    Row("hib", "Hedged instance embedding (HIB)", "hedged"),
    Row("hib_mixture", "Hedged instance embedding, two components", "hedged", {"components": 2}, default=False),
    Row("triplet", "Triplet loss", "triplet"),
    Row("bayesian_triplet", "Bayesian triplet loss", "bayesian_triplet"),
    Row(
        "bayesian_triplet_vmf",
        "Bayesian triplet loss, von Mises-Fisher",
        "bayesian_triplet",
        {"distribution": "vmf"},
    ),
    Row("cosine_proxies", "Cosine proxies", "proxies", {"distance": "cosine"}),
    Row("nivmf", "Non-isotropic von Mises-Fisher proxies (EL-nivMF)", "proxies", {"distance": "el_nivmf"}),
    *(
        Row(f"proxies_{distance}", f"Proxies, {title}", "proxies", {"distance": distance}, default=False)
        for distance, title in {
            "l2": "L2",
            "nivmf": "nivMF",
            "b_vmf": "B-vMF",
            "el_vmf": "EL-vMF",
            "kl_vmf": "KL-vMF",
        }.items()
    ),
)

_IN_DEMO = (BASE, "laplace_posthoc", "norm", "knn_embedding", "knn_features")
# The first has the library's two scores, the others the paper's one, without and with sampling.
_DEMO_SCORES = {
    OWN: "Laplace",
    "inverse_kappa": "Laplace, 1/κ",
    "inverse_kappa_sampled": "Laplace, 1/κ of sampled networks",
}

# Not among the paper's rows (ensembles), or in need of classes: for a density or a proxy of each, or to draw pairs.
_NOT_ON_POSITIONS = ("deep_ensemble", "vmf_density", "hedged", "hedged_point", "proxies")
# They hold every training image of a set of a million in memory; asked for, they run.
_LARGE_ON_POSITIONS = ("knn_embedding", "knn_features")


def known_rows(table: Table) -> list[Row]:
    """All rows that a table can have, in its order."""
    if table == 1:
        return _ablation()
    return [row for row in _METHODS if table != 4 or row.method not in _NOT_ON_POSITIONS]


def table_rows(table: Table, methods: Sequence[str] | None = None) -> list[Row]:
    """Rows of a table, in its order.

    Args:
        table: Which one.
        methods: Keys of those that are wanted; ``None`` for the default ones.

    Returns:
        The rows.

    Raises:
        InputError: A key is unknown in this table, or listed twice.
    """
    known = known_rows(table)
    if methods is None and table == DEMO:
        return [row for row in known if row.key in _IN_DEMO]
    if methods is None:
        left_out = _LARGE_ON_POSITIONS if table == 4 else ()
        return [row for row in known if row.default and row.key not in left_out]
    keys = [row.key for row in known]
    unknown = [key for key in methods if key not in keys]
    if unknown or not methods or len(set(methods)) < len(methods):
        raise InputError("--methods", f"of table {table}, each once: {', '.join(keys)}", " ".join(methods))
    return [row for row in known if row.key in methods]


def score_titles(table: Table, row: Row) -> dict[str, str]:
    """Scores of a row that stand in plots, and in the demonstration's table, with their titles."""
    return _DEMO_SCORES if table == DEMO and row.key == "laplace_posthoc" else {OWN: row.title}


def ensembles(seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Seeds of the encoders of each ensemble.

    As many groups of :data:`MEMBERS` as there are, in the order of their size; what is left over makes none. Where
    there are fewer seeds than that, one group is filled up with the seeds after the largest.

    Args:
        seeds: Of the run, different.

    Returns:
        Groups of :data:`MEMBERS`.
    """
    filled = sorted(seeds) + [max(seeds) + 1 + extra for extra in range(MEMBERS - len(seeds))]
    return [tuple(filled[start : start + MEMBERS]) for start in range(0, len(filled) - MEMBERS + 1, MEMBERS)]


def plan_cells(rows: Sequence[Row], seeds: Sequence[int]) -> list[Cell]:
    """Cells in the order in which they are computed: seed after seed, an ensemble after the last of its seeds.

    Args:
        rows: Of the table.
        seeds: Different.

    Returns:
        The cells.
    """
    cells = []
    groups = ensembles(seeds)
    for seed in seeds:
        cells += [Cell(row, seed) for row in rows if not row.is_ensemble]
        # Seeds that only fill a group up have no turn of their own.
        ready = [group for group in groups if [s for s in seeds if s in group][-1] == seed]
        cells += [Cell(row, group[0], group) for group in ready for row in rows if row.is_ensemble]
    return cells

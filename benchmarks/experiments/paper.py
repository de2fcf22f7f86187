"""What the paper reports in its Tables 1 to 4, transcribed: mean and standard deviation of five runs.

Source: Warburg et al. (2023), "Bayesian Metric Learning for Uncertainty Quantification in Image Retrieval", section 4.
The keys of the rows are those of :mod:`benchmarks.experiments.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

PaperRow = dict[str, tuple[float, float | None]]
"""Figure -> mean and standard deviation, ``None`` where the paper gives no deviation."""


@dataclass(frozen=True)
class PaperTable:
    """One table, on one data set.

    Args:
        data: Name of the data set as the paper writes it.
        rows: Row -> figures.
    """

    data: str
    rows: dict[str, PaperRow]


_TABLE_1 = ("map_at_5", "auroc", "ausc")
_TABLE_2 = ("map_at_1", "map_at_5", "map_at_10", "auroc", "auprc", "ausc", "ece")
_TABLE_3 = _TABLE_2[:-1]
_TABLE_4 = ("recall_at_1", "recall_at_5", "recall_at_10", "map_at_5", "map_at_10", "ausc")

_FIGURES: dict[tuple[int, str], tuple[str, tuple[str, ...], str]] = {
    (1, "lfw"): (
        "LFW",
        _TABLE_1,
        """
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
    ),
    (2, "fashionmnist"): (
        "FashionMNIST",
        _TABLE_2,
        """
        deterministic    0.78±0.01 0.73±0.01 0.72±0.01 - - - -
        deep_ensemble    0.69 0.62 0.59 0.41 0.46 0.61 0.04
        pfe              0.78±0.00 0.74±0.00 0.72±0.00 0.53±0.03 0.46±0.01 0.65±0.01 0.26±0.02
        hib              0.69±0.08 0.63±0.09 0.61±0.09 0.60±0.12 0.60±0.11 0.65±0.08 0.54±0.08
        mc_dropout       0.76±0.03 0.71±0.03 0.70±0.03 0.93±0.03 0.93±0.03 0.84±0.06 0.03±0.04
        laplace_posthoc  0.78±0.00 0.74±0.00 0.72±0.00 0.96±0.02 0.96±0.02 0.86±0.01 0.03±0.00
        laplace_online   0.81±0.00 0.77±0.01 0.76±0.01 0.98±0.01 0.98±0.01 0.89±0.01 0.02±0.00
        """,
    ),
    (2, "cifar10"): (
        "CIFAR10",
        _TABLE_2,
        """
        deterministic    0.66±0.00 0.59±0.00 0.58±0.00 - - - -
        deep_ensemble    0.66 0.61 0.59 0.42 0.67 0.72 0.02
        mc_dropout       0.46±0.01 0.37±0.01 0.34±0.01 0.60±0.03 0.76±0.02 0.61±0.01 0.05±0.00
        hib              0.11±0.01 0.07±0.00 0.05±0.00 0.44±0.17 0.70±0.10 0.29±0.03 0.04±0.02
        pfe              0.66±0.00 0.60±0.00 0.58±0.00 0.21±0.02 0.56±0.01 0.56±0.01 0.11±0.01
        laplace_posthoc  0.66±0.00 0.60±0.00 0.58±0.00 0.50±0.11 0.69±0.07 0.81±0.01 0.23±0.01
        laplace_online   0.66±0.01 0.60±0.00 0.57±0.01 0.78±0.04 0.85±0.03 0.83±0.01 0.01±0.00
        """,
    ),
    (3, "cub200"): (
        "CUB200",
        _TABLE_3,
        """
        deterministic    0.62±0.01 0.48±0.01 0.42±0.01 - - -
        deep_ensemble    0.21 0.11 0.07 0.47 0.55 0.21
        pfe              0.62±0.01 0.50±0.01 0.43±0.01 0.44±0.16 0.50±0.08 0.61±0.02
        hib              0.33±0.04 0.19±0.02 0.14±0.02 0.54±0.12 0.61±0.10 0.31±0.07
        mc_dropout       0.61±0.00 0.48±0.00 0.42±0.00 0.73±0.08 0.68±0.07 0.63±0.01
        laplace_posthoc  0.65±0.01 0.52±0.01 0.45±0.01 0.56±0.16 0.61±0.11 0.66±0.03
        laplace_online   0.61±0.00 0.48±0.00 0.42±0.00 0.80±0.03 0.75±0.03 0.63±0.01
        """,
    ),
    (3, "lfw"): (
        "LFW",
        _TABLE_3,
        """
        deterministic    0.44±0.00 0.68±0.00 0.65±0.00 - - -
        deep_ensemble    0.36 0.57 0.54 0.52 0.64 0.33
        pfe              0.44±0.00 0.68±0.00 0.65±0.00 0.03±0.02 0.41±0.00 0.49±0.01
        mc_dropout       0.42±0.00 0.65±0.01 0.63±0.01 0.03±0.01 0.41±0.00 0.46±0.01
        laplace_posthoc  0.44±0.01 0.68±0.01 0.65±0.00 0.65±0.14 0.72±0.11 0.45±0.03
        laplace_online   0.46±0.00 0.71±0.00 0.69±0.00 0.71±0.22 0.78±0.17 0.50±0.02
        """,
    ),
    (4, "msls"): (
        "MSLS validation",
        _TABLE_4,
        """
        deterministic    0.77 0.88 0.90 0.61 0.56 -
        mc_dropout       0.75 0.87 0.87 0.59 0.54 0.77
        pfe              0.77 0.88 0.90 0.61 0.56 0.73
        laplace_posthoc  0.76 0.86 0.89 0.60 0.55 0.74
        laplace_online   0.76 0.87 0.90 0.60 0.56 0.77
        """,
    ),
    (4, "msls_challenge"): (
        "MSLS challenge",
        _TABLE_4,
        """
        deterministic    0.58 0.74 0.78 0.45 0.43 -
        mc_dropout       0.55 0.71 0.76 0.43 0.41 0.57
        pfe              0.58 0.74 0.78 0.45 0.44 0.57
        laplace_posthoc  0.58 0.74 0.78 0.45 0.44 0.59
        laplace_online   0.57 0.74 0.78 0.45 0.43 0.63
        """,
    ),
}


def paper_table(table: int, data: str) -> PaperTable | None:
    """The paper's figures.

    Args:
        table: 1 to 4.
        data: As on the command line; ``"msls_challenge"`` for the second half of Table 4. The paper's Table 1 has one
            data set, and stands beside any.

    Returns:
        The table, or ``None`` where the paper has none on these data.
    """
    found = _FIGURES.get((table, "lfw" if table == 1 else data))
    if found is None:
        return None
    name, columns, text = found
    rows = {}
    for line in text.strip().splitlines():
        key, *cells = line.split()
        rows[key] = {column: _read(cell) for column, cell in zip(columns, cells, strict=True) if cell != "-"}
    return PaperTable(name, rows)


def _read(cell: str) -> tuple[float, float | None]:
    mean, _, std = cell.partition("±")
    return float(mean), float(std) if std else None

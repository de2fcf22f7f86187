"""The document's figures: tables 1 and 2 of "Hedged instance embedding"."""

from __future__ import annotations

__all__ = ["ITERATIONS", "SCORES", "TAUS"]

ITERATIONS = 500_000
"""Of its trainings, in batches of 128 images."""

_Both = tuple[float, float]

SCORES: dict[tuple[int, int], dict[str, dict[str, _Both]]] = {
    (2, 2): {
        "point_soft": {"ap": (0.987, 0.880), "knn": (0.871, 0.583)},
        "hedged": {"ap": (0.989, 0.907), "knn": (0.879, 0.760)},
        "hedged_mixture": {"ap": (0.990, 0.912), "knn": (0.888, 0.757)},
    },
    (3, 3): {
        "point_soft": {"ap": (0.987, 0.901), "knn": (0.795, 0.522)},
        "hedged": {"ap": (0.989, 0.922), "knn": (0.770, 0.555)},
        "hedged_mixture": {"ap": (0.991, 0.925), "knn": (0.766, 0.598)},
    },
    (3, 2): {
        "point_soft": {"ap": (0.978, 0.886), "knn": (0.554, 0.274)},
        "hedged": {"ap": (0.981, 0.899), "knn": (0.591, 0.350)},
        "hedged_mixture": {"ap": (0.976, 0.904), "knn": (0.540, 0.351)},
    },
}
"""Table 1, by digits and dimensions, then by row: clean and corrupt."""

TAUS: dict[tuple[int, int], dict[str, dict[str, _Both]]] = {
    (2, 2): {
        "hedged": {"ap": (0.74, 0.81), "knn": (0.71, 0.47)},
        "hedged_mixture": {"ap": (0.43, 0.79), "knn": (0.57, 0.43)},
    },
    (3, 3): {
        "hedged": {"ap": (0.51, 0.85), "knn": (0.74, 0.67)},
        "hedged_mixture": {"ap": (0.39, 0.79), "knn": (0.54, 0.34)},
    },
    (3, 2): {
        "hedged": {"ap": (0.63, 0.82), "knn": (0.76, 0.49)},
        "hedged_mixture": {"ap": (0.28, 0.76), "knn": (0.29, 0.50)},
    },
}
"""Table 2, the same."""

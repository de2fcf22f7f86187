"""Metrics of retrieval, and of the uncertainty of retrieval (Warburg et al. 2023, appendix G.3).

Shape letters: ``N`` points (or queries), ``M`` gallery points, ``K`` retrieved neighbours, ``S`` samples, ``D``
embedding dimension. The usual order of calls: embeddings -> ``nearest_neighbors`` -> ``rank_by_labels`` ->
``recall_at_k``, ``map_at_k``, ``ausc``; sampled embeddings -> ``retrieval_votes`` -> ``calibration_bins``,
``retrieval_ece``, ``retrieval_brier``.

Every function raises an ``InputError`` that names the argument for values that its ``Args`` do not allow: another shape
or number of points, an empty tensor, NaN and infinity, a row of zeros with the cosine, an unknown option.
"""

from __future__ import annotations

from contrastive_curvature.metrics.calibration import (
    CalibrationBins,
    brier_score,
    calibration_bins,
    retrieval_brier,
    retrieval_ece,
)
from contrastive_curvature.metrics.neighbors import nearest_neighbors
from contrastive_curvature.metrics.retrieval import (
    Ranking,
    average_precision_at_k,
    map_at_k,
    rank_by_labels,
    recall_at_k,
)
from contrastive_curvature.metrics.uncertainty import SparsificationCurve, auprc, auroc, ausc, sparsification_curve
from contrastive_curvature.metrics.verification import DetCurve, det_curve, equal_error_rate
from contrastive_curvature.metrics.votes import retrieval_votes

__all__ = [
    # retrieval
    "nearest_neighbors",
    "Ranking",
    "rank_by_labels",
    "recall_at_k",
    "average_precision_at_k",
    "map_at_k",
    # one uncertainty per query
    "auroc",
    "auprc",
    "SparsificationCurve",
    "sparsification_curve",
    "ausc",
    # one score per pair
    "DetCurve",
    "det_curve",
    "equal_error_rate",
    # sampled embeddings
    "retrieval_votes",
    "CalibrationBins",
    "calibration_bins",
    "brier_score",
    "retrieval_ece",
    "retrieval_brier",
]

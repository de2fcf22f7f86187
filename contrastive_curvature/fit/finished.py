"""From the merged sums of batches to the curvature of a data set."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from contrastive_curvature.fit.class_sums import TYPICAL, centres_of
from contrastive_curvature.fit.dataset import DatasetCurvature
from contrastive_curvature.fit.feature_sample import FeatureSample
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.parts.state import State
from contrastive_curvature.parts.sums import CURVATURE_SUM, FEATURES, factors_of

__all__ = ["COST", "NORMS", "VALUE", "finished_sums", "kept_features", "summed_curvature"]

VALUE, COST, NORMS = "value", "cost", "norms"
"""Names of sums over batches: the loss, its non-negative version, and the norms of the raw outputs."""


def finished_sums(pullback: Pullback, state: State, structure: Structure) -> DatasetCurvature:
    """The sum over all batches. If a single point contributes most of it, there is a warning.

    Args:
        pullback: Pullback to the parameters.
        state: Of all parts, with the sums :data:`VALUE`, :data:`COST` and :data:`NORMS`.
        structure: ``diag``, ``full`` or ``kron``.

    Raises:
        InputError: A part is missing, or the sum is not finite.
    """
    curvature = summed_curvature(pullback, state, structure)
    sums, n = state.sums, state.n
    # Where a part had no sums of classes, those of the others do not say which classes there are.
    summed = state.classes is not None and int(state.classes.counts.sum()) == n and TYPICAL in state.kept
    centres = centres_of(state.classes, state.kept[TYPICAL]) if summed else None
    return DatasetCurvature(curvature, sums[VALUE], sums[COST], n, kept_features(state), sums[NORMS] / n, centres)


def summed_curvature(pullback: Pullback, state: State, structure: Structure, more: Tensor | int = 0) -> Any:
    """The curvature of all parts; warns of a point that contributes most of it.

    Args:
        pullback: Pullback to the parameters.
        state: Of all parts.
        structure: ``diag``, ``full`` or ``kron``.
        more: What is added to it, of ``diag`` and ``full``.

    Raises:
        InputError: A part is missing, or the sum is not finite.
    """
    state.check_complete()
    curvature: Any = factors_of(state.sums) if structure is Structure.KRON else state.sums[CURVATURE_SUM] + more
    check_finite(curvature, pullback, "the sum over all batches")
    if state.contributions is not None:
        state.contributions.warn()
    return curvature


def kept_features(state: State) -> FeatureSample | None:
    """The sample of the features, where the pass saw them."""
    return FeatureSample.of_kept(state.kept[FEATURES]) if FEATURES in state.kept else None

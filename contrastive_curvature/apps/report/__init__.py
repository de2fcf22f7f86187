"""The evaluation of a posterior on data that it was not fitted on: every metric, plots, and one page to look at.

``evaluate(la, test, unknown=..., gallery=...)`` gives an :class:`Evaluation`. What cannot be measured (no unknown
inputs, no labels, no calibration) is a :class:`Missing` that says why; nothing else fails for it.
"""

from __future__ import annotations

from contrastive_curvature.apps.report.evaluation import Evaluation, Missing
from contrastive_curvature.apps.report.measure import evaluate
from contrastive_curvature.apps.report.scored import Data

__all__ = ["Data", "Evaluation", "Missing", "evaluate"]

"""The evaluation of a posterior on data that it was not fitted on: every metric, plots, and one page to look at.

``evaluate(la, test, unknown=..., gallery=...)`` gives an :class:`Evaluation`. A part that cannot be measured (no
unknown inputs, no labels, no calibration) is a :class:`Missing` with the reason; the other parts are not affected.
"""

from __future__ import annotations

from contrastive_curvature.apps.report.evaluation import Evaluation, Missing
from contrastive_curvature.apps.report.measure import evaluate
from contrastive_curvature.apps.report.scored import Data

__all__ = ["Data", "Evaluation", "Missing", "evaluate"]

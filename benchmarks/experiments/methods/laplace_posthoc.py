"""Post-hoc LAM: a Laplace posterior over the last layer of a trained encoder (paper, section 3.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.experiments.data.split import RetrievalData
from benchmarks.experiments.methods.base import Setting
from benchmarks.experiments.methods.on_base import OnBase
from benchmarks.experiments.methods.sampled import PosteriorMethod, curvature_options


class LaplacePosthoc(PosteriorMethod, OnBase):
    """The library's default posterior over all pairs of the training set, with its own prior and temperature.

    Uncertainty and variants: see :func:`~benchmarks.experiments.methods.sampled.closed_form`.

    Args:
        setting: How encoders are made and trained.
        distance: Of the curvature; ``None`` for the library's default.
        pd_fix: Of the curvature; ``None`` for the library's default.
        structure: ``hessian_structure`` of the posterior; ``None`` for the library's default, with the fixes
            ``positive`` and ``full`` for ``"diag"``.
    """

    name = "laplace_posthoc"
    title = "LAM (post-hoc)"

    def __init__(
        self,
        setting: Setting,
        distance: str | None = None,
        pd_fix: str | None = None,
        structure: str | None = None,
    ) -> None:
        super().__init__(setting, curvature_options(setting, distance, pd_fix), structure)

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """See :meth:`OnBase.fit_on_base`; nothing is trained, and nothing is random."""
        self.fit_post_hoc(self.base.encoder, data)

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """Nothing: the posterior holds the encoder."""

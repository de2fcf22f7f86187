"""Minus the norm of the raw output, which the loss never sees, as an uncertainty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Prediction
from benchmarks.experiments.methods.embed import unit
from benchmarks.experiments.methods.on_base import OnBase


class NormScore(OnBase):
    """Long outputs count as certain: those of images that the network answers strongly.

    Read as the concentration of a von Mises-Fisher distribution around the embedding, the norm is that score too: any
    decreasing function of it ranks alike.

    Args:
        setting: That of the encoder.
    """

    name = "norm"
    title = "Minus norm of raw output"

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Nothing is fitted."""

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """Nothing was fitted."""

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; minus the norm, in units of the raw outputs."""
        z = self.base.outputs(split)
        return Prediction(unit(z), -z.norm(dim=1))

"""An encoder trained with the contrastive loss, without any uncertainty (paper, G.4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import check_fit, fitted
from benchmarks.experiments.methods.embed import image_batches, map_batches, unit
from benchmarks.experiments.methods.training import train
from contrastive_curvature.network.encoder import Encoder


class Deterministic(Method):
    """See the module. Other methods build on its encoder.

    Args:
        setting: How the encoder is made and trained.
    """

    name = "deterministic"
    title = "Deterministic"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._encoder: nn.Module | None = None
        self._analysed: Encoder | None = None

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._encoder, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        check_fit(seed, folder)
        self._take(train(self.setting, data, seed, folder / "training.pt").get_submodule("encoder"))

    def predict(self, split: Split) -> Prediction:
        """Unit embeddings, without uncertainty."""
        return Prediction(unit(self.outputs(split)))

    def outputs(self, split: Split) -> Tensor:
        """Raw outputs of images, shape (N, D), on the CPU."""
        return map_batches(self.encoder, split, self.setting, "embeddings")

    def features(self, split: Split) -> tuple[Tensor, Tensor]:
        """Raw outputs (N, D) of images, and what the last layer makes them from, (N, F); on the CPU."""
        parts = [self.encode_features(x) for x in image_batches(split, self.setting)]
        return torch.cat([z.cpu() for z, _ in parts]), torch.cat([phi.cpu() for _, phi in parts])

    def encode_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Raw outputs (B, D) and features (B, F) of one batch on the device, without their graph."""
        with torch.no_grad():
            if self._analysed is None:
                self._analysed = Encoder(self.encoder, x[:2])
            return self._analysed.features(x)

    def state_dict(self) -> dict[str, Any]:
        """The weights."""
        return {"encoder": dict(self.encoder.state_dict())}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`."""
        encoder = self.setting.make_encoder()
        encoder.load_state_dict(state["encoder"])
        self._take(encoder.eval())

    def _take(self, encoder: nn.Module) -> None:
        self._encoder, self._analysed = encoder, None

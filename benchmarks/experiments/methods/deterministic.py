"""An encoder trained with the contrastive loss (paper, G.4), and what methods on top of it share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction
from benchmarks.experiments.methods.embed import image_batches, map_batches, unit
from benchmarks.experiments.methods.training import train
from contrastive_curvature.network.encoder import Encoder


class EncoderMethod(Method):
    """A method that trains an encoder of its own; :attr:`encoder` is there after the fit, in evaluation mode."""

    encoder: nn.Module

    def outputs(self, split: Split) -> Tensor:
        """Raw outputs of images, shape (N, ...), on the CPU."""
        return map_batches(self.encoder, split, self.setting, "embeddings")


class Deterministic(EncoderMethod):
    """See the module. Other methods build on its encoder."""

    name = "deterministic"
    _analysed: Encoder | None = None

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        self.encoder = train(self.setting, data, seed).get_submodule("encoder")

    def predict(self, split: Split) -> Prediction:
        """Unit embeddings, without uncertainty."""
        return Prediction(unit(self.outputs(split)))

    def features(self, split: Split) -> tuple[Tensor, Tensor]:
        """Raw outputs (N, D) of images, and what the last layer makes them from, (N, F); on the CPU."""
        parts = [self.encode_features(x) for x in image_batches(split, self.setting)]
        return torch.cat([z.cpu() for z, _ in parts]), torch.cat([phi.cpu() for _, phi in parts])

    def encode_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Raw outputs (B, D) and features (B, F) of one batch on the device, without their graph."""
        with torch.no_grad():
            if self._analysed is None:
                self._analysed = Encoder(self.encoder, x[:2])
            return self._analysed.forward_with_features(x)


class OnBase(Method):
    """A score on top of a deterministic encoder, which it leaves as it is."""

    needs_base = True
    base: Deterministic

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """See :meth:`Method.fit`."""
        assert isinstance(base, Deterministic)
        self.base = base
        self.fit_on_base(data, seed)

    def fit_on_base(self, data: RetrievalData, seed: int) -> None:
        """Fit what the score needs beyond the encoder."""

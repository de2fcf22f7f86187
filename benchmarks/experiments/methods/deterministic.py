"""An encoder trained with the contrastive loss (paper, G.4), and what methods on top of it share."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import fitted
from benchmarks.experiments.methods.embed import image_batches, map_batches, unit
from benchmarks.experiments.methods.training import train
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.network.encoder import Encoder


class EncoderMethod(Method):
    """What methods share that train an encoder of their own."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._encoder: nn.Module | None = None

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._encoder, self.name)

    def outputs(self, split: Split) -> Tensor:
        """Raw outputs of images, shape (N, ...), on the CPU."""
        return map_batches(self.encoder, split, self.setting, "embeddings")


class Deterministic(EncoderMethod):
    """See the module. Other methods build on its encoder.

    Args:
        setting: How the encoder is made and trained.
    """

    name = "deterministic"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._analysed: Encoder | None = None

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        self._take(train(self.setting, data, seed, folder / "training.pt").get_submodule("encoder"))

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


class OnBase(Method):
    """A score on top of a deterministic encoder, which it leaves as it is.

    Args:
        setting: That of the encoder.
    """

    needs_base = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._base: Deterministic | None = None

    @property
    def base(self) -> Deterministic:
        """The deterministic method.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._base, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`.

        Raises:
            InputTypeError: ``base`` is no deterministic method.
            InputError: It is not fitted, or has another network than the setting's.
        """
        if not isinstance(base, Deterministic):
            hint = "Fit one with the same seed first."
            raise InputTypeError("base", "a fitted Deterministic", f"a {type(base).__name__}", hint)
        check_member(base, self.setting, "base")
        self.check_data(data)
        self._base = base
        self.fit_on_base(data, seed, folder)

    def check_data(self, data: RetrievalData) -> None:
        """Refuse data that the score cannot be fitted on."""

    @abstractmethod
    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Fit what the score needs beyond the encoder."""

    def own_state(self) -> dict[str, Any]:
        """What :meth:`fit_on_base` fitted."""
        return {}

    @abstractmethod
    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """Take over what :meth:`own_state` gave; :attr:`base` is there already."""

    def state_dict(self) -> dict[str, Any]:
        """Encoder and score."""
        return {"base": self.base.state_dict(), "own": self.own_state()}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`."""
        base = Deterministic(self.setting)
        base.load_state_dict(state["base"], data)
        self._base = base
        self.load_own_state(state["own"], data)


def check_member(method: Deterministic, setting: Setting, name: str) -> None:
    """Whether an encoder that was trained before is the one that a setting describes.

    Raises:
        InputError: It is not fitted, or has another network or latent dimension.
    """
    fitted(method._encoder, name)
    wanted, came = ((s.network, s.dim) for s in (setting, method.setting))
    if wanted != came:
        raise InputError(name, f"network and dimension {wanted}", f"{came}")

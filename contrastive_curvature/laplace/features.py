"""The feature extractor of the last-layer classes: raw outputs and features, whatever module ends the encoder."""

from __future__ import annotations

from typing import NamedTuple

from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, slice_inputs


class Features(NamedTuple):
    """A batch that went through the encoder before; the last-layer classes take it in the place of inputs.

    Attributes:
        outputs: Raw outputs, shape (B, D).
        features: Inputs of the last layer, shape (B, F).
    """

    outputs: Tensor
    features: Tensor


class RawFeatureExtractor(FeatureExtractor):
    """laplace-torch's feature extractor, on the layer whose outputs are the raw outputs.

    laplace-torch takes the last module that runs for the last layer; in an encoder that is often a normalisation.

    Args:
        model: The encoder; owned by the extractor.
        last_layer_name: Name of the last linear layer, or ``None`` to find it.
        enable_backprop: Whether features keep their graph.
        label_key: Where batches that are mappings keep the labels.
    """

    def __init__(
        self,
        model: nn.Module,
        last_layer_name: str | None = None,
        enable_backprop: bool = False,
        label_key: str = "labels",
    ) -> None:
        super().__init__(model, enable_backprop=enable_backprop)
        self._wanted, self._label_key = last_layer_name, label_key
        # Kept out of the module tree: it would list every parameter twice.
        object.__setattr__(self, "_analysed", None)

    @property
    def encoder(self) -> Encoder:
        """The analysed encoder.

        Raises:
            RuntimeError: :meth:`analyse` has not run.
        """
        if self._analysed is None:
            raise RuntimeError("The encoder has not seen a batch yet; call fit first.")
        return self._analysed

    def analyse(self, probe: Inputs) -> None:
        """Find the last layer with one batch.

        Args:
            probe: A batch on the model's device, of inputs or of saved features.

        Raises:
            InputError: Saved features of another encoder.
            UnsupportedError: The encoder has no last linear layer, or normalises inside ``forward``.
        """
        if self._analysed is not None:
            return
        few = slice_inputs(probe, slice(0, 8))
        encoder = Encoder(self.model, few, self._wanted, takes_features=True, label_key=self._label_key)
        layer = encoder.require_last_layer()
        object.__setattr__(self, "_analysed", encoder)
        object.__setattr__(self, "last_layer", layer)
        self._last_layer_name = encoder.last_layer_name

    def forward(self, x: Inputs) -> Tensor:
        """Raw outputs, shape (N, D)."""
        return self.encoder(x)

    def forward_with_features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Raw outputs (N, D) and the inputs of the last layer (N, F)."""
        z, phi = self.encoder.features(x)
        return z, phi if self.enable_backprop else phi.detach()

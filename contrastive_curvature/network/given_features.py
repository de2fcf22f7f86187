"""Saved features in place of inputs: the inputs of the last linear layer, and the encoder that computed them.

A batch of saved features is a mapping like any other batch of inputs, so it works wherever inputs do. Its two entries
are the features and a text that identifies the encoder; copies to another device, slices and saved states keep a text
unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from contrastive_curvature.network.digest import same_encoder, summary, trunk_tensors

FEATURES = "contrastive_curvature.features"
"""Key of the features, shape (B, F)."""

SOURCE = "contrastive_curvature.source"
"""Key of a :class:`FeatureSource` in JSON."""


@dataclass(frozen=True)
class FeatureSource:
    """The encoder that computed features, and the results of its analysis.

    Attributes:
        last_layer: Name of the linear layer whose outputs are the raw outputs, in ``model.named_modules()``.
        width: Number F of features.
        outputs: Number D of outputs.
        trunk: Fingerprint of all weights before the last layer: the :func:`.summary` of :func:`.trunk_tensors`.
    """

    last_layer: str
    width: int
    outputs: int
    trunk: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, last_layer_name: str) -> FeatureSource:
        """Return the source for features that this encoder computes now."""
        layer: Any = model.get_submodule(last_layer_name)
        trunk = tuple(summary(trunk_tensors(model, last_layer_name)).tolist())
        return cls(last_layer_name, layer.in_features, layer.out_features, trunk)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> FeatureSource:
        """Make the source from the result of :meth:`to_plain`."""
        return cls(**{**plain, "trunk": tuple(plain["trunk"])})

    def to_plain(self) -> dict[str, Any]:
        """Return a dictionary of strings and numbers, for JSON."""
        return {**asdict(self), "trunk": list(self.trunk)}


def feature_inputs(features: Tensor, source: FeatureSource) -> dict[str, Any]:
    """Return a batch of saved features (B, F) that a last-layer posterior accepts in place of inputs."""
    return {FEATURES: features, SOURCE: json.dumps(source.to_plain())}


def has_features(x: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a batch holds saved features instead of inputs."""
    return isinstance(x, Mapping) and FEATURES in x


def difference(model: nn.Module, source: FeatureSource, last_layer_name: str | None = None) -> str | None:
    """Say how the source of features differs from an encoder; ``None`` if they agree.

    Only the last layer may have other weights. By default its name is the source's ``last_layer``.
    """
    if last_layer_name not in (None, source.last_layer):
        return f"what layer {source.last_layer!r} takes in, and the last layer is {last_layer_name!r}"
    layer = dict(model.named_modules()).get(source.last_layer)
    if not isinstance(layer, nn.Linear):
        return f"what layer {source.last_layer!r} takes in, and this encoder has no linear layer of that name"
    if layer.in_features != source.width:
        return f"{source.width} of a point, and layer {source.last_layer!r} takes {layer.in_features}"
    trunk = torch.tensor(source.trunk, dtype=torch.float64)
    if not same_encoder(summary(trunk_tensors(model, source.last_layer)), trunk):
        return "those of an encoder with other weights before the last layer"
    return None

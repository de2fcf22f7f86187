"""Features in place of inputs: the inputs of the last linear layer, which the retriever computes once.

A batch of features is a mapping like any other batch of inputs, so it works wherever inputs do. Its two entries are
the features and the name of the layer; copies to another device, slices and saved states keep a text unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor

FEATURES = "contrastive_curvature.features"
"""Key of the features, shape (B, F)."""

LAST_LAYER = "contrastive_curvature.last_layer"
"""Key of the name of the linear layer that takes the features, in ``model.named_modules()``."""


def feature_inputs(features: Tensor, last_layer_name: str) -> dict[str, Any]:
    """Return a batch of features (B, F) that a last-layer posterior accepts in place of inputs."""
    return {FEATURES: features, LAST_LAYER: last_layer_name}


def has_features(x: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a batch holds features instead of inputs."""
    return isinstance(x, Mapping) and FEATURES in x

"""Saved features in the place of inputs: what the last linear layer takes in, and which encoder it came from.

A batch of them is a mapping like any other batch of inputs, so that it passes wherever inputs do. Its two entries are
the features, and a text that says which encoder wrote them; a text passes unchanged through copies to another device,
slices and saved states.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.network.digest import same_encoder, trunk_fingerprint

FEATURES = "contrastive_curvature.features"
"""Key of the features, shape (B, F)."""

SOURCE = "contrastive_curvature.source"
"""Key of a :class:`FeatureSource` in JSON."""


@dataclass(frozen=True)
class FeatureSource:
    """The encoder that features came from, and what the analysis of its inputs found.

    Attributes:
        last_layer: Name of the linear layer whose outputs are the raw outputs, in ``model.named_modules()``.
        width: Number F of features.
        outputs: Number D of outputs.
        trunk: Fingerprint of all weights before the last layer, see :func:`.trunk_fingerprint`.
    """

    last_layer: str
    width: int
    outputs: int
    trunk: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, last_layer_name: str) -> FeatureSource:
        """Return the source of features that this encoder computes now."""
        layer: Any = model.get_submodule(last_layer_name)
        trunk = tuple(trunk_fingerprint(model, last_layer_name).tolist())
        return cls(last_layer_name, layer.in_features, layer.out_features, trunk)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> FeatureSource:
        """Return the inverse of :meth:`to_plain`."""
        return cls(**{**plain, "trunk": tuple(plain["trunk"])})

    def to_plain(self) -> dict[str, Any]:
        """Return strings and numbers only, for JSON."""
        return {**asdict(self), "trunk": list(self.trunk)}


def feature_inputs(features: Tensor, source: FeatureSource) -> dict[str, Any]:
    """Return a batch of saved features (B, F), as a last-layer posterior takes it in the place of inputs."""
    return {FEATURES: features, SOURCE: json.dumps(source.to_plain())}


def has_features(x: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a batch holds saved features instead of inputs."""
    return isinstance(x, Mapping) and FEATURES in x


def source_of(x: Mapping[str, Any]) -> FeatureSource:
    """Return the source of a batch of saved features."""
    if SOURCE not in x:
        wanted = "features with their source, as a FeatureFolder yields them"
        raise InputTypeError("x", wanted, f"no entry {SOURCE!r}")
    return _parsed(x[SOURCE])


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> FeatureSource:
    return FeatureSource.of_plain(json.loads(text))


def read_features(x: Mapping[str, Any], layer: nn.Linear) -> Tensor:
    """Return the features (B, F) of a batch, for a layer: in its precision, at least float32, and on its device."""
    phi, wanted = x[FEATURES], f"features of shape (B, {layer.in_features})"
    if not isinstance(phi, Tensor) or not phi.is_floating_point():
        received = f"a tensor of {phi.dtype}" if isinstance(phi, Tensor) else f"a {type(phi).__name__}"
        raise InputTypeError("x", wanted, received)
    if phi.ndim != 2 or phi.shape[1] != layer.in_features:
        raise InputError("x", wanted, f"shape {tuple(phi.shape)}")
    # A layer in half precision computes in it, but curvatures are sums of products of features.
    return phi.to(layer.weight.device, torch.promote_types(layer.weight.dtype, torch.float32))


def refuse_features() -> UnsupportedError:
    """Return the error where more than the last layer's weights is asked for."""
    msg = (
        "features: this needs the encoder's own inputs. Use subset_of_weights='last_layer' of laplace.Laplace, with "
        "hessian_structure='diag', 'kron', 'kron_lowrank' or 'full', or pass the loader of the inputs."
    )
    return UnsupportedError(msg)


def difference(model: nn.Module, source: FeatureSource) -> str | None:
    """Say how features of a source are not those of an encoder; ``None`` where they are.

    The last layer alone may have other weights.
    """
    layer = dict(model.named_modules()).get(source.last_layer)
    if not isinstance(layer, nn.Linear):
        return f"what layer {source.last_layer!r} takes in, and this encoder has no linear layer of that name"
    if layer.in_features != source.width:
        return f"{source.width} of a point, and layer {source.last_layer!r} takes {layer.in_features}"
    trunk = torch.tensor(source.trunk, dtype=torch.float64)
    if not same_encoder(trunk_fingerprint(model, source.last_layer), trunk):
        return "those of an encoder with other weights before the last layer"
    return None


def check_source(model: nn.Module, last_layer_name: str, source: FeatureSource) -> None:
    """Refuse features of another encoder; the last layer alone may have other weights."""
    received = difference(model, source)
    if last_layer_name != source.last_layer:
        received = f"what layer {source.last_layer!r} takes in, and the last layer is {last_layer_name!r}"
    if received is not None:
        hint = (
            "Load the weights that the encoder had when they were written, or write those of this encoder with "
            "contrastive_curvature.features(encoder, loader, another_path)."
        )
        raise InputError("features", "those of this encoder", received, hint)

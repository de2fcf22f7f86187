"""Saved features in the place of inputs: what the last linear layer takes in, and which encoder it came from.

A batch of them is a mapping like any other batch of inputs, so that it passes wherever inputs do. Its two entries are
the features, and a text that says which encoder wrote them; a text passes unchanged through copies to another device,
slices and saved states.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.network.digest import same_encoder, trunk_fingerprint, trunk_tensors

__all__ = [
    "FEATURES",
    "SOURCE",
    "FeatureSource",
    "SourceCheck",
    "check_source",
    "difference",
    "feature_inputs",
    "has_features",
    "read_features",
    "refuse_features",
    "source_of",
]

FEATURES = "contrastive_curvature.features"
"""Key of the features, shape (B, F)."""

SOURCE = "contrastive_curvature.source"
"""Key of the text of :meth:`FeatureSource.to_text`."""

_NUMBERS = 4
"""Length of a fingerprint."""


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
        """The source of features that this encoder computes now."""
        layer: Any = model.get_submodule(last_layer_name)
        trunk = tuple(trunk_fingerprint(model, last_layer_name).tolist())
        return cls(last_layer_name, layer.in_features, layer.out_features, trunk)

    @classmethod
    def of_plain(cls, plain: Any, argument: str) -> FeatureSource:
        """The inverse of :meth:`to_plain`.

        Raises:
            InputError: Something else.
        """
        wanted = "the description of an encoder that contrastive_curvature.features writes"
        if not isinstance(plain, Mapping) or set(plain) != {"last_layer", "width", "outputs", "trunk"}:
            raise InputError(expected(argument, wanted, f"{plain!r}"[:80]))
        sizes = (plain["width"], plain["outputs"])
        good = isinstance(plain["last_layer"], str) and all(type(size) is int and size > 0 for size in sizes)
        trunk = plain["trunk"]
        numbers = isinstance(trunk, list) and len(trunk) == _NUMBERS and all(_is_number(value) for value in trunk)
        if not good or not numbers:
            raise InputError(expected(argument, wanted, f"{plain!r}"[:80]))
        return cls(plain["last_layer"], *sizes, tuple(float(value) for value in trunk))

    def to_plain(self) -> dict[str, Any]:
        """Strings and numbers only, for JSON."""
        return {**asdict(self), "trunk": list(self.trunk)}

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_plain())


def feature_inputs(features: Tensor, source: FeatureSource) -> dict[str, Any]:
    """A batch of saved features (B, F), as a last-layer posterior takes it in the place of inputs."""
    return {FEATURES: features, SOURCE: source.to_text()}


def has_features(x: Any) -> bool:
    """Whether a batch holds saved features instead of inputs."""
    return isinstance(x, Mapping) and FEATURES in x


def source_of(x: Mapping[str, Any]) -> FeatureSource:
    """The source of a batch of saved features.

    Raises:
        InputTypeError: The batch has none.
        InputError: It is malformed.
    """
    text = x.get(SOURCE)
    if not isinstance(text, str):
        wanted = "features with their source, as a FeatureFolder yields them"
        raise InputTypeError(expected("x", wanted, f"a {type(text).__name__} under {SOURCE!r}"))
    return _parsed(text)


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> FeatureSource:
    try:
        plain = json.loads(text)
    except ValueError:
        plain = text
    return FeatureSource.of_plain(plain, f"x[{SOURCE!r}]")


def read_features(x: Mapping[str, Any], layer: nn.Linear) -> Tensor:
    """The features of a batch, for a layer: shape (B, F), in its precision, at least float32, and on its device.

    Raises:
        InputTypeError: No floating-point tensor.
        InputError: Another shape.
    """
    phi, wanted = x[FEATURES], f"features of shape (B, {layer.in_features})"
    if not isinstance(phi, Tensor) or not phi.is_floating_point():
        received = f"a tensor of {phi.dtype}" if isinstance(phi, Tensor) else f"a {type(phi).__name__}"
        raise InputTypeError(expected("x", wanted, received))
    if phi.ndim != 2 or phi.shape[1] != layer.in_features:
        raise InputError(expected("x", wanted, f"shape {tuple(phi.shape)}"))
    # A layer in half precision computes in it, but curvatures are sums of products of features.
    return phi.to(layer.weight.device, torch.promote_types(layer.weight.dtype, torch.float32))


def refuse_features() -> UnsupportedError:
    """The error where more than the last layer's weights is asked for."""
    msg = (
        "features: saved features are what the last layer takes in, and this needs the encoder's own inputs. Use "
        "subset_of_weights='last_layer' of laplace.Laplace, with hessian_structure='diag', 'kron', 'kron_lowrank' or "
        "'full', or pass the loader of the inputs."
    )
    return UnsupportedError(msg)


def difference(model: nn.Module, source: FeatureSource) -> str | None:
    """How features of a source are not those of an encoder, for a message; ``None`` where they are.

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


def check_source(model: nn.Module, last_layer_name: str | None, source: FeatureSource) -> None:
    """Refuse features of another encoder; its last layer alone may have other weights.

    Args:
        model: The encoder.
        last_layer_name: Name of its last layer.
        source: Of the features.

    Raises:
        InputError: Another layer, other sizes, or other weights before the last layer.
    """
    if last_layer_name != source.last_layer:
        received: str | None = f"what layer {source.last_layer!r} takes in, and the last layer is {last_layer_name!r}"
    else:
        received = difference(model, source)
    if received is not None:
        hint = (
            "Load the weights that the encoder had when they were written, or write those of this encoder with "
            "contrastive_curvature.features(encoder, loader, another_path)."
        )
        raise InputError(expected("features", "those of this encoder", received, hint))


class SourceCheck:
    """:func:`check_source` for every batch: the sums over all weights only where a weight may have changed."""

    def __init__(self) -> None:
        self._passed: tuple[Any, ...] | None = None

    def __call__(self, model: nn.Module, last_layer_name: str | None, source: FeatureSource) -> None:
        """Check a source.

        Raises:
            InputError: It is that of another encoder.
        """
        tensors = [] if last_layer_name is None else trunk_tensors(model, last_layer_name)
        versions = tuple((0 if t.is_inference() else t._version, t.data_ptr()) for t in tensors)
        state = (source, last_layer_name, versions)
        if state != self._passed:
            check_source(model, last_layer_name, source)
            self._passed = state


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

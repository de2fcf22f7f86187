"""The encoder of a command: a last layer, the user's own function, or a model of timm or sentence-transformers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.errors import expected
from contrastive_curvature.network.given_features import FeatureSource

__all__ = ["LIBRARIES", "Encoder", "LastLayer", "encoder_of", "last_layer_encoder", "their_error"]


class LastLayer(nn.Linear):
    """The last linear layer of an encoder, alone: features (B, F) -> raw outputs (B, D)."""


@dataclass
class Encoder:
    """A module, and how inputs become its batches.

    Attributes:
        name: For messages.
        module: Maps a batch to raw outputs (B, D).
        takes: Kinds of sources that it takes.
        spec: How to make it again, plain, for JSON.
        width: Number F of features where the module is a last layer alone, else ``None``.
        image_transform: A picture (``PIL.Image``, RGB) -> tensor; ``None`` where it takes no images.
        collate: Texts -> batch; ``None`` where it takes no texts.
        feature_source: Of the feature folder that a last layer was fitted on.
    """

    name: str
    module: nn.Module
    takes: tuple[str, ...]
    spec: Mapping[str, Any]
    width: int | None = None
    image_transform: Callable[[Any], Tensor] | None = None
    collate: Callable[[list[str]], Any] | None = None
    feature_source: FeatureSource | None = None

    @property
    def identity(self) -> bool:
        """Whether it is a last layer that stands for none: the features are the embeddings."""
        return self.spec.get("identity") is True

    @property
    def dtype(self) -> torch.dtype:
        """Of its inputs that are numbers: that of its first weight."""
        weights = (weight.dtype for weight in self.module.parameters() if weight.is_floating_point())
        return next(weights, torch.float32)

    def wrap_features(self, phi: Tensor) -> Any:
        """The batch of features without a source.

        Raises:
            BadInputError: The encoder is a whole one.
        """
        if self.width is None:
            hint = "A feature folder says whose features it has; contrastive_curvature.features writes one."
            raise BadInputError(expected(self.name, "its own inputs or a feature folder", "bare features", hint))
        return phi

    def check_features(self, source: FeatureSource, where: str) -> None:
        """Refuse the features of another encoder, where it is known whose are wanted.

        A whole encoder compares its weights with every batch, in the library.

        Raises:
            BadInputError: They are of another encoder.
        """
        if self.width is not None and source.width != self.width:
            raise BadInputError(expected(where, f"features of width {self.width}", f"{source.width}"))
        if self.feature_source is not None and source != self.feature_source:
            hint = "Write them with the encoder that the posterior was fitted for."
            raise BadInputError(expected(where, "features of the encoder of the fit", "those of another", hint))


def last_layer_encoder(
    weight: np.ndarray[Any, Any] | None, bias: np.ndarray[Any, Any] | None, width: int, source: FeatureSource | None
) -> Encoder:
    """The last layer as the whole encoder, for inputs that are features.

    Args:
        weight: Shape (D, F); ``None`` for the identity: the features are the embeddings.
        bias: Shape (D,); ``None`` for zeros.
        width: Number F of features.
        source: Of the feature folder, if they are from one.

    Raises:
        BadInputError: The shapes do not fit.
    """
    matrix = np.eye(width, dtype=np.float32) if weight is None else weight
    if matrix.shape[1] != width or (bias is not None and bias.shape != matrix.shape[:1]):
        got = f"{matrix.shape}" + ("" if bias is None else f" and {bias.shape}")
        raise BadInputError(expected("weight, bias", f"shapes (D, {width}) and (D,)", got))
    layer = LastLayer(width, len(matrix))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(matrix))
        layer.bias.copy_(torch.zeros(len(matrix)) if bias is None else torch.from_numpy(bias))
    spec = {
        "kind": "last_layer",
        "identity": weight is None,
        "features_of": None if source is None else source.to_plain(),
    }
    name = "the posterior's last layer"
    return Encoder(name, layer, ("features",), spec, width, feature_source=source)


LIBRARIES = ("timm", "sentence-transformers")
"""What ``--encoder`` may begin with, beside a module of the user's own."""


def encoder_of(text: str, options: Mapping[str, Any] | None = None) -> Encoder:
    """The encoder that ``--encoder`` names.

    Args:
        text: ``module:function``, ``timm:NAME`` or ``sentence-transformers:NAME_OR_PATH``.
        options: Arguments by name for the function, ``timm.create_model`` or ``SentenceTransformer``.

    Raises:
        BadInputError: The name is unknown, a package is missing, or it is no module.
    """
    kind, _, name = text.partition(":")
    if not kind or not name:
        wanted = "module:function, timm:NAME or sentence-transformers:NAME_OR_PATH"
        raise BadInputError(expected("--encoder", wanted, f"{text!r}"))
    given = dict(options or {})
    if kind == "sentence-transformers" and os.path.isdir(name):
        # Used again from any folder.
        name = os.path.abspath(name)
        text = f"{kind}:{name}"
    if kind == "timm" and isinstance(given.get("checkpoint_path"), str):
        given["checkpoint_path"] = os.path.abspath(given["checkpoint_path"])
    spec = {"kind": "encoder", "encoder": text, "options": given}
    if kind == "timm":
        from contrastive_curvature.apps.cli.encoder_names import timm_encoder

        return timm_encoder(name, given, spec)
    if kind == "sentence-transformers":
        from contrastive_curvature.apps.cli.encoder_names import sentence_encoder

        return sentence_encoder(name, given, spec)
    return _own_encoder(kind, name, given, spec)


def _own_encoder(module_name: str, function_name: str, options: dict[str, Any], spec: Mapping[str, Any]) -> Encoder:
    argument = f"--encoder {module_name}:{function_name}"
    # As `python -m` has it: modules of the folder that the command runs in.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = f"The current folder is {os.getcwd()}; PYTHONPATH names others."
        raise BadInputError(expected(argument, "a module that Python finds", f"{error}", hint)) from error
    except (Exception, SystemExit) as error:  # whatever the user's own module raises
        raise their_error(argument, "a module that can be imported", error) from error
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        came = "none of that name" if function is None else f"a {type(function).__name__}"
        raise BadInputError(expected(argument, f"a function of {module.__name__}", came))
    try:
        made = function(**options)
    except (Exception, SystemExit) as error:  # whatever the user's own function raises
        raise their_error(argument, "the function to return an encoder", error) from error
    encoder, transform = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(encoder, nn.Module) or not (transform is None or callable(transform)):
        wanted = "a torch.nn.Module, or (module, transform)"
        raise BadInputError(expected(argument, f"the function to return {wanted}", f"a {type(made).__name__}"))
    takes = ("images", "inputs", "features") + (("texts",) if transform is not None else ())
    found = Encoder(argument, encoder, takes, spec, image_transform=transform, collate=transform)
    if transform is None:
        found.image_transform = lambda image: _to_tensor(image).to(found.dtype)
    return found


def their_error(argument: str, wanted: str, error: BaseException) -> BadInputError:
    """What code of the user raised, as the error of the argument that names it."""
    where = "--traceback shows where."
    return BadInputError(expected(argument, wanted, f"{type(error).__name__}: {error}", where))


def _to_tensor(image: Any) -> Tensor:
    """Channels first, in [0, 1], as torchvision's ``ToTensor``."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255)

"""The encoder of a command: a last layer, the user's own function, or a model of timm or sentence-transformers."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature.apps.cli.console import Console, needed, their_code
from contrastive_curvature.apps.cli.sources import ArraySource, FeatureFolderSource, Source, read_arrays
from contrastive_curvature.errors import InputError
from contrastive_curvature.network.given_features import FeatureSource

LIBRARIES = ("timm", "sentence-transformers")
"""What ``--encoder`` may begin with besides a module of the user's own."""

NO_ENCODER = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."

_DOWNLOADED = "A model that is not on this machine is downloaded, which needs the network."

_UNIT = 1e-3
"""How far norms are from 1 that were rounded to half precision."""


@dataclass
class Encoder:
    """A module, and the conversion of inputs to its batches.

    Attributes:
        name: Name for messages.
        module: Module that maps a batch to raw outputs (B, D).
        takes: Kinds of sources that it accepts.
        spec: Description from which it can be built again, for JSON.
        transform: Function from a picture (``PIL.Image``, RGB) to a tensor, or from texts to a batch.
        width: Number F of features if the module is only a last layer, else ``None``.
        feature_source: Source of the feature folder that a last layer was fitted on.
        classes: Digests of the names of the fit's classes 0, 1, ...; ``None`` without names.
    """

    name: str
    module: nn.Module
    takes: tuple[str, ...]
    spec: Mapping[str, Any]
    transform: Callable[[Any], Any] | None = None
    width: int | None = None
    feature_source: FeatureSource | None = None
    classes: list[str] | None = None

    @property
    def array(self) -> str:
        """Name of its input array in an ``.npz``: ``embeddings`` if an identity replaces the last layer."""
        return "embeddings" if self.spec.get("identity") else "features"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its first weight."""
        weights = (weight.dtype for weight in self.module.parameters() if weight.is_floating_point())
        return next(weights, torch.float32)

    def has_last_layer(self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None) -> bool:
        """Return whether the last layer has this weight and this bias (zeros for ``None``)."""
        others = (weight, np.zeros(len(weight), np.float32) if bias is None else bias)
        own = (p.detach().cpu().numpy() for p in self.module.parameters())
        return all(np.array_equal(a, b) for a, b in zip(own, others, strict=True))


def last_layer_encoder(
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    *,
    width: int,
    identity: bool = False,
    source: FeatureSource | None = None,
) -> Encoder:
    """Return a last layer as the whole encoder, for inputs that are features.

    Args:
        weight: Shape (D, F).
        bias: Shape (D,); ``None`` for zeros.
        width: Number F of the features.
        identity: Whether an identity replaces the last layer, so that the features are the embeddings.
        source: Source of the feature folder, if the features are from one.
    """
    bias = np.zeros(len(weight), np.float32) if bias is None else bias
    if weight.shape[1] != width or bias.shape != weight.shape[:1]:
        raise InputError("weight, bias", f"shapes (D, {width}) and (D,)", f"{weight.shape} and {bias.shape}")
    layer = _linear(torch.from_numpy(weight), torch.from_numpy(bias))
    spec = {"encoder": None, "identity": identity, "features_of": None if source is None else source.to_plain()}
    return Encoder("the posterior's last layer", layer, ("features",), spec, width=width, feature_source=source)


def encoder_for(
    console: Console, train: Source, text: str | None, options: Mapping[str, Any] | None, last_layer: Path | None
) -> Encoder:
    """Return the encoder that ``--encoder`` names, or the last layer that comes with features."""
    if last_layer is not None and (text is not None or not isinstance(train, FeatureFolderSource)):
        raise InputError("--last-layer", "it for a feature folder, without --encoder", "another use")
    if text is not None:
        return encoder_of(text, options or {})
    if options:
        raise InputError("--encoder-options", "them with --encoder", "no encoder")
    if isinstance(train, FeatureFolderSource):
        return _layer_of_folder(train, last_layer)
    if isinstance(train, ArraySource) and train.kind == "features":
        return _layer_of_arrays(console, train)
    raise InputError(f"{train.path}", f"an encoder for {train.kind}", "none", NO_ENCODER)


def _layer_of_folder(train: FeatureFolderSource, last_layer: Path | None) -> Encoder:
    if last_layer is None:
        hint = "Give --last-layer FILE.npz with weight and bias, or --encoder module:function."
        raise InputError(f"{train.path}", "the last layer of the encoder of these features", "none", hint)
    arrays, source = read_arrays(last_layer), train.encoder_of
    if "weight" not in arrays or len(arrays["weight"]) != source.outputs:
        got = f"{len(arrays['weight'])} outputs" if "weight" in arrays else "no weight"
        raise InputError(f"--last-layer {last_layer}", f"weight and bias of {source.outputs} outputs", got)
    return last_layer_encoder(arrays["weight"], arrays.get("bias"), width=source.width, source=source)


def _layer_of_arrays(console: Console, train: ArraySource) -> Encoder:
    width = train.values.shape[1]
    if train.weight is not None:
        return last_layer_encoder(train.weight, train.bias, width=width)
    if train.name != "embeddings":
        hint = "Add them, or name the array embeddings if it holds the encoder's outputs."
        raise InputError(f"{train.path}", "weight (and bias, if there is one) beside features", "none", hint)
    unit = np.allclose(np.linalg.norm(train.values, axis=1), 1, atol=_UNIT)
    hint = " All of them have norm 1, so novelty cannot see a norm, which may help or harm: if you can, try both."
    console.warn(
        f"{train.path}: the embeddings are taken as features of a last layer that is the identity, which the library's "
        f"evaluation does not cover; with features, weight and bias it does.{hint if unit else ''}"
    )
    return last_layer_encoder(np.eye(width, dtype=np.float32), None, width=width, identity=True)


def encoder_of(text: str, options: Mapping[str, Any]) -> Encoder:
    """Return the encoder that ``--encoder`` names.

    Args:
        text: ``module:function``, ``timm:NAME`` or ``sentence-transformers:NAME_OR_PATH``.
        options: Arguments by name for the function, ``timm.create_model`` or ``SentenceTransformer``.
    """
    kind, _, name = text.partition(":")
    if not kind or not name:
        wanted = "module:function, timm:NAME or sentence-transformers:NAME_OR_PATH"
        raise InputError("--encoder", wanted, f"{text!r}")
    options = dict(options)
    # An absolute path, because it may be used later from another folder.
    if kind == "sentence-transformers" and os.path.isdir(name):
        name = os.path.abspath(name)
    if kind == "timm" and isinstance(options.get("checkpoint_path"), str):
        options["checkpoint_path"] = os.path.abspath(options["checkpoint_path"])
    make = {"timm": _timm_encoder, "sentence-transformers": _sentence_encoder}.get(kind)
    encoder = _own_encoder(kind, name, options) if make is None else make(name, options)
    encoder.spec = {"encoder": f"{kind}:{name}", "options": options}
    return encoder


def use(encoder: Encoder, sources: Mapping[str, Source], device: str) -> None:
    """Move an encoder to a device, and prepare the sources for it."""
    encoder.module.to(device).eval()
    for source in sources.values():
        source.prepare(encoder)


def check_device(name: str) -> None:
    """Refuse a device that is unknown to torch, not available, or without float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=name)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        wanted = "a device of this machine with float64 (Apple's mps has none)"
        raise InputError("--device", wanted, f"{name!r} ({str(error).partition(chr(10))[0]})") from error


def _own_encoder(module_name: str, function_name: str, options: dict[str, Any]) -> Encoder:
    argument = f"--encoder {module_name}:{function_name}"
    # As with `python -m`, allow modules in the folder in which the command runs.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    hint = f"The current folder is {os.getcwd()}; PYTHONPATH names others."
    with their_code(argument, "a module that can be imported", hint):
        function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        got = "none of that name" if function is None else f"a {type(function).__name__}"
        raise InputError(argument, f"a function of {module_name}", got)
    with their_code(argument, "the function to return an encoder"):
        returned = function(**options)
    module, transform = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(module, nn.Module) or not (transform is None or callable(transform)):
        wanted = "the function to return a torch.nn.Module, or (module, transform)"
        raise InputError(argument, wanted, f"a {type(returned).__name__}")
    takes = ("images", "inputs", "features")
    if transform is not None:
        return Encoder(argument, module, (*takes, "texts"), {}, transform)
    encoder = Encoder(argument, module, takes, {})
    encoder.transform = lambda image: _to_tensor(image).to(encoder.dtype)
    return encoder


def _to_tensor(image: Any) -> Tensor:
    """Return a picture with channels first, in [0, 1], like torchvision's ``ToTensor``."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255)


class _WithLastLayer(nn.Module):
    """A frozen trunk, and the linear layer that gets a posterior; an identity if the trunk has no such layer."""

    def __init__(self, trunk: nn.Module, last: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.last = trunk, last

    def forward(self, x: Any) -> Tensor:
        return self.last(self.trunk(x))


class _Sentence(nn.Sequential):
    """Modules of a ``SentenceTransformer``, from tokens to one vector per text."""

    def forward(self, tokens: Mapping[str, Any]) -> Tensor:
        features: dict[str, Any] = dict(tokens)
        for part in self:
            features = part(features)
        return features["sentence_embedding"]


def _timm_encoder(name: str, options: dict[str, Any]) -> Encoder:
    """Return a model of timm: its pooled features, or the outputs of its last layer if ``num_classes`` is set."""
    argument = f"--encoder timm:{name}"
    timm = needed("timm", argument, "timm")
    checkpoint = options.get("checkpoint_path")
    options = {"num_classes": 0, "pretrained": checkpoint is None, **options}
    options.pop("checkpoint_path", None)
    with their_code(argument, "a model that can be loaded", _DOWNLOADED):
        module = timm.create_model(name, **options)
        if checkpoint is not None:
            _load_checkpoint(module, checkpoint)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(module), is_training=False)
    if options["num_classes"] == 0:
        module = _WithLastLayer(module, _identity(module.num_features))
    encoder = Encoder(f"timm:{name}", module, ("images", "inputs", "features"), {})
    encoder.transform = lambda image: transform(image).to(encoder.dtype)
    return encoder


def _load_checkpoint(module: Any, path: str) -> None:
    """Load weights without executing code; drop the weights of a classifier that the model does not have."""
    from timm.models import load_state_dict

    state = load_state_dict(path, weights_only=True)
    head = module.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{each}." for each in ((head,) if isinstance(head, str) else head))
    if module.num_classes == 0:
        state = {key: value for key, value in state.items() if not key.startswith(heads)}
    module.load_state_dict(state)


def _sentence_encoder(name: str, options: dict[str, Any]) -> Encoder:
    """Return a model of sentence-transformers, with the posterior on its ``Dense`` layer if that is the last one."""
    argument, package = f"--encoder sentence-transformers:{name}", "sentence-transformers"
    library = needed("sentence_transformers", argument, package)
    modules_of = needed("sentence_transformers.sentence_transformer.modules", argument, package)
    if not sys.stderr.isatty():
        needed("transformers.utils.logging", argument, package).disable_progress_bar()
    with their_code(argument, "a model that can be loaded", _DOWNLOADED):
        if not options.get("trust_remote_code"):
            _refuse_own_code(Path(name) / "modules.json")
        model = library.SentenceTransformer(name, **{"device": "cpu", **options})
    modules = list(model)
    while modules and isinstance(modules[-1], modules_of.Normalize):
        modules.pop()
    last = modules[-1] if modules else None
    if isinstance(last, modules_of.Dense) and isinstance(last.activation_function, nn.Identity):
        layer = modules.pop().linear
    else:
        with model.truncate_embeddings(None):
            layer = _identity(model.get_embedding_dimension())
    if model.truncate_dim is not None:  # the rows that encode keeps
        layer = _linear(*(p.detach()[: model.truncate_dim] for p in layer.parameters()))

    def collate(texts: list[str]) -> dict[str, Any]:
        return {key: value for key, value in model.preprocess(texts).items() if isinstance(value, Tensor)}

    encoder = _WithLastLayer(_Sentence(*modules), layer)
    return Encoder(f"sentence-transformers:{name}", encoder, ("texts", "features"), {}, collate)


def _refuse_own_code(listed: Path) -> None:
    """Refuse a local list of modules that names Python files, because sentence-transformers would run them."""
    if not listed.exists():
        return
    kinds = [str(each["type"]) for each in json.loads(listed.read_text(encoding="utf-8"))]
    own = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if own:
        hint = """To run it: --encoder-options '{"trust_remote_code": true}'."""
        raise InputError(f"{listed}", "modules of sentence-transformers", f"code of its own ({own[0]})", hint)


def _identity(width: int) -> nn.Linear:
    return _linear(torch.eye(width), torch.zeros(width))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=weight.dtype)
    layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return layer

"""The encoder of a command: a last layer, the user's own function, or a model of timm or sentence-transformers."""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature.apps.cli.console import BadInputError, needed, their_code
from contrastive_curvature.network.given_features import FeatureSource

LIBRARIES = ("timm", "sentence-transformers")
"""What ``--encoder`` may begin with besides a module of the user's own."""

_LOADING = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ImportError,
    UnpicklingError,
)
"""What the libraries raise where a model cannot be found, downloaded, read or constructed."""


@dataclass
class Encoder:
    """A module, and how inputs become its batches.

    Attributes:
        name: For messages.
        module: Maps a batch to raw outputs (B, D).
        takes: Kinds of sources that it takes.
        spec: How to make it again, for JSON.
        transform: A picture (``PIL.Image``, RGB) -> tensor, or texts -> batch.
        width: Number F of features where the module is a last layer alone, else ``None``.
        feature_source: Of the feature folder that a last layer was fitted on.
        classes: Digests of the names of the fit's classes 0, 1, ...; ``None`` where they have no names.
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
    def identity(self) -> bool:
        """Whether it is a last layer that stands for none: the features are the embeddings."""
        return self.spec.get("identity") is True

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its first weight."""
        weights = (weight.dtype for weight in self.module.parameters() if weight.is_floating_point())
        return next(weights, torch.float32)

    def has_last_layer(self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None) -> bool:
        """Return whether a last layer alone has this weight and this bias (zeros for ``None``)."""
        mine = [p.detach().cpu().numpy() for p in self.module.parameters()]
        theirs = [weight, np.zeros(len(weight), np.float32) if bias is None else bias]
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


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
        identity: Whether it stands for none: the features are the embeddings.
        source: Of the feature folder, if the features are from one.
    """
    if weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
        received = f"{weight.shape}" + ("" if bias is None else f" and {bias.shape}")
        raise BadInputError("weight, bias", f"shapes (D, {width}) and (D,)", received)
    zeros = np.zeros(len(weight), np.float32)
    layer = _linear(torch.from_numpy(weight), torch.from_numpy(zeros if bias is None else bias))
    spec = {"encoder": None, "identity": identity, "features_of": None if source is None else source.to_plain()}
    return Encoder("the posterior's last layer", layer, ("features",), spec, width=width, feature_source=source)


def encoder_of(text: str, options: Mapping[str, Any]) -> Encoder:
    """Return the encoder that ``--encoder`` names.

    Args:
        text: ``module:function``, ``timm:NAME`` or ``sentence-transformers:NAME_OR_PATH``.
        options: Arguments by name for the function, ``timm.create_model`` or ``SentenceTransformer``.
    """
    kind, _, name = text.partition(":")
    if not kind or not name:
        wanted = "module:function, timm:NAME or sentence-transformers:NAME_OR_PATH"
        raise BadInputError("--encoder", wanted, f"{text!r}")
    given = dict(options)
    # A path is used again from any folder.
    if kind == "sentence-transformers" and os.path.isdir(name):
        name = os.path.abspath(name)
    if kind == "timm" and isinstance(given.get("checkpoint_path"), str):
        given["checkpoint_path"] = os.path.abspath(given["checkpoint_path"])
    make = {"timm": _timm_encoder, "sentence-transformers": _sentence_encoder}.get(kind)
    found = _own_encoder(kind, name, given) if make is None else make(name, given)
    found.spec = {"encoder": f"{kind}:{name}", "options": given}
    return found


def check_device(name: str) -> None:
    """Refuse a device that torch does not know, that is not there, or that has no float64."""
    try:
        float(torch.zeros(1, dtype=torch.float64, device=name) + 1)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        wanted = "a device of this machine with float64 (Apple's mps has none)"
        raise BadInputError("--device", wanted, f"{name!r} ({reason})") from error


def _own_encoder(module_name: str, function_name: str, options: dict[str, Any]) -> Encoder:
    argument = f"--encoder {module_name}:{function_name}"
    # As `python -m` has it: modules of the folder that the command runs in.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    hint = f"The current folder is {os.getcwd()}; PYTHONPATH names others."
    with their_code(argument, "a module that can be imported", hint):
        function: Any = importlib.import_module(module_name)
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        received = "none of that name" if function is None else f"a {type(function).__name__}"
        raise BadInputError(argument, f"a function of {module_name}", received)
    with their_code(argument, "the function to return an encoder"):
        made = function(**options)
    module, transform = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (transform is None or callable(transform)):
        wanted = "the function to return a torch.nn.Module, or (module, transform)"
        raise BadInputError(argument, wanted, f"a {type(made).__name__}")
    if transform is not None:
        return Encoder(argument, module, ("images", "inputs", "features", "texts"), {}, transform)
    found = Encoder(argument, module, ("images", "inputs", "features"), {})
    found.transform = lambda image: _to_tensor(image).to(found.dtype)
    return found


def _to_tensor(image: Any) -> Tensor:
    """Return a picture with channels first, in [0, 1], as torchvision's ``ToTensor``."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255)


class _WithLastLayer(nn.Module):
    """A frozen trunk, and the linear layer that gets a posterior; the identity where the trunk has no layer for it."""

    def __init__(self, trunk: nn.Module, last: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.last = trunk, last

    def forward(self, x: Any) -> Tensor:
        return self.last(self.trunk(x))


class _Sentence(nn.Sequential):
    """Modules of a ``SentenceTransformer``, from tokens to one vector a text."""

    def forward(self, tokens: Mapping[str, Any]) -> Tensor:
        features: dict[str, Any] = dict(tokens)
        for part in self:
            features = part(features)
        return features["sentence_embedding"]


def _timm_encoder(name: str, options: dict[str, Any]) -> Encoder:
    """Return a model of timm: its pooled features, or the outputs of its last layer if ``num_classes`` is given."""
    argument = f"--encoder timm:{name}"
    timm = needed("timm", argument, "pip install timm")
    known = name.partition(".")[0]
    if ":" not in name and not timm.is_model(known):
        near = ", ".join(difflib.get_close_matches(known, timm.list_models(), 3)) or "timm.list_models() has all names"
        raise BadInputError(argument, "a model of timm", f"{name!r}", f"Did you mean: {near}?")
    checkpoint = options.get("checkpoint_path")
    given = {"num_classes": 0, "pretrained": checkpoint is None, **options}
    given.pop("checkpoint_path", None)
    with _loading(argument):
        module = timm.create_model(name, **given)
        if checkpoint is not None:
            _load_checkpoint(module, checkpoint)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(module), is_training=False)
    if given["num_classes"] == 0:
        module = _WithLastLayer(module, _identity(module.num_features))
    found = Encoder(f"timm:{name}", module, ("images", "inputs", "features"), {})
    found.transform = lambda image: transform(image).to(found.dtype)
    return found


def _load_checkpoint(module: Any, path: Any) -> None:
    """Load weights without executing anything; those of a classifier that the model does not have are left out."""
    from timm.models import load_state_dict

    if not isinstance(path, str) or not Path(path).is_file():
        raise BadInputError("--encoder-options: checkpoint_path", "a file", f"{path!r}, where none is")
    state = load_state_dict(path, weights_only=True)
    head = module.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{each}." for each in ((head,) if isinstance(head, str) else head))
    if module.num_classes == 0:
        state = {key: value for key, value in state.items() if not key.startswith(heads)}
    module.load_state_dict(state)


def _sentence_encoder(name: str, options: dict[str, Any]) -> Encoder:
    """Return a model of sentence-transformers, with the posterior on its ``Dense`` layer if that comes last."""
    argument, install = f"--encoder sentence-transformers:{name}", "pip install sentence-transformers"
    library = needed("sentence_transformers", argument, install)
    modules_of = needed("sentence_transformers.sentence_transformer.modules", argument, install)
    _refuse_own_code(argument, Path(name), options)
    if not sys.stderr.isatty():
        needed("transformers.utils.logging", argument, install).disable_progress_bar()
    with _loading(argument):
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


def _refuse_own_code(argument: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Refuse a local folder whose list of modules names Python files in it, which sentence-transformers would run."""
    if options.get("trust_remote_code") or not (folder / "modules.json").exists():
        return
    try:
        kinds = [str(each["type"]) for each in json.loads((folder / "modules.json").read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(argument, "a list of modules in modules.json", f"{error}") from error
    own = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if own:
        hint = """To run it: --encoder-options '{"trust_remote_code": true}'"""
        raise BadInputError(argument, "modules of sentence-transformers", f"code of its own ({own[0]})", hint)


@contextmanager
def _loading(argument: str) -> Iterator[None]:
    """Turn what a library raises for a model into an error of ``--encoder``."""
    # The libraries log what the exception says, and every retry of a download.
    logging.disable(logging.ERROR)
    try:
        yield
    except _LOADING as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:300]
        hint = "A model that is not on this machine is downloaded, which needs the network."
        raise BadInputError(argument, "a model that can be loaded", reason, hint) from error
    finally:
        logging.disable(logging.NOTSET)


def _identity(width: int) -> nn.Linear:
    return _linear(torch.eye(width), torch.zeros(width))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=weight.dtype)
    layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return layer

"""Encoders by name: models of timm and of sentence-transformers."""

from __future__ import annotations

import difflib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.apps.cli.encoders import Encoder
from contrastive_curvature.apps.cli.errors import BadInputError, missing
from contrastive_curvature.errors import expected

__all__ = ["sentence_encoder", "timm_encoder"]

_LOADING = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, ImportError, UnpicklingError)
"""What the packages raise where a model cannot be found, downloaded, read or constructed."""

_SHOWN = 300
"""Characters of such an error."""


class _WithLastLayer(nn.Module):
    """A frozen trunk, and the linear layer that gets a posterior; the identity where the trunk has no layer for it."""

    def __init__(self, trunk: nn.Module, last: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.last = trunk, last

    def forward(self, x: Any) -> Tensor:
        return self.last(self.trunk(x))


class _Sentence(nn.Module):
    """Modules of a ``SentenceTransformer``, from tokens to one vector a text."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, tokens: Mapping[str, Any]) -> Tensor:
        features: dict[str, Any] = dict(tokens)
        for part in self.parts:
            features = part(features)
        return features["sentence_embedding"]


def timm_encoder(name: str, options: dict[str, Any], spec: Mapping[str, Any]) -> Encoder:
    """A model of timm: its pooled features, or the outputs of its last layer where ``num_classes`` is given.

    Raises:
        BadInputError: timm is missing, knows no such model, or cannot load it.
    """
    try:
        import timm
    except ImportError as error:
        raise BadInputError(missing(f"--encoder timm:{name}", "timm", "pip install timm")) from error
    spec, options = dict(spec), dict(options)
    known = name.partition(".")[0]
    if ":" not in name and not timm.is_model(known):
        near = ", ".join(difflib.get_close_matches(known, timm.list_models(), 3)) or "timm.list_models() has all names"
        raise BadInputError(
            expected(f"--encoder timm:{name}", "a model of timm", f"{name!r}", f"Did you mean: {near}?")
        )
    checkpoint = options.pop("checkpoint_path", None)
    given = {"num_classes": 0, "pretrained": checkpoint is None, **options}
    module: Any = _made(f"timm:{name}", lambda: timm.create_model(name, **given))
    if checkpoint is not None:
        _load_checkpoint(f"timm:{name}", module, checkpoint)
    data: Any = timm.data
    transform = data.create_transform(**data.resolve_model_data_config(module), is_training=False)
    if given["num_classes"] == 0:
        module = _WithLastLayer(module, _identity(module.num_features))
    found = Encoder(f"timm:{name}", module, ("images", "inputs", "features"), spec)
    found.image_transform = lambda image: transform(image).to(found.dtype)
    return found


def sentence_encoder(name: str, options: dict[str, Any], spec: Mapping[str, Any]) -> Encoder:
    """A model of sentence-transformers, with the posterior on its ``Dense`` layer if that comes last.

    Raises:
        BadInputError: The package is missing, or the model cannot be loaded without running its own code.
    """
    argument = f"--encoder sentence-transformers:{name}"
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Dense, Normalize
    except ImportError as error:
        raise BadInputError(missing(argument, "sentence-transformers", "pip install sentence-transformers")) from error
    _refuse_own_code(argument, Path(name), options)
    if not sys.stderr.isatty():
        from transformers.utils import logging as their_logging

        bars: Any = their_logging
        bars.disable_progress_bar()
    options = {"device": "cpu", **options}
    model: Any = _made(f"sentence-transformers:{name}", lambda: SentenceTransformer(name, **options))
    modules = list(model)
    while modules and isinstance(modules[-1], Normalize):
        modules.pop()
    last = modules[-1] if modules else None
    if isinstance(last, Dense) and isinstance(last.activation_function, nn.Identity):
        layer = last.linear
        modules.pop()
    else:
        with model.truncate_embeddings(None):
            layer = _identity(model.get_embedding_dimension())
    if model.truncate_dim is not None:  # the rows that encode keeps
        for part, p in list(layer.named_parameters()):
            setattr(layer, part, nn.Parameter(p.detach()[: model.truncate_dim]))
        layer.out_features = len(layer.weight)
    encoder = _WithLastLayer(_Sentence(modules), layer)

    def collate(texts: list[str]) -> dict[str, Any]:
        tokens = model.preprocess(texts) if hasattr(model, "preprocess") else model.tokenize(texts)
        return {key: value for key, value in tokens.items() if isinstance(value, Tensor)}

    return Encoder(f"sentence-transformers:{name}", encoder, ("texts", "features"), spec, collate=collate)


def _load_checkpoint(name: str, module: Any, path: Any) -> None:
    """Load weights without executing anything; those of the classifier may be left over where the model has none."""
    from timm.models import load_state_dict

    if not isinstance(path, str) or not Path(path).is_file():
        raise BadInputError(expected("--encoder-options: checkpoint_path", "a file", f"{path!r}, where none is"))
    state = _made(name, lambda: load_state_dict(path, weights_only=True))
    head = module.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{each}." for each in ((head,) if isinstance(head, str) else head))
    if module.num_classes == 0:
        state = {key: value for key, value in state.items() if not key.startswith(heads)}
    _made(name, lambda: module.load_state_dict(state))


def _identity(width: int) -> nn.Linear:
    layer = nn.Linear(width, width)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width))
        layer.bias.zero_()
    return layer


def _made(name: str, make: Callable[[], Any]) -> Any:
    # The packages log what the exception says, and every retry of a download.
    logging.disable(logging.ERROR)
    try:
        return make()
    except _LOADING as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:_SHOWN]
        hint = "A model that is not on this machine is downloaded, which needs the network."
        raise BadInputError(expected(f"--encoder {name}", "a model that can be loaded", reason, hint)) from error
    finally:
        logging.disable(logging.NOTSET)


def _refuse_own_code(argument: str, folder: Path, options: Mapping[str, Any]) -> None:
    """sentence-transformers runs the Python files of a local folder where its list of modules names them."""
    if options.get("trust_remote_code"):
        return
    try:
        listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = [str(each["type"]) for each in listed]
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadInputError(expected(argument, "a list of modules in modules.json", f"{error}")) from error
    own = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if own:
        hint = """To run it: --encoder-options '{"trust_remote_code": true}'"""
        raise BadInputError(expected(argument, "modules of sentence-transformers", f"code of its own ({own[0]})", hint))

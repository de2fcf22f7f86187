"""The call of an encoder, and the place of the embeddings in its result.

Every call of a user's model goes through :class:`ModelCall`. A mapping is passed whole to a ``forward`` with one
argument for the batch, and by keywords to a ``forward`` that names its entries, such as
``forward(input_ids, attention_mask)``. If the model returns a mapping or an object, one of its entries is the
embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import (
    ContrastiveCurvatureError,
    InputError,
    InputTypeError,
    UnsupportedError,
)
from contrastive_curvature.network.inputs import Inputs

EMBEDDING_NAMES = ("sentence_embedding", "text_embeds", "image_embeds")
"""Names that sentence-transformers and transformers give to finished embeddings."""

_UNDECIDED_NAMES = ("pooler_output", "last_hidden_state")
"""Names of tensors that may or may not be the embedding: whoever trained the model knows."""

_LABELS = "labels"
"""The entry of a batch that the training of a model takes, and its embeddings do not, whatever other name it has."""

_WRAPPED = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Where torch's wrappers keep the user's module, whose arguments count."""

_RAISED = (RuntimeError, TypeError, LookupError, ValueError, AssertionError)
"""The errors that torch's modules raise for inputs of a wrong shape or dtype."""


class ModelCall:
    """Calls a model with a batch, and selects the embeddings (N, D) from the result.

    Args:
        label_key: Key of the labels in batches that are mappings; ``forward`` never receives labels by keyword. An
            entry ``"labels"`` is always left out.

    Attributes:
        output: Name of the embeddings among the outputs, set by the first call; ``None`` if the model returns a tensor.
    """

    def __init__(self, label_key: str = _LABELS) -> None:
        self.output: str | None = None
        self._whole: bool | None = None
        self._labels = frozenset((_LABELS, label_key))

    def __call__(self, model: nn.Module, x: Inputs) -> Tensor:
        """Return the embeddings of a batch, in any shape if the model returns one tensor."""
        out = self.raw(model, x)
        if isinstance(out, Tensor):
            return out
        if self.output is None:
            self.output = embedding_name(out)
        embeddings = entry_of(out, self.output)
        if not isinstance(embeddings, Tensor):
            wanted = f"a tensor {self.output!r} among its outputs, as before"
            raise InputTypeError("model", wanted, type(embeddings).__name__)
        return embeddings

    def raw(self, model: nn.Module, x: Inputs) -> Any:
        """Call the model, and return its whole result."""
        if not isinstance(x, Mapping):
            return model(x)
        whole, keywords = _arguments(model, {name: value for name, value in x.items() if name not in self._labels})
        if self._whole is not None:
            whole = self._whole
        if whole is not False:
            try:
                # A copy, because some modules write their results into their argument.
                out = model(dict(x))
            except (AttributeError, *_RAISED):  # the model expects a tensor
                if whole:
                    raise
            else:
                self._whole = True
                return out
        out = model(**keywords)
        self._whole = False
        return out


def named_entries(out: Any) -> Iterator[tuple[str | int, Any]]:
    """Yield names and values from a model's result: a mapping, a tuple or an object with attributes."""
    if isinstance(out, Mapping):
        yield from out.items()
    elif isinstance(out, (tuple, list)):
        yield from enumerate(out)
    elif is_dataclass(out):
        yield from ((field.name, getattr(out, field.name)) for field in fields(out))
    else:
        yield from getattr(out, "__dict__", {}).items()


def entry_of(out: Any, name: str | int | None) -> Any:
    """Return the entry of a model's result with this name; ``None`` if it does not exist."""
    return next((value for key, value in named_entries(out) if key == name), None)


def embedding_name(out: Any) -> str:
    """Return the name of the embeddings among a model's outputs, or refuse an ambiguous result."""
    entries = {name: value for name, value in named_entries(out) if isinstance(value, Tensor)}
    known = [name for name in EMBEDDING_NAMES if name in entries]
    flat = [name for name, value in entries.items() if value.ndim == 2 and value.is_floating_point()]
    if len(known) == 1:
        return known[0]
    alone = len(flat) == 1 and not any(name in entries for name in _UNDECIDED_NAMES)
    if alone and not known and isinstance(flat[0], str):
        return flat[0]
    got = f"a {type(out).__name__}"
    if entries:
        got += " with " + ", ".join(f"{name!r} {tuple(value.shape)}" for name, value in entries.items())
    ways = [f"contrastive_curvature.EncoderOutput(model, {name!r})" for name in flat]
    tokens = [name for name, value in entries.items() if value.ndim == 3 and value.is_floating_point()]
    ways += [f"contrastive_curvature.EncoderOutput(model, {name!r}, pooling='mean')" for name in tokens[:1]]
    hint = "Wrap it in a module whose forward returns the embeddings."
    if ways:
        hint = f"Say which of them is the embedding that you compare: pass {' or '.join(ways)}."
    raise InputTypeError("model", "a module that returns a tensor (N, D)", got, hint)


def _arguments(model: nn.Module, x: dict[str, Any]) -> tuple[bool | None, dict[str, Any]]:
    """Return whether ``forward`` accepts a whole batch, ``None`` if only a run can show it; and its keywords."""
    while (name := type(model).__name__) in _WRAPPED:
        model = getattr(model, _WRAPPED[name])
    parameters = inspect.signature(model.forward).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keywords = {name: value for name, value in x.items() if takes_any or name in named}
    required = [name for name, p in named.items() if p.default is p.empty]
    entries = [name for name in named if name in x]
    if not named and takes_any:
        return None, keywords
    if not entries or any(name not in entries for name in required):
        return True, {}
    # With forward(self, x) and a batch with an entry "x", the model may expect the entry or the batch.
    return (None if required == entries else False), keywords


def check_output(out: Tensor) -> None:
    """Refuse outputs without the shape (N, D)."""
    if out.ndim != 2 or out.shape[1] == 0:
        hint = "One row is one embedding: pool or flatten inside the encoder."
        if out.ndim == 3:
            hint = "One row is one embedding: contrastive_curvature.EncoderOutput(model, pooling='mean') pools tokens."
        raise InputError("model", "outputs of shape (N, D)", f"shape {tuple(out.shape)}", hint)


_HARDWARE_WORDS = ("out of memory", "allocat", "same device", "cuda error", "hip error", "cudnn", "cublas", "nccl")


def describe_points(x: Any) -> str:
    """Describe one point of a batch by shape and dtype."""
    if isinstance(x, Tensor):
        return f"shape {tuple(x.shape[1:])} and dtype {x.dtype}"
    if isinstance(x, Mapping):
        parts = (f"{key!r} of {describe_points(value)}" for key, value in x.items() if isinstance(value, Tensor))
        return "entries " + ", ".join(parts)
    return f"type {type(x).__name__}"


@contextmanager
def naming_the_input(x: Any, known: str | None = None) -> Iterator[None]:
    """Convert errors of the user's model on ``x`` to errors that name ``x``.

    Args:
        x: The batch.
        known: Description, by :func:`describe_points`, of points that the model has processed before. An error on
            points with this description is not caused by their shape, and is raised unchanged.
    """
    try:
        yield
    except (ContrastiveCurvatureError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except _RAISED as error:
        accelerator = getattr(torch, "AcceleratorError", ())  # torch before 2.8 names it only in the message
        hardware = isinstance(error, accelerator) or any(word in str(error).lower() for word in _HARDWARE_WORDS)
        if hardware or type(error).__module__.startswith("torch._dynamo") or known == describe_points(x):
            raise
        lines = str(error).strip().splitlines()
        wanted = "inputs that the model can process"
        if known is not None:
            wanted = f"points of {known}, as when the model was analysed"
        raised = f"The model raised {type(error).__name__}" + (f": {lines[0].rstrip('.')}." if lines else ".")
        raise InputError("x", wanted, f"points of {describe_points(x)}", raised) from error


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the original of a module compiled by ``torch.compile(module)``; any other module unchanged."""
    inside = model._modules.get("_orig_mod")
    return model if inside is None else inside


def _compiled(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield each compiled part of a model: its name, its name in messages, and the call that compiled it."""
    for name, module in model.named_modules():
        wrapper = "_orig_mod" in module._modules
        if wrapper or getattr(module, "_compiled_call_impl", None) is not None:
            which = f"layer {name!r}" if name else "the encoder"
            yield name, which, "torch.compile(module)" if wrapper else "module.compile()"


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run compiled parts of a model without their compiled code, so that hooks on their layers work."""
    if next(_compiled(model), None) is None:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_compiled(model: nn.Module) -> None:
    """Refuse an encoder with compiled parts where weights need Jacobians; compiling the whole encoder is allowed.

    ``torch.func`` would trace compiled parts again for every batch and direction until torch gives up, and fails on
    some.
    """
    for _, which, how in _compiled(uncompiled(model)):
        raise UnsupportedError(
            f"model: {which} is compiled by {how}, and these weights need Jacobians by torch.func, which a compiled "
            "module does not give. Compile the whole encoder with torch.compile(encoder), or nothing; or use "
            "subset_of_weights='last_layer'."
        )


def refuse_compiled_layer(model: nn.Module, layer: str) -> None:
    """Refuse a last layer inside a compiled part of an encoder, where hooks cannot observe it."""
    for name, which, how in _compiled(model):
        if not name or f"{layer}.".startswith(f"{name}."):
            raise UnsupportedError(
                f"model: {which}, which has or is the last linear layer, is compiled by {how}, and compiled code hides "
                "what goes into that layer. Compile the layers before it alone, as in "
                "nn.Sequential(torch.compile(body), head); or the whole encoder, torch.compile(encoder), which is then "
                "run as it was before."
            )

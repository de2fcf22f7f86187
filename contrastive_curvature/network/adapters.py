"""Adapters for other libraries' encoders: choose the output that is the embedding, or add a last linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.network.call import ModelCall, entry_of, named_entries
from contrastive_curvature.network.encoder import Encoder, Place, evaluation_mode, other_values
from contrastive_curvature.network.inputs import Inputs, check_inputs, move_inputs, slice_inputs, tokenized
from contrastive_curvature.network.loader import check_model
from contrastive_curvature.network.threads import watched

POOLINGS = ("mean", "first", "last")
"""How the vectors of tokens or places become one embedding."""


class EncoderOutput(nn.Module):
    """An encoder that returns one output of a model, optionally pooled over tokens.

    For models with several possible embeddings among their outputs, such as ``last_hidden_state`` and ``pooler_output``
    in transformers::

        encoder = EncoderOutput(model, "last_hidden_state", pooling="mean")

    Args:
        model: A module that returns a mapping, an object with attributes, a tuple or a tensor.
        output: Name of the output, its number in a tuple, or ``None`` if the model returns one tensor.
        pooling: ``"mean"``, ``"first"`` (the token ``[CLS]``) or ``"last"`` over the tokens of an output (N, T, D);
            ``"mean"`` also over the places of an output (N, D, H, W). ``None`` keeps an output (N, D) unchanged. If the
            batch is a mapping with an ``attention_mask`` (N, T), tokens with a zero in the mask do not count. The
            tokens that PEFT's prompt tuning puts before a text do.

    Raises:
        InputTypeError: An argument has the wrong type.
        InputError: The pooling is unknown; in ``forward``: the output does not exist or has the wrong shape, or the
            attention mask is of other tokens.
    """

    def __init__(self, model: nn.Module, output: str | int | None = None, pooling: str | None = None) -> None:
        super().__init__()
        check_model(model, half=True)
        if isinstance(output, bool) or not isinstance(output, (str, int, type(None))):
            wanted = "the name of an output, its number in a tuple, or None"
            raise InputTypeError("output", wanted, f"a {type(output).__name__}")
        if pooling is not None and pooling not in POOLINGS:
            raise InputError("pooling", f"None or one of {list(POOLINGS)}", repr(pooling))
        self.model, self.output, self.pooling = model, output, pooling
        self._call = ModelCall()

    def forward(self, x: Inputs) -> Tensor:
        """Return embeddings, shape (N, D)."""
        out = self._call.raw(self.model, x)
        tokens = out if self.output is None else entry_of(out, self.output)
        if not isinstance(tokens, Tensor):
            names = [name for name, value in named_entries(out) if isinstance(value, Tensor)]
            wanted = f"one of the outputs of {type(self.model).__name__}, {names}"
            raise InputError("output", wanted, repr(self.output))
        return tokens if self.pooling is None else self._pooled(tokens, x)

    def _pooled(self, tokens: Tensor, x: Inputs) -> Tensor:
        if tokens.ndim == 4 and self.pooling == "mean":
            return tokens.mean((2, 3))
        if tokens.ndim != 3:
            wanted = f"an output (N, T, D) for pooling={self.pooling!r}"
            hint = "Leave pooling out for an output (N, D)."
            raise InputError("pooling", wanted, f"shape {tuple(tokens.shape)}", hint)
        mask = x.get("attention_mask") if isinstance(x, Mapping) else None
        if mask is None:
            return tokens.mean(1) if self.pooling == "mean" else tokens[:, 0 if self.pooling == "first" else -1]
        added = getattr(getattr(self.model, "active_peft_config", None), "num_virtual_tokens", 0)
        if tuple(mask.shape) == (len(tokens), tokens.shape[1] - added):
            mask = nn.functional.pad(mask, (added, 0), value=1)
        if mask.shape != tokens.shape[:2]:
            hint = (
                "The model adds, drops or joins tokens, or the mask belongs to another input. Pool in a module of your "
                "own, whose forward knows which tokens of the output count."
            )
            wanted = f"a mask of the output's tokens, of shape {tuple(tokens.shape[:2])}"
            raise InputError("attention_mask", wanted, f"shape {tuple(mask.shape)}", hint)
        weights = mask.to(tokens)
        if self.pooling != "mean":
            place = (mask != 0).int()
            if self.pooling == "last":
                # Padding may be on either side: the last token has the largest place with a one.
                place = place * torch.arange(mask.shape[1], device=mask.device)
            weights = nn.functional.one_hot(place.argmax(1), mask.shape[1]).to(tokens)
        total = (weights.unsqueeze(2) * tokens).sum(1)
        return total / weights.sum(1, keepdim=True).clamp(min=1e-9)


class WithLastLayer(nn.Module):
    """An encoder that ends in one linear layer; made by :func:`with_last_layer`.

    Attributes:
        encoder: The analysed encoder.
        last_layer: The linear layer.
        replaced: Name of the first module in ``encoder.model`` that the layer replaces, together with all later
            modules; with ``None`` the layer follows the raw outputs.
    """

    def __init__(self, encoder: Encoder, last_layer: nn.Linear, replaced: str | None = None) -> None:
        super().__init__()
        self.encoder, self.last_layer, self.replaced = encoder, last_layer, replaced

    def forward(self, x: Inputs) -> Tensor:
        """Return raw outputs, shape (N, D)."""
        encoder, name = self.encoder, self.replaced
        phi = encoder(x) if name is None else encoder.passed(Place(encoder.model.get_submodule(name)), x)[0]
        out: Tensor = self.last_layer(phi)
        return out


def with_last_layer(encoder: nn.Module, x: Any) -> WithLastLayer:
    """Make an encoder with the same embeddings that ends in a linear layer.

    If the end of the encoder is linear in evaluation mode, the new layer computes the same with the present weights.
    Examples are a linear layer with a batch norm after it, and a layer with weight norm, spectral norm or a LoRA
    adapter.

    Otherwise the new layer is an identity after the raw outputs, before any l2-normalisation. The posterior of an
    identity layer describes small linear changes of the embedding space, with the closed forms and the cost of a last
    layer. It says less than the posterior of a trained layer (``docs/recipes/encoders.md``).

    Args:
        encoder: An encoder that ends in a batch norm, pooling, a norm layer or an activation function, such as timm's
            models with ``num_classes=0`` and most models of sentence-transformers. The encoder is not copied. Train it
            first: the layer does not follow later changes of the encoder's weights.
        x: A batch of two or more inputs for the encoder, to examine its outputs; texts if it has a tokenizer.

    Returns:
        The encoder with the layer, for ``Laplace(model, likelihood="contrastive")`` and every other function for
        encoders. It returns raw outputs, without normalisation.

    Raises:
        InputError: The encoder ends in a linear layer already, or cannot process ``x``.
        InputTypeError: An argument has the wrong type.
        UnsupportedError: The raw outputs of the encoder cannot be reached.
    """
    check_model(encoder, half=True)
    like = next(encoder.parameters())
    batch = move_inputs(check_inputs(tokenized(encoder, x)), like.device)
    with evaluation_mode(encoder), torch.no_grad():
        few = slice_inputs(batch, slice(0, 8))
        analysed = Encoder(encoder, few)
        with suppress(UnsupportedError):
            analysed.require_last_layer()
            wanted = "one that does not end in a linear layer"
            hint = "Pass it to laplace.Laplace as it is."
            raise InputError("encoder", wanted, f"layer {analysed.last_layer_name!r} at its end", hint)
        end = _linear_end(analysed, few)
        raw = analysed(few)  # run after the gradients: a graph that modules keep could not be copied
        eye = torch.eye(analysed.dim, device="cpu")
        name, weight, bias = end or (None, eye, eye.new_zeros(analysed.dim))
        layer = nn.Linear(weight.shape[1], analysed.dim, bias=bool(bias.any()), device="cpu").to(raw)
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)
    out = WithLastLayer(analysed, layer, name)
    # Not train(), which would also switch modules that the user froze in evaluation mode.
    for module in (out, layer, analysed):
        module.training = encoder.training
    return out


def _linear_end(encoder: Encoder, x: Inputs) -> tuple[str, Tensor, Tensor] | None:
    """Find the last module with raw outputs (N, D) that are linear in its input (N, F) and mix its entries.

    Returns:
        The name of the module, the matrix (D, F) and the bias (D,); ``None`` without such a module.
    """
    runs: list[tuple[nn.Module, Any]] = []
    with watched(encoder.model.modules(), before=lambda m, args, _: runs.append((m, args[0] if args else None))):
        raw = encoder(x)
    if bool((raw == raw[:1]).all()):  # equal points would hide other dependences
        return None
    names = {module: name for name, module in encoder.model.named_modules()}
    ran = [module for module, _ in runs]
    for module, phi in reversed(runs):
        batch = isinstance(phi, Tensor) and phi.is_floating_point() and phi.ndim == 2 and len(phi) == len(raw)
        if batch and ran.count(module) == 1:
            with suppress(UnsupportedError):  # raised if ``forward`` normalises another tensor
                end = _linear_from(encoder, x, module, phi)
                # A diagonal matrix mixes no entries.
                if end is not None and bool(end[0].clone().fill_diagonal_(0).any()):
                    return names[module], *end
    return None


def _linear_from(encoder: Encoder, x: Inputs, module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return matrix and bias from a module's input to the raw outputs; ``None`` if these are not linear in it."""

    def outputs(phi: Tensor) -> Tensor:
        with watched([module], before=lambda _, args, kwargs: ((phi.clone(), *args[1:]), kwargs)):
            return encoder(x)

    zeros = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        at_zero = outputs(zeros)
        if not at_zero.requires_grad or bool((at_zero != at_zero[:1]).any()):
            return None
        rows: list[Tensor] = []
        eye = torch.eye(encoder.dim, dtype=at_zero.dtype, device=at_zero.device)
        for some in eye.split(len(like)):  # each point yields one row of the matrix
            z = at_zero[: len(some)]
            rows += torch.autograd.grad(z, zeros, some, retain_graph=True, materialize_grads=True)[0][: len(some)]
    weight, bias = torch.stack(rows).to(at_zero), at_zero[0].detach()
    phi = other_values(like, torch.Generator().manual_seed(0))
    linear = phi.to(weight) @ weight.T
    size = linear.norm() + bias.expand_as(linear).norm()
    rounding = min(64 * torch.finfo(like.dtype).eps, 0.01)
    return (weight, bias) if bool((outputs(phi) - linear - bias).norm() <= rounding * size) else None

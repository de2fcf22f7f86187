"""Encoders from elsewhere as this library needs them: which output is the embedding, and a last linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.network.call import ModelCall, entry_of, named_entries
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, check_inputs, move_inputs, slice_inputs
from contrastive_curvature.network.loader import check_model
from contrastive_curvature.network.texts import tokenized

__all__ = ["POOLINGS", "EncoderOutput", "WithLastLayer", "with_last_layer"]

POOLINGS = ("mean", "first", "last")
"""How the vectors of tokens or places become one embedding."""


class EncoderOutput(nn.Module):
    """An encoder that returns one of the outputs of a model, pooled over tokens if asked.

    For models whose outputs leave open which of them is the embedding, such as those of transformers with
    ``last_hidden_state`` and ``pooler_output``::

        encoder = EncoderOutput(model, "last_hidden_state", pooling="mean")

    Args:
        model: A module that returns a mapping, an object with attributes, a tuple or a tensor.
        output: Name of the output, its number in a tuple, or ``None`` where the model returns one tensor.
        pooling: ``"mean"``, ``"first"`` (the token ``[CLS]``) or ``"last"`` of the tokens of an output (N, T, D);
            ``"mean"`` also of the places of an output (N, D, H, W). ``None`` takes an output (N, D) as it is. Where the
            batch is a mapping with an ``attention_mask`` (N, T), tokens with zeros in it do not count.

    Raises:
        InputTypeError: An argument has another type.
        InputError: The pooling is unknown; in ``forward``: there is no such output, or it has another shape.
    """

    def __init__(self, model: nn.Module, output: str | int | None = None, pooling: str | None = None) -> None:
        super().__init__()
        check_model(model, half=True)
        if isinstance(output, bool) or not isinstance(output, (str, int, type(None))):
            wanted = "the name of an output, its number in a tuple, or None"
            raise InputTypeError(expected("output", wanted, f"a {type(output).__name__}"))
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(expected("pooling", f"None or one of {list(POOLINGS)}", repr(pooling)))
        self.model, self.output, self.pooling = model, output, pooling
        self._call = ModelCall()

    def forward(self, x: Inputs) -> Tensor:
        """Embeddings, shape (N, D)."""
        out = self._call.raw(self.model, x)
        found = out if self.output is None else entry_of(out, self.output)
        if not isinstance(found, Tensor):
            names = [name for name, value in named_entries(out) if isinstance(value, Tensor)]
            wanted = f"one of the outputs of {type(self.model).__name__}, {names}"
            raise InputError(expected("output", wanted, repr(self.output)))
        return found if self.pooling is None else self._pooled(found, x)

    def _pooled(self, tokens: Tensor, x: Inputs) -> Tensor:
        if tokens.ndim == 4 and self.pooling == "mean":
            return tokens.mean((2, 3))
        if tokens.ndim != 3:
            wanted = f"an output (N, T, D) for pooling={self.pooling!r}"
            hint = "Leave pooling out for an output (N, D)."
            raise InputError(expected("pooling", wanted, f"shape {tuple(tokens.shape)}", hint))
        mask = x.get("attention_mask") if isinstance(x, Mapping) else None
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
            return tokens.mean(1) if self.pooling == "mean" else tokens[:, 0 if self.pooling == "first" else -1]
        weights = mask.to(tokens)
        if self.pooling == "last":
            # The largest place with a one: padding may be on either side.
            places = torch.arange(1, mask.shape[1] + 1, device=mask.device) * (mask != 0)
            weights = nn.functional.one_hot(places.argmax(1), mask.shape[1]).to(tokens)
        elif self.pooling == "first":
            weights = nn.functional.one_hot((mask != 0).int().argmax(1), mask.shape[1]).to(tokens)
        total = (weights.unsqueeze(2) * tokens).sum(1)
        return total / weights.sum(1, keepdim=True).clamp(min=1e-9)


class WithLastLayer(nn.Module):
    """An encoder with a linear layer behind its raw outputs; made by :func:`with_last_layer`.

    Args:
        encoder: The analysed encoder.
        last_layer: The layer.

    Attributes:
        last_layer: The linear layer, (D, D) without a bias.
    """

    def __init__(self, encoder: Encoder, last_layer: nn.Linear) -> None:
        super().__init__()
        self.encoder, self.last_layer = encoder, last_layer

    def forward(self, x: Inputs) -> Tensor:
        """Raw outputs, shape (N, D)."""
        out: Tensor = self.last_layer(self.encoder(x))
        return out


def with_last_layer(encoder: nn.Module, x: Any) -> WithLastLayer:
    """An encoder that ends in a linear layer, for one that does not: its embeddings are the same.

    The layer is the identity behind the raw outputs of the encoder, before any l2-normalisation at its end. The
    posterior of the last layer is then one over small linear changes of the embedding space, with all closed forms and
    the price of a last layer. It says less than that of a layer that was trained: ``docs/encoders.md`` measures how
    much.

    Args:
        encoder: An encoder that ends in pooling, a norm layer or an activation function, such as timm's models with
            ``num_classes=0`` and most models of sentence-transformers. It is not copied.
        x: A batch of inputs as the encoder takes them, two or more, to see what it returns; texts where it has a
            tokenizer.

    Returns:
        The encoder with the layer, for ``Laplace(model, likelihood="contrastive")`` and everything else that takes an
        encoder. It returns raw outputs, without normalisation.

    Raises:
        InputError: The encoder ends in a linear layer already, or cannot process ``x``.
        InputTypeError: The arguments have other types.
        UnsupportedError: The raw outputs of the encoder cannot be reached.
    """
    check_model(encoder, half=True)
    like = next(encoder.parameters())
    batch = move_inputs(check_inputs(tokenized(encoder, x)), like.device)
    with evaluation_mode(encoder), torch.no_grad():
        few = slice_inputs(batch, slice(0, 8))
        analysed = Encoder(encoder, few)
        raw = analysed(few)
    try:
        analysed.require_last_layer()
    except UnsupportedError:
        pass
    else:
        wanted = "one that does not end in a linear layer"
        hint = "Pass it to laplace.Laplace as it is."
        raise InputError(expected("encoder", wanted, f"layer {analysed.last_layer_name!r} at its end", hint))
    layer = nn.Linear(analysed.dim, analysed.dim, bias=False).to(raw)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(analysed.dim))
    out = WithLastLayer(analysed, layer)
    # Not train(), which would switch the modules that the user froze in evaluation mode.
    for module in (out, layer, analysed):
        module.training = encoder.training
    return out

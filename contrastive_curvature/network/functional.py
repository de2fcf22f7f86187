"""An encoder as a function of its parameters, without side effects on the user's modules or on torch's settings.

While ``torch.func.functional_call`` runs, it replaces the parameters of the module for every thread: another thread
that runs the model at that time would get outputs of other weights. So it is called on a copy of the modules.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.threads import private_copy

__all__ = ["FunctionalEncoder", "MathAttention", "math_attention"]


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` in plain operations, which support vmap and second derivatives."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The plain operations add the mask to the scores, so a boolean mask would add ones and zeros.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _with_math_attention(function: Any) -> Any:
    """A copy of a function of ``torch.nn.functional`` that calls :func:`math_attention` for attention."""
    names = {**function.__globals__, F.scaled_dot_product_attention.__name__: math_attention}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_REPLACEMENTS: dict[Any, Any] = {
    F.scaled_dot_product_attention: math_attention,
    F.multi_head_attention_forward: _with_math_attention(F.multi_head_attention_forward),
}


class MathAttention(TorchFunctionMode):
    """Computes attention in plain operations, in this thread only; torch's own settings hold for the whole process.

    Args:
        originals: Tensors to watch for, by their ``id``.

    Attributes:
        original_used: Whether an operation has used one of these tensors.
    """

    def __init__(self, originals: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self._originals = originals or {}
        self.original_used = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or its replacement."""
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            if id(argument) in self._originals or isinstance(argument, (list, tuple)):
                # Reading an attribute such as the shape does not count.
                self.original_used |= self._uses_original(argument) and getattr(func, "__name__", "") != "__get__"
        return _REPLACEMENTS.get(func, func)(*args, **kwargs)

    def _uses_original(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(self._uses_original(a) for a in argument)
        return id(argument) in self._originals


class FunctionalEncoder:
    """Raw outputs of an encoder at given values of its parameters.

    Args:
        encoder: The analysed encoder. If its modules cannot be copied, or a copy still uses an original parameter, the
            modules themselves are used, and no other thread may run the modules at the same time.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._originals: dict[int, Tensor] = {id(p): p for p in encoder.parameters()}
        self._free_copies: list[Encoder] = []
        self._can_be_copied = True

    def __call__(self, values: dict[str, Tensor], x: Inputs) -> Tensor:
        """Run the encoder.

        Args:
            values: Values of all parameters and buffers, under every name that each of them has.
            x: A batch of N points.

        Returns:
            Raw outputs, shape (N, D).
        """
        own = self._free_copy()
        if own is not None:
            watching = MathAttention(self._originals)
            try:
                out = _call(watching, own, values, x)
            finally:
                self._free_copies.append(own)
            if not watching.original_used:
                return out
            self._can_be_copied = False
        return _call(MathAttention(), self._encoder, values, x)

    def _free_copy(self) -> Encoder | None:
        """A copy that no thread runs at the moment; ``None`` if the encoder cannot be copied."""
        if not self._can_be_copied:
            return None
        try:
            return self._free_copies.pop()
        except IndexError:
            pass
        try:
            return private_copy(self._encoder)
        except Exception:
            self._can_be_copied = False
            return None


def _call(mode: MathAttention, encoder: Encoder, values: dict[str, Tensor], x: Inputs) -> Tensor:
    with mode:
        # Tied by torch, a module with two names would keep the replaced tensors afterwards.
        return torch.func.functional_call(encoder, values, (x,), tie_weights=False)

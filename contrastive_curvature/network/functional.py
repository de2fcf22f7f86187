"""An encoder as a function of its parameters, without a trace in the user's modules or in torch's settings.

``torch.func.functional_call`` puts tensors in place of a module's parameters while it runs, for every thread: one that
runs the model at that time gets outputs of other weights. So it is called on a copy of the modules.
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
    """``F.scaled_dot_product_attention`` in plain operations, which have a batching rule and second derivatives."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The plain operations would add ones and zeros.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _with_math_attention(function: Any) -> Any:
    """A copy of a function of ``torch.nn.functional`` for which attention is :func:`math_attention`."""
    names = {**function.__globals__, F.scaled_dot_product_attention.__name__: math_attention}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_INSTEAD: dict[Any, Any] = {
    F.scaled_dot_product_attention: math_attention,
    F.multi_head_attention_forward: _with_math_attention(F.multi_head_attention_forward),
}


class MathAttention(TorchFunctionMode):
    """Attention in plain operations, in this thread; torch's own switches between kernels are those of the process.

    Args:
        originals: Tensors of which it notes whether something uses them.

    Attributes:
        met: Whether something did.
    """

    def __init__(self, originals: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self._originals = originals or {}
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or what stands for it."""
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            if id(argument) in self._originals or isinstance(argument, (list, tuple)):
                # Asking for a shape or a dtype is no use.
                self.met |= self._meets(argument) and getattr(func, "__name__", "") != "__get__"
        return _INSTEAD.get(func, func)(*args, **kwargs)

    def _meets(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(self._meets(a) for a in argument)
        return id(argument) in self._originals


class FunctionalEncoder:
    """Raw outputs of an encoder at given values of its parameters.

    Args:
        encoder: The analysed encoder. Where its modules cannot be copied, or a closure holds one of them, they are used
            themselves, and no other thread may run them meanwhile.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._originals: dict[int, Tensor] = {id(p): p for p in encoder.parameters()}
        self._idle: list[Encoder] = []
        self._copies = True

    def __call__(self, values: dict[str, Tensor], x: Inputs) -> Tensor:
        """Run the encoder.

        Args:
            values: Of all parameters and buffers, in every place that they have.
            x: A batch.

        Returns:
            Raw outputs, shape (N, D).
        """
        own = self._take()
        if own is not None:
            noting = MathAttention(self._originals)
            try:
                out = _call(noting, own, values, x)
            finally:
                self._idle.append(own)
            if not noting.met:
                return out
            self._copies = False
        return _call(MathAttention(), self._encoder, values, x)

    def _take(self) -> Encoder | None:
        """A copy that nobody runs at the moment; ``None`` where there can be none."""
        if not self._copies:
            return None
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return private_copy(self._encoder)
        except Exception:
            self._copies = False
            return None


def _call(mode: MathAttention, encoder: Encoder, values: dict[str, Tensor], x: Inputs) -> Tensor:
    with mode:
        # Left to torch, ties of a module that has two names would leave its tensors in the modules.
        return torch.func.functional_call(encoder, values, (x,), tie_weights=False)

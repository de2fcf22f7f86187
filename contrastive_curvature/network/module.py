"""The pullback to all trainable parameters of any module, by ``torch.func``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.pullback import Pullback, own_name
from contrastive_curvature.network.threads import private_copy
from contrastive_curvature.options import Structure

__all__ = [
    "FunctionalEncoder",
    "MathAttention",
    "ModulePullback",
    "SubnetworkPullback",
    "math_attention",
    "parameter_places",
]


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


class ModulePullback(Pullback):
    """All trainable parameters of any module, or some of their entries, by ``torch.func``.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        indices: Entries of the flattened trainable parameters, for a subnetwork; ``None`` takes all.
        only: Names of the parameters to take; ``None`` takes all trainable ones. Not together with ``indices``.
    """

    def __init__(self, encoder: Encoder, indices: Tensor | None = None, only: set[str] | None = None) -> None:
        self.encoder: Encoder = encoder
        trainable = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        if indices is not None:
            only, indices = _touched(trainable, indices)
        self.params = {name: p.detach() for name, p in trainable.items() if only is None or name in only}
        rest = {name: p.detach() for name, p in encoder.named_parameters() if name not in self.params}
        self.constants = rest
        self._buffers = dict(encoder.named_buffers())
        self._places = parameter_places(encoder)
        self._outputs = FunctionalEncoder(encoder)
        self.indices = indices
        self._vectorizes = True
        self._width = sum(p.numel() for p in self.params.values())
        self.n_params = self._width if indices is None else indices.numel()

    def keep_values(self) -> None:
        """Hold on to the present values of parameters and buffers, whatever becomes of the encoder's."""
        self.params = {k: p.clone() for k, p in self.params.items()}
        self.constants = {k: p.clone() for k, p in self.constants.items()}
        self._buffers = {k: b.clone() for k, b in self._buffers.items()}

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self._width

    def named_sizes(self) -> list[tuple[str, int]]:
        """See :meth:`Pullback.named_sizes`; of all parameters that the entries lie in."""
        return [(own_name(name), p.numel()) for name, p in self.params.items()]

    def parameter_at(self, position: int) -> str:
        """See :meth:`Pullback.parameter_at`."""
        return super().parameter_at(position if self.indices is None else int(self.indices[position]))

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself."""
        with torch.no_grad():
            return self.encoder(x), x

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return slice_inputs(context, rows)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        if not cotangents.shape[0]:
            return cotangents.new_zeros(0, cotangents.shape[1], self.n_params)
        if self._vectorizes:
            try:
                flat = self._vjp_vectorized(context, cotangents)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, InputError) as error:
                # torch.func.vmap fails in many words; the loop below either works or raises the encoder's own error.
                flat = self._vjp_one_by_one(context, cotangents)
                self._vectorizes = False
                reason = str(error).splitlines()[0]
                warnings.warn(f"Jacobians are taken point by point, which is slow: {reason}", stacklevel=2)
        else:
            flat = self._vjp_one_by_one(context, cotangents)
        return flat if self.indices is None else flat[..., self.indices]

    def outputs_at(self, x: Inputs, theta: Tensor) -> Tensor:
        """Raw outputs (N, D) at other values (P,) of all trainable parameters."""
        return self._function(x)(self._split(theta))

    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Pullback.jvp`: the derivative of a reverse pass with respect to its cotangent.

        Not forward mode: that ignores ``torch.no_grad()`` and the padding index of an embedding, which reverse mode
        respects, so that a product with the curvature would not be symmetric; and some modules do not have it.
        """
        if self.indices is not None:
            v = v.new_zeros(self._width).index_copy(0, self.indices, v)
        keep_graph = torch.is_grad_enabled()
        z, params = self._graph(x)
        with torch.enable_grad():
            cotangents = torch.zeros_like(z, requires_grad=True)
            pulled = self._pull(z, params, cotangents, create_graph=True)
            inner = sum((g * d).sum() for g, d in zip(pulled, self._split(v).values(), strict=True))
        moved = torch.zeros_like(z)
        if isinstance(inner, Tensor) and inner.requires_grad:
            (moved,) = torch.autograd.grad(inner, cotangents, create_graph=keep_graph)
        return (z, moved) if keep_graph else (z.detach(), moved)

    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp_sum`: one reverse pass."""
        flat = torch.cat([g.flatten() for g in self._pull(*self._graph(x), cotangents)])
        return flat if self.indices is None else flat[self.indices]

    def _graph(self, x: Inputs) -> tuple[Tensor, list[Tensor]]:
        """Raw outputs with a graph to copies of the parameters, and those."""
        params = {k: p.clone().requires_grad_() for k, p in self.params.items()}
        with torch.enable_grad():
            return self._function(x)(params), list(params.values())

    @staticmethod
    def _pull(z: Tensor, params: list[Tensor], cotangents: Tensor, create_graph: bool = False) -> list[Tensor]:
        """``J^T v`` by parameter; zero where the outputs do not depend on it."""
        if not z.requires_grad:
            return [torch.zeros_like(p) for p in params]
        found = torch.autograd.grad(z, params, cotangents, allow_unused=True, create_graph=create_graph)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([p.numel() for p in self.params.values()])
        return {name: piece.view_as(p) for (name, p), piece in zip(self.params.items(), pieces, strict=True)}

    def _vjp_vectorized(self, context: Any, cotangents: Tensor) -> Tensor:
        n = input_length(context)
        if isinstance(context, Mapping):
            batched = {k: isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == n for k, v in context.items()}
            tensors = {k: v for k, v in context.items() if batched[k]}
            others = {k: v for k, v in context.items() if not batched[k]}
        else:
            tensors, others = {"x": context}, {}

        def one(point: dict[str, Tensor], v: Tensor) -> Tensor:
            single = {k: t.unsqueeze(0) for k, t in point.items()}
            x = {**single, **others} if isinstance(context, Mapping) else single["x"]
            return self._flat_vjp(x, v.unsqueeze(1))

        return torch.func.vmap(one)(tensors, cotangents)

    def _vjp_one_by_one(self, context: Any, cotangents: Tensor) -> Tensor:
        """For modules that cannot be vectorised over points; as exact, and slower."""
        rows = range(cotangents.shape[0])
        return torch.stack(
            [
                torch.stack([self._flat_vjp_single(slice_inputs(context, slice(i, i + 1)), v) for v in cotangents[i]])
                for i in rows
            ]
        )

    def _function(self, x: Inputs) -> Any:
        def outputs(params: dict[str, Tensor]) -> Tensor:
            values = {**params, **self.constants}
            everywhere = {place: value for name, value in values.items() for place in self._places[name]}
            return self._outputs({**everywhere, **self._buffers}, x)

        return outputs

    def _flat_vjp(self, x: Inputs, v: Tensor) -> Tensor:
        pull = torch.func.vjp(self._function(x), self.params)[1]
        (gradients,) = torch.func.vmap(pull)(v)
        return torch.cat([g.unsqueeze(-1).flatten(1) for g in gradients.values()], dim=1)

    def _flat_vjp_single(self, x: Inputs, v: Tensor) -> Tensor:
        found = self._pull(*self._graph(x), v.unsqueeze(0), create_graph=torch.is_grad_enabled())
        return torch.cat([g.flatten() for g in found])


def parameter_places(module: nn.Module) -> dict[str, list[str]]:
    """Every place of a parameter by its first name, each module counted once however many names it has."""
    first = {id(p): name for name, p in module.named_parameters()}
    out: dict[str, list[str]] = {name: [] for name in first.values()}
    for prefix, part in module.named_modules():
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
            out[first[id(p)]].append(f"{prefix}.{name}" if prefix else name)
    return out


def _touched(params: dict[str, nn.Parameter], indices: Tensor) -> tuple[set[str], Tensor]:
    """Names of the parameters that hold some of the flat indices, and the indices within those alone."""
    names, moved, start, kept = set(), torch.empty_like(indices), 0, 0
    for name, p in params.items():
        mine = (indices >= start) & (indices < start + p.numel())
        if bool(mine.any()):
            moved[mine] = indices[mine] - start + kept
            names.add(name)
            kept += p.numel()
        start += p.numel()
    return names, moved


class SubnetworkPullback(Pullback):
    """Some entries of the parameters of another pullback.

    Args:
        inner: All trainable parameters.
        indices: Entries of the flattened parameters, shape (P,).
    """

    def __init__(self, inner: Pullback, indices: Tensor) -> None:
        self.inner = inner
        self.encoder = inner.encoder
        self.indices = indices
        self.n_params = indices.numel()

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self.inner.width

    def parameter_at(self, position: int) -> str:
        """See :meth:`Pullback.parameter_at`."""
        return self.inner.parameter_at(int(self.indices[position]))

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        return self.inner.forward(x)

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return self.inner.slice_context(context, rows)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        return self.inner.vjp(context, cotangents)[..., self.indices]

    def block_term(self, context: Any, blocks: Blocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`."""
        if structure is Structure.DIAG:
            return self.inner.block_term(context, blocks, structure)[self.indices]
        return super().block_term(context, blocks, structure)

    def cross_term(self, rows: Any, columns: Any, cross: CrossBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`."""
        if structure is Structure.DIAG:
            return self.inner.cross_term(rows, columns, cross, structure)[self.indices]
        return super().cross_term(rows, columns, cross, structure)

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """See :meth:`Pullback.output_covariance`; the other parameters are known."""
        everywhere = variance.new_zeros(self.inner.n_params).index_copy(0, self.indices, variance)
        return self.inner.output_covariance(context, everywhere)

    def tile_size(self, structure: Structure, dim: int) -> int:
        """See :meth:`Pullback.tile_size`."""
        return self.inner.tile_size(structure, dim)

"""The pullback to the trainable parameters of any module by ``torch.func``, and the pullback to some entries.

While ``torch.func.functional_call`` runs, it replaces the parameters of the module for every thread: another thread
that runs the model at that time would get outputs of other weights. So ``functional_call`` runs on a copy of the
modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.pullback import Pullback, own_name, random_like, rounding
from contrastive_curvature.network.threads import private_copy

_DIRECTIONS_AT_ONCE = 5
"""In forward mode: whose outputs of one layer are in memory together."""


class ModulePullback(Pullback):
    """All trainable parameters of any module by ``torch.func``.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        only: Names of the parameters to use; ``None`` uses all trainable parameters.
    """

    def __init__(self, encoder: Encoder, only: set[str] | None = None) -> None:
        self.encoder = encoder
        trainable = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        self.params = {name: p.detach() for name, p in trainable.items() if only is None or name in only}
        self._places = parameter_places(encoder)
        others = {name: p.detach() for name, p in encoder.named_parameters() if name not in self.params}
        self._constants = {**self._everywhere(others), **dict(encoder.named_buffers())}
        self._outputs = _FunctionalEncoder(encoder)
        self._vectorizes = True
        self.n_params = sum(p.numel() for p in self.params.values())

    def keep_values(self) -> None:
        """Keep the present values of parameters and buffers, even if the encoder changes later."""
        self.params = {k: p.clone() for k, p in self.params.items()}
        self._constants = {k: t.clone() for k, t in self._constants.items()}

    @override
    def named_sizes(self) -> list[tuple[str, int]]:
        return [(own_name(name), p.numel()) for name, p in self.params.items()]

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself."""
        with torch.no_grad():
            return self.encoder(x), x

    @override
    def slice_context(self, context: Any, rows: slice) -> Any:
        return slice_inputs(context, rows)

    @override
    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        if not cotangents.shape[0]:
            return cotangents.new_zeros(0, cotangents.shape[1], self.n_params)
        flat: Tensor | None = None
        if self._vectorizes:
            try:
                flat = self._vjp_vectorized(context, cotangents)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, InputError) as error:
                # torch.func.vmap fails with many error types; the loop below works or raises the encoder's own error.
                flat = self._vjp_one_by_one(context, cotangents)
                self._vectorizes = False
                reason = str(error).splitlines()[0]
                warnings.warn(f"Jacobians are taken point by point, which is slow: {reason}", stacklevel=2)
        return self._vjp_one_by_one(context, cotangents) if flat is None else flat

    def outputs_at(self, x: Inputs, theta: Tensor) -> Tensor:
        """Return raw outputs (N, D) at other values (P,) of all trainable parameters."""
        return self._at(x, self._split(theta))

    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Pullback.jvp`."""
        z, moved = self.jvps(x, [v[None]])
        return z, moved[0]

    def jvps(self, x: Inputs, directions: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Return raw outputs (N, D) and ``J v`` (S, N, D) for parts (s, P) of the directions, which are taken in turn.

        In reverse mode, except for convolutional networks, where forward mode takes half the time: three forward passes
        a direction. Some modules lack forward mode, and it ignores ``torch.no_grad()`` and the padding index of an
        embedding, which reverse mode respects. So each product is compared with a reverse pass of a random cotangent;
        where one differs, it and those after it are taken in reverse mode.
        """
        convolutions, linear = (
            sum(isinstance(part, kind) for part in self.encoder.modules()) for kind in (_ConvNd, nn.Linear)
        )
        # A transformer has one convolution, that of its patches.
        fast = convolutions and convolutions >= linear and not torch.is_grad_enabled()
        z, products = self._forward_mode(x) if fast else self._reverse_mode(x)
        moved: list[Tensor] = []
        for some in directions:
            found = products(some)
            if found is None:
                z, products = self._reverse_mode(x)
                found = products(some)
            moved.append(found)  # type: ignore[arg-type]  # reverse mode never fails
            del some  # before the next part is made
        return z, torch.cat(moved)

    def _forward_mode(self, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Tensor | None]]:
        """Return raw outputs, and products by forward mode: ``None`` if it fails or differs from reverse mode."""
        z, params = self._graph(x)
        sizes, v = [p.numel() for p in params], random_like(z, seed=len(z))
        pulled = self._pull(z, params, v)

        def product(direction: Tensor) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda at: self._at(x, at), (self.params,), (self._split(direction),))[1]
            return moved

        def products(directions: Tensor) -> Tensor | None:
            try:
                if len(directions) == 1:
                    moved = product(directions[0])[None]  # vmap would copy the direction
                else:
                    moved = torch.func.vmap(product, chunk_size=_DIRECTIONS_AT_ONCE)(directions)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                return None
            parts = directions.split(sizes, dim=1)
            # A matrix product would add up millions of numbers in turn, whose rounding hides that the two modes agree.
            wanted = sum((part * g.flatten()).sum(1) for part, g in zip(parts, pulled, strict=True))
            # The standard deviation of a product with v is the norm.
            apart = ((moved * v).sum((1, 2)) - wanted).abs()
            right = apart <= rounding(v.dtype, v.device) * moved.flatten(1).norm(dim=1)
            return moved if bool(right.all()) else None

        return z.detach(), products

    def _reverse_mode(self, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Tensor | None]]:
        """Return raw outputs, and products as derivatives of one reverse pass with respect to its cotangent."""
        keep_graph = torch.is_grad_enabled()
        z, params = self._graph(x)
        with torch.enable_grad():
            cotangents = torch.zeros_like(z, requires_grad=True)
            pulled = self._pull(z, params, cotangents, create_graph=True)
        reached = {name: part for name, part in zip(self.params, pulled, strict=True) if part.requires_grad}

        def products(directions: Tensor) -> Tensor:
            moved = [torch.zeros_like(z)] * len(directions)
            how: dict[str, Any] = {"retain_graph": True, "create_graph": keep_graph}
            for s, v in enumerate(map(self._split, directions if reached else [])):
                along = [v[name] for name in reached]
                (moved[s],) = torch.autograd.grad(list(reached.values()), cotangents, along, **how)
            return torch.stack(moved)

        return (z if keep_graph else z.detach()), products

    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp_sum`; one reverse pass."""
        return torch.cat([g.flatten() for g in self._pull(*self._graph(x), cotangents)])

    def _graph(self, x: Inputs) -> tuple[Tensor, list[Tensor]]:
        """Return raw outputs with a graph to copies of the parameters, and these copies."""
        params = {k: p.clone().requires_grad_() for k, p in self.params.items()}
        with torch.enable_grad():
            return self._at(x, params), list(params.values())

    @staticmethod
    def _pull(z: Tensor, params: list[Tensor], cotangents: Tensor, create_graph: bool = False) -> list[Tensor]:
        """Return ``J^T v`` by parameter, zero if the outputs do not depend on the parameter."""
        if not z.requires_grad:
            return [torch.zeros_like(p) for p in params]
        how = {"allow_unused": True, "materialize_grads": True, "create_graph": create_graph}
        return list(torch.autograd.grad(z, params, cotangents, **how))

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Return views of a vector (P,), one per parameter."""
        return flat.split([p.numel() for p in self.params.values()])

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: part.view_as(p) for (name, p), part in zip(self.params.items(), self.split(flat), strict=True)}

    def _vjp_vectorized(self, context: Any, cotangents: Tensor) -> Tensor:
        n = input_length(context)
        named = context if isinstance(context, Mapping) else {"x": context}
        tensors = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == n}

        def one(point: dict[str, Tensor], v: Tensor) -> Tensor:
            single = {**named, **{k: t.unsqueeze(0) for k, t in point.items()}}
            x = single if isinstance(context, Mapping) else single["x"]
            pull = torch.func.vjp(lambda params: self._at(x, params), self.params)[1]
            (gradients,) = torch.func.vmap(pull)(v.unsqueeze(1))
            return torch.cat([g.unsqueeze(-1).flatten(1) for g in gradients.values()], dim=1)

        return torch.func.vmap(one)(tensors, cotangents)

    def _vjp_one_by_one(self, context: Any, cotangents: Tensor) -> Tensor:
        """Compute :meth:`vjp` for modules that cannot be vectorised over points: as exact, but slower."""
        keep_graph = torch.is_grad_enabled()
        points: list[Tensor] = []
        for i, rows in enumerate(cotangents):
            x = slice_inputs(context, slice(i, i + 1))
            by_row = (self._pull(*self._graph(x), v.unsqueeze(0), create_graph=keep_graph) for v in rows)
            points.append(torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in by_row]))
        return torch.stack(points)

    def _at(self, x: Inputs, params: Mapping[str, Tensor]) -> Tensor:
        """Run the encoder at some values of the parameters."""
        return self._outputs({**self._everywhere(params), **self._constants}, x)

    def _everywhere(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values under all names of each parameter."""
        return {place: value for name, value in params.items() for place in self._places[name]}


def parameter_places(module: nn.Module) -> dict[str, list[str]]:
    """Return all places of each parameter by its first name; a module counts once, even with several names."""
    first = {id(p): name for name, p in module.named_parameters()}
    out: dict[str, list[str]] = {name: [] for name in first.values()}
    for prefix, part in module.named_modules():
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
            out[first[id(p)]].append(f"{prefix}.{name}" if prefix else name)
    return out


class SubnetworkPullback(Pullback):
    """Some entries of the parameters of another pullback.

    Args:
        inner: Pullback to all trainable parameters.
        indices: Entries of the flattened parameters, shape (P,).
    """

    @classmethod
    def of_touched(cls, encoder: Encoder, indices: Tensor) -> SubnetworkPullback:
        """Return the pullback to some entries of all trainable parameters; skips parameters without such entries."""
        names, moved, start, kept = set(), torch.empty_like(indices), 0, 0
        for name, p in encoder.named_parameters():
            inside = (indices >= start) & (indices < start + p.numel())
            if p.requires_grad and bool(inside.any()):
                moved[inside] = indices[inside] - start + kept
                names.add(name)
                kept += p.numel()
            start += p.numel() if p.requires_grad else 0
        return cls(ModulePullback(encoder, names), moved)

    def __init__(self, inner: Pullback, indices: Tensor) -> None:
        self.inner, self.encoder, self.indices = inner, inner.encoder, indices
        self.n_params = indices.numel()

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self.inner.width

    @override
    def parameter_at(self, position: int) -> str:
        return self.inner.parameter_at(int(self.indices[position]))

    @override
    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        return self.inner.forward(x)

    @override
    def slice_context(self, context: Any, rows: slice) -> Any:
        return self.inner.slice_context(context, rows)

    @override
    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        return self.inner.vjp(context, cotangents)[..., self.indices]

    @override
    def jvp(self, x: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.jvp(x, self._everywhere(v))

    @override
    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        return self.inner.vjp_sum(x, cotangents)[self.indices]

    def _everywhere(self, v: Tensor) -> Tensor:
        """Place numbers (P,) in a vector of all parameters, zero elsewhere."""
        return v.new_zeros(self.inner.n_params).index_copy(0, self.indices, v)

    @override
    def diag(self, context: Any, blocks: Blocks) -> Tensor:
        return self.inner.diag(context, blocks)[self.indices]

    @override
    def cross_diag(self, rows: Any, columns: Any, cross: CrossBlocks) -> Tensor:
        return self.inner.cross_diag(rows, columns, cross)[self.indices]

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """See :meth:`Pullback.output_covariance`; the other parameters have variance zero."""
        return self.inner.output_covariance(context, self._everywhere(variance))

    @override
    def tile_diag(self, dim: int) -> int:
        return self.inner.tile_diag(dim)


class _FunctionalEncoder:
    """Raw outputs of an encoder at given values of its parameters, computed on copies of its modules.

    If the modules cannot be copied, or a copy still uses an original parameter, the modules themselves run, and no
    other thread may run them at the same time.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._originals = {id(p): p for p in encoder.parameters()}
        self._free_copies: list[Encoder] = []
        self._can_be_copied = True

    def __call__(self, values: dict[str, Tensor], x: Inputs) -> Tensor:
        """Run the encoder with values of all parameters and buffers, under all names of each."""
        # With torch's tie_weights, a module with two names would keep the replaced tensors afterwards.
        call = partial(torch.func.functional_call, parameter_and_buffer_dicts=values, args=(x,), tie_weights=False)
        own = self._free_copy()
        if own is not None:
            try:
                with MathAttention(self._originals) as watching:
                    out: Tensor = call(own)
            finally:
                self._free_copies.append(own)
            if not watching.original_used:
                return out
            self._can_be_copied = False
        with MathAttention():
            return call(self._encoder)

    def _free_copy(self) -> Encoder | None:
        """Return a copy that no thread is running; ``None`` if the encoder cannot be copied."""
        with suppress(IndexError):
            return self._free_copies.pop() if self._can_be_copied else None
        try:
            return private_copy(self._encoder)
        except Exception:
            self._can_be_copied = False
            return None


class MathAttention(TorchFunctionMode):
    """Computes attention and bags in plain operations, in this thread; torch's own settings affect the whole process.

    Args:
        originals: Tensors whose use is detected, by their ``id``.

    Attributes:
        original_used: Whether an operation has used one of these tensors.
    """

    def __init__(self, originals: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self._originals = originals or {}
        self.original_used = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or its replacement."""
        kwargs = kwargs or {}
        # Reading an attribute such as the shape does not count.
        if self._originals and getattr(func, "__name__", "") != "__get__":
            self.original_used |= any(id(leaf) in self._originals for leaf in tree_leaves((args, kwargs)))
        return _REPLACEMENTS.get(func, func)(*args, **kwargs)


def _math_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` by plain operations, which have vmap and second derivatives."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The plain operations add the mask to the scores, so a boolean mask would add ones and zeros.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *rest, **options)[0]
    return out


def _plain_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute ``F.embedding_bag`` of bags of one length by plain operations, which have vmap and second derivatives."""
    if input.ndim != 2 or max_norm is not None or scale_grad_by_freq:
        how = (offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights)
        return F.embedding_bag(input, weight, *how, include_last_offset, padding_idx)
    counts = torch.ones_like(input) if padding_idx is None else (input != padding_idx % len(weight)).long()
    counts, rows = counts.unsqueeze(2), F.embedding(input, weight)
    if mode == "max":
        # An empty bag is zero.
        return torch.where(counts.any(1), torch.where(counts > 0, rows, -torch.inf).max(1).values, 0.0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(2)
    total = (rows * counts).sum(1)
    return total / counts.sum(1).clamp(min=1) if mode == "mean" else total


def with_globals(function: Any, **names: Any) -> Any:
    """Copy a function, with other objects under some global names."""
    names = {**function.__globals__, **names}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_REPLACEMENTS: dict[Any, Any] = {
    F.embedding_bag: _plain_bag,
    F.scaled_dot_product_attention: _math_attention,
    F.multi_head_attention_forward: with_globals(
        F.multi_head_attention_forward, scaled_dot_product_attention=_math_attention
    ),
}

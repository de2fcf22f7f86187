"""Records operations that apply parameters while an encoder runs: their inputs, and where their gradients arrive.

A function mode of torch sees every function call in its own thread, from any module or ``forward``. Unlike hooks on
modules, it sees layers called through ``torch.nn.functional``, the projections inside ``nn.MultiheadAttention``, and
tokens that are added or concatenated. It does not touch the user's hooks, other threads or the modules themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from contrastive_curvature.network.module import with_globals


class BatchAxis(NamedTuple):
    """The axis of a tensor that holds the points.

    Attributes:
        axis: The axis, which holds ``(points, positions)``, flattened; one position if it holds only the points.
        minor: Whether the axis holds ``(positions, points)`` instead.
    """

    axis: int
    minor: bool = False


_IN_FRONT = BatchAxis(0)


def by_point(t: Tensor, batch_axis: BatchAxis, n: int) -> Tensor:
    """Reshape a tensor to (n, positions, *the other axes)."""
    axis, minor = batch_axis
    if minor:
        return t.unflatten(axis, (-1, n)).movedim((axis + 1, axis), (0, 1))
    return t.unflatten(axis, (n, -1)).movedim((axis, axis + 1), (0, 1))


def possible_axes(shape: torch.Size, axes: Iterable[int], n: int) -> list[BatchAxis]:
    """Return the possible axes of the points among some axes of a tensor, the likely ones first."""
    alone = [BatchAxis(j) for j in axes if shape[j] == n]
    folded = [j for j in axes if shape[j] > n and shape[j] % n == 0]
    return alone + [BatchAxis(j, minor) for minor in (False, True) for j in folded]


class ParameterSubset(NamedTuple):
    """Entries of a parameter, in the shape of a tensor with these entries: the whole parameter, or a view.

    Args:
        number: Number of the parameter.
        entries: Index of every entry in the flat parameter; ``None`` if the tensor is the parameter.
    """

    number: int
    entries: Tensor | None = None

    def indices(self, shape: torch.Size) -> Tensor:
        """Return the entries as indices, in the shape of the tensor."""
        return torch.arange(shape.numel(), device="cpu").view(shape) if self.entries is None else self.entries


@dataclass(eq=False)
class Call:
    """One call of a function that applies parameters.

    Args:
        edge: The place where the gradient with respect to the call's output arrives.
        shape: Shape of the output.
        device: Device of the output.
        dtype: Dtype of the output.
    """

    edge: GradientEdge
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype


@dataclass
class ParameterUse:
    """The use of one parameter in a call.

    Args:
        call: The call.
        subset: The parameter's entries.
        kind: ``"linear"``, ``"convolution"``, ``"embedding"`` or ``"entrywise"``.
        shape: Shape of the tensor with the entries, as passed to the function; for ``entrywise``, aligned with the
            output.
        axes: Axes of the output that may hold the points.
        source: The factor of the entries: the input of a linear layer or a convolution, the tokens of an embedding, the
            other factor of an ``entrywise`` product (``None`` for a sum).
        options: Options of the function.
        batch_axis: The axis of the points, once known.
        ordinal: Number of earlier uses of the parameter.
    """

    call: Call
    subset: ParameterSubset
    kind: str
    shape: torch.Size
    axes: tuple[int, ...]
    source: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    batch_axis: BatchAxis = _IN_FRONT
    ordinal: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Return the number of the parameter and of this use, which are the same in every batch."""
        return self.subset.number, self.ordinal


class Recorder(TorchFunctionMode):
    """Notes how parameters are used while it is active, in this thread.

    Args:
        parameters: The parameters to track.
        lookups: Numbers of the embeddings whose tokens do not depend on the points, such as position embeddings.

    Attributes:
        uses: Uses of the parameters, in the order of the calls.
        unknown: Numbers of the parameters used by a function without a rule, or by a function inside another one.
        keeps_points: Whether every function keeps each point in its place, in front.
    """

    def __init__(self, parameters: list[Tensor], lookups: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._tracked = {id(p): ParameterSubset(k) for k, p in enumerate(parameters) if p.numel()}
        # Kept alive, because a new tensor could reuse the ``id`` of a freed one.
        self._kept = list(parameters)
        self._lookups = lookups
        self._uses_of: Counter[int] = Counter()
        self.uses: list[ParameterUse] = []
        self.unknown: set[int] = set()
        self.keeps_points = True

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function, and record its use of the parameters."""
        kwargs = kwargs or {}
        self.keeps_points = self.keeps_points and _keeps_points(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **kwargs)
        out = func(*args, **kwargs)
        subsets = [subset for subset in map(self._subset, tree_leaves((args, kwargs))) if subset is not None]
        if not subsets or not any(isinstance(part, Tensor) and part.requires_grad for part in tree_leaves(out)):
            return out
        if func in _SELECTING and self._select(func, args, kwargs, out):
            return out
        before = len(self.uses)
        applied = isinstance(out, Tensor) and out.is_floating_point() and self._apply(func, args, kwargs, out)
        if applied != len(subsets):
            del self.uses[before:]
            self.unknown.update(subset.number for subset in subsets)
            return out
        # A clone, because an in-place operation on a view would lead to the view's base, past the recorded edge.
        return out.clone() if out._is_view() else out

    def proves(self, z: Tensor) -> bool:
        """Return whether the layers are right by construction: outputs of functions that keep each point in its place.

        Autograd's graph shows the uses that the mode cannot see, in a script or in another thread.
        """
        if not self.keeps_points or self.unknown or z.grad_fn is None:
            return False
        uses, stack, seen = Counter(self._uses_of), [z.grad_fn], set[Any]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                subset = self._subset(getattr(following, "variable", None))
                if subset is not None:
                    uses[subset.number] -= 1
                stack.append(following)
        return min(uses.values(), default=0) >= 0

    def _select(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> bool:
        """Track a function that only selects and moves entries of its first argument, if that is a parameter."""
        subset = self._subset(args[0]) if args else None
        if subset is None:
            return False
        if func in _KEEPING:
            self._track(out, subset)
            return True
        try:
            on_cpu = tree_map(lambda a: a.cpu() if isinstance(a, Tensor) else a, args[1:])
            entries = func(subset.indices(args[0].shape), *on_cpu, **kwargs)
        except RuntimeError:
            # This view needs the parameter's own memory order.
            return False
        for part, chosen in zip(tree_leaves(out), tree_leaves(entries), strict=True):
            self._track(part, ParameterSubset(subset.number, chosen))
        return True

    def _apply(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Tensor) -> int:
        """Record a function that applies parameters; return the number of its arguments with a rule."""
        kind, names = _RULES.get(func, ("", ()))
        if not kind or len(args) > len(names):
            return 0
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        if kind == "entrywise":
            return self._entrywise(func, options, out)
        weight, bias = (self._subset(options.get(name)) for name in ("weight", "bias"))
        if (kind == "linear" and options["weight"].ndim != 2) or (
            kind == "convolution" and out.ndim != options["weight"].ndim
        ):
            return 0
        call = _call(out)
        # The output's axes that the bias spans.
        channels = out.ndim - len(options["normalized_shape"]) if kind == "layer norm" else out.ndim - 1
        ends = range(channels, out.ndim) if kind in ("linear", "embedding", "layer norm") else (1,)
        axes = tuple(j for j in range(out.ndim) if j not in ends)
        aligned = torch.Size(size if j in ends else 1 for j, size in enumerate(out.shape))
        if weight is not None and kind == "embedding" and weight.number in self._lookups:
            rows = F.embedding(options["input"].cpu(), weight.indices(options["weight"].shape).double())
            self._track(out, ParameterSubset(weight.number, rows.long()))
        elif weight is not None and kind in ("linear", "convolution", "embedding"):
            self._add(ParameterUse(call, weight, kind, options["weight"].shape, axes, options["input"], options))
        elif weight is not None:
            with torch.no_grad():
                scaled = func(**{name: value for name, value in options.items() if name not in ("weight", "bias")})
            self._add(ParameterUse(call, weight, "entrywise", aligned, axes, scaled))
        if bias is not None:
            self._add(ParameterUse(call, bias, "entrywise", aligned, axes))
        return (weight is not None) + (bias is not None)

    def _entrywise(self, func: Any, options: dict[str, Any], out: Tensor) -> int:
        """Record a sum or a product with a parameter, or a parameter that is repeated for every point."""
        value, other = options["input"], None if func in _REPEATING else options.get("other")
        if options.get("alpha", 1) != 1 or (func not in _REPEATING and not isinstance(other, Tensor)):
            return 0
        if self._subset(value) is None:
            value, other = other, value
        elif self._subset(other) is not None:
            return 0
        subset = self._subset(value)
        if subset is None or (func in _IN_PLACE and (value is options["input"] or out._is_view())):
            return 0
        aligned = torch.Size((1,) * (out.ndim - value.ndim) + tuple(value.shape))
        if any(size not in (1, whole) for size, whole in zip(aligned, out.shape, strict=True)):
            return 0
        axes = tuple(j for j, size in enumerate(aligned) if size == 1)
        source = other if func in _PRODUCTS else None
        self._add(ParameterUse(_call(out), subset, "entrywise", aligned, axes, source))
        return 1

    def _add(self, use: ParameterUse) -> None:
        if use.source is not None:
            use.source = use.source.detach()
        use.ordinal = self._uses_of[use.subset.number]
        self._uses_of[use.subset.number] += 1
        self.uses.append(use)

    def _track(self, t: Tensor, subset: ParameterSubset) -> None:
        self._tracked[id(t)] = subset
        self._kept.append(t)

    def _subset(self, value: Any) -> ParameterSubset | None:
        return self._tracked.get(id(value)) if isinstance(value, Tensor) else None


def _call(out: Tensor) -> Call:
    return Call(get_gradient_edge(out), out.shape, out.device, out.dtype)


def _keeps_points(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function keeps each point in its place, in front, if it gets them so."""
    if func in _ROW_BY_ROW:
        return True
    if func in (F.batch_norm, F.dropout):
        return kwargs.get("training") is False  # torch names the options when it hands a call to a mode
    if func in (torch.flatten, Tensor.flatten):
        return (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) > 0
    if func in _ALONG_AN_AXIS:
        return kwargs.get("dim") in (1, -1)
    if func is Tensor.__getitem__:
        # The first columns of the outputs, as the encoder takes them.
        return isinstance(args[1], tuple) and [type(part) for part in args[1]] == [type(...), slice]
    if func not in _ENTRY_BY_ENTRY:
        return False
    # Of two tensors of other shapes, one may repeat its points along another axis.
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return len({(t.ndim, t.shape[:1]) for t in tensors}) == 1


# Without torch's override, the function's body runs under the mode, which then sees the calls inside.
_ATTENTION = with_globals(F.multi_head_attention_forward, has_torch_function=lambda _: False)

_CONVOLUTION = ("convolution", ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *_IN_PLACE)
_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
_REPEATING = (Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to)

_RULES: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.linear: ("linear", ("input", "weight", "bias")),
    F.conv1d: _CONVOLUTION,
    F.conv2d: _CONVOLUTION,
    F.embedding: ("embedding", _EMBEDDING),
    F.layer_norm: ("layer norm", ("input", "normalized_shape", "weight", "bias", "eps")),
    F.rms_norm: ("layer norm", ("input", "normalized_shape", "weight", "eps")),
    F.group_norm: ("norm", ("input", "num_groups", "weight", "bias", "eps")),
    F.batch_norm: ("norm", _BATCH_NORM),
    F.instance_norm: ("norm", (*_BATCH_NORM[:5], "use_input_stats", *_BATCH_NORM[6:])),
    **dict.fromkeys((*_SUMS, *_PRODUCTS), ("entrywise", ("input", "other"))),
    **dict.fromkeys(_REPEATING, ("entrywise", ("input", *("size",) * 8))),
}
"""Kinds of the functions that have a rule, and the names of their arguments."""

_ROW_BY_ROW = frozenset(
    (
        *(F.linear, F.conv1d, F.conv2d, F.layer_norm, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d),
        *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus, F.hardswish, F.hardsigmoid),
        *(torch.relu, torch.tanh, torch.sigmoid, Tensor.relu, Tensor.tanh, Tensor.sigmoid),
        *(Tensor.abs, Tensor.log2, Tensor.floor, Tensor.exp2, Tensor.clamp, torch.ones_like),
        *(Tensor.clone, Tensor.detach, Tensor.dim, Tensor.size),
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")),
    )
)
"""They keep the points of any tensor in its first axis."""
_ENTRY_BY_ENTRY = frozenset((*_SUMS, *_PRODUCTS, Tensor.__truediv__, Tensor.div, Tensor.__gt__, Tensor.gt, torch.where))
_ALONG_AN_AXIS = (F.normalize, Tensor.norm, Tensor.amax)

_KEEPING = (Tensor.contiguous, Tensor.float, Tensor.double, Tensor.type_as, Tensor.to, Tensor.clone)
"""They change neither the shape nor the order of the entries."""
_SELECTING = frozenset(
    (
        *_KEEPING,
        *(Tensor.__getitem__, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.squeeze),
        *(Tensor.unsqueeze, Tensor.transpose, Tensor.permute, Tensor.movedim, Tensor.split, Tensor.chunk),
        *(Tensor.unbind, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.transpose),
        *(torch.permute, torch.movedim, torch.split, torch.chunk, torch.unbind, Tensor.index_select),
    )
)
